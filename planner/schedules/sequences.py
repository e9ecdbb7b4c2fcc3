"""Orders as one array of whole numbers, the form that compiled searches shuffle.

An action is the number ``(stage * 4 + kind) * microbatches + microbatch``; a sequence is all workers' actions, one
worker after the other.
"""

import numpy as np

from planner.schedules.orders import Orders
from planner.schedules.problem import SchedulingProblem
from planner.schedules.tables import Ints

KIND_COUNT = 4

# Takes the place of an action that was dropped.
NOTHING = -1


def to_sequence(orders: Orders, microbatches: int) -> Ints:
    """Return the orders' actions as numbers, [actions]."""
    group = orders.stage.astype(np.int64) * KIND_COUNT + orders.kind
    return group * microbatches + orders.microbatch


def to_orders(sequence: Ints, first: Ints, microbatches: int) -> Orders:
    """Return the orders that a sequence says.

    Args:
        sequence: Actions as numbers; `NOTHING` is left out.
        first: Where each worker's actions begin, [workers + 1].
        microbatches: Their count.
    """
    kept = sequence != NOTHING
    before = np.concatenate([[0], np.cumsum(kept)])
    group, microbatch = np.divmod(sequence[kept], microbatches)
    stage, kind = np.divmod(group, KIND_COUNT)
    return Orders(
        before[first].astype(np.int64), kind.astype(np.int8), stage.astype(np.int32), microbatch.astype(np.int32)
    )


def first_actions(problem: SchedulingProblem, split: bool) -> Ints:
    """Return where each worker's actions begin when each stage does F and B, or F, I and W, [workers + 1]."""
    each = problem.microbatches * (3 if split else 2)
    counts = np.bincount(problem.workers, minlength=problem.worker_count) * each
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
