"""Orders as one array of whole numbers, the form that compiled searches shuffle.

An action is a number: its microbatch in the lowest `MICROBATCH_BITS` bits, above it two bits of its kind, above them
its stage. A sequence is all workers' actions, one worker after the other.
"""

import numpy as np

from planner.schedules.kernel.compiled import inner
from planner.schedules.kernel.orders import Orders
from planner.schedules.kernel.problem import SchedulingProblem
from planner.schedules.kernel.tables import Ints

MICROBATCH_BITS = 16
MICROBATCH_MASK = (1 << MICROBATCH_BITS) - 1
KIND_BITS = 2
KIND_MASK = (1 << KIND_BITS) - 1
KIND_COUNT = 1 << KIND_BITS

# Takes the place of an action that was dropped.
NOTHING = -1


@inner
def encode(stage: int, kind: int, microbatch: int) -> int:
    """Return an action's number."""
    return ((stage << KIND_BITS | kind) << MICROBATCH_BITS) | microbatch


@inner
def decode(number: int) -> tuple[int, int, int]:
    """Return the stage, kind and microbatch of an action's number."""
    group = number >> MICROBATCH_BITS
    return group >> KIND_BITS, group & KIND_MASK, number & MICROBATCH_MASK


def to_sequence(orders: Orders) -> Ints:
    """Return the orders' actions as numbers, [actions]."""
    group = orders.stage.astype(np.int64) << KIND_BITS | orders.kind
    return np.asarray(group << MICROBATCH_BITS | orders.microbatch, dtype=np.int64)


def to_orders(sequence: Ints, first: Ints) -> Orders:
    """Return the orders that a sequence says.

    Args:
        sequence: Actions as numbers; `NOTHING` is left out.
        first: Where each worker's actions begin, [workers + 1].
    """
    kept = sequence != NOTHING
    before = np.concatenate([[0], np.cumsum(kept)])
    group, microbatch = sequence[kept] >> MICROBATCH_BITS, sequence[kept] & MICROBATCH_MASK
    kind, stage = (group & KIND_MASK).astype(np.int8), (group >> KIND_BITS).astype(np.int32)
    return Orders(before[first].astype(np.int64), kind, stage, microbatch.astype(np.int32))


def first_actions(problem: SchedulingProblem, split: bool) -> Ints:
    """Return where each worker's actions begin when each stage does F and B, or F, I and W, [workers + 1]."""
    each = problem.microbatches * (3 if split else 2)
    counts = np.bincount(problem.workers, minlength=problem.worker_count) * each
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
