"""Orders as one array of whole numbers, the form that compiled searches shuffle.

An action is a number: its microbatch in the lowest `MICROBATCH_BITS` bits, above it two bits of its kind, above them
its stage. A sequence is all workers' actions, one worker after the other.
"""

from typing import Any, NamedTuple, TypeVar

import numpy as np
from numba import njit

from planner.schedules.kernel.problem import GRACE, Floats, Ints, Orders, SchedulingProblem

Function = TypeVar("Function")

# Numba's reference counts are kept by the callers: counting the arrays of a tuple anew at every call would take ten
# times as long as the work.
_UNCOUNTED: dict[str, Any] = {"_nrt": False}


def inner(function: Function) -> Function:
    """Compile a function that allocates no arrays and is called from compiled code only."""
    options: dict[str, Any] = {"cache": True, "forceinline": True}
    try:
        compiled: Function = njit(**options, **_UNCOUNTED)(function)
    except KeyError:  # The option has no public name: a numba without it counts.
        compiled = njit(**options)(function)
    return compiled


# Directions of a transfer: activations go down the pipeline, gradients up.
DOWN, UP = 0, 1


class Tables(NamedTuple):
    """What compiled schedulers read; a kind is its number in `planner.schedules.kernel.problem`.

    Attributes:
        worker: Of each stage, [stages].
        held: Stages, worker by worker, [stages].
        first_held: Where each worker's stages begin in ``held``, [workers + 1].
        channel: Number of the channel that a stage sends on, -1 where it sends nothing or within its worker,
            [direction, stages].
        channels: Their count.
        duration_s: Seconds, [kind, stages, microbatches].
        load_s: Seconds of each worker's actions together, [workers].
        transmission_s: Seconds of what a stage sends, [direction, stages, microbatches].
        latency_s: Seconds of what a stage sends, [direction, stages].
        activation_bytes: Held from F to the end of I, [stages, microbatches].
        weight_bytes: Held until the end of W, from the start of I where they are more, [stages, microbatches].
        largest_bytes: The most activation bytes of any microbatch, [stages].
        capacity_bytes: [workers], a grain above the problem's.
        reserve_bytes: What the backward that recomputes the most takes, [workers].
        in_flight: [stages].
        equal_microbatches: Whether all microbatches take the same times and bytes, so that they are interchangeable.
    """

    worker: Ints
    held: Ints
    first_held: Ints
    channel: Ints
    channels: int
    duration_s: Floats
    load_s: Floats
    transmission_s: Floats
    latency_s: Floats
    activation_bytes: Floats
    weight_bytes: Floats
    largest_bytes: Floats
    capacity_bytes: Floats
    reserve_bytes: Floats
    in_flight: Ints
    equal_microbatches: bool


def tables_of(problem: SchedulingProblem) -> Tables:
    """Return the problem's tables."""
    stages, microbatches = problem.stages, problem.microbatches
    worker = np.array(problem.workers, dtype=np.int64)
    counts = np.bincount(worker, minlength=problem.worker_count)
    channel, channels = _channels(problem)
    transmission_s, latency_s = np.zeros((2, stages, microbatches)), np.zeros((2, stages))
    transmission_s[DOWN, :-1], transmission_s[UP, 1:] = problem.forward_transmission_s, problem.backward_transmission_s
    latency_s[DOWN, :-1], latency_s[UP, 1:] = problem.forward_latency_s, problem.backward_latency_s
    inputs_s, weights_s = problem.backward_input_s, problem.backward_weight_s
    duration_s = np.stack([problem.forward_s, inputs_s + weights_s, inputs_s, weights_s])
    return Tables(
        worker,
        np.argsort(worker, kind="stable"),
        np.concatenate([[0], np.cumsum(counts)]),
        channel,
        channels,
        duration_s,
        np.bincount(worker, duration_s[:2].sum(axis=(0, 2)), problem.worker_count).astype(np.float64),
        transmission_s,
        latency_s,
        np.ascontiguousarray(problem.activation_bytes, dtype=np.float64),
        np.ascontiguousarray(problem.weight_bytes, dtype=np.float64),
        np.asarray(problem.activation_bytes, dtype=np.float64).max(axis=1),
        np.asarray(problem.capacity_bytes, dtype=np.float64) * (1 + GRACE),
        problem.reserve_bytes,
        np.array(problem.in_flight, dtype=np.int64),
        problem.has_equal_microbatches,
    )


def _channels(problem: SchedulingProblem) -> tuple[Ints, int]:
    """Number the ordered pairs of workers that send to each other."""
    channel = np.full((2, problem.stages), -1, dtype=np.int64)
    numbers: dict[tuple[int, int], int] = {}
    for stage, crossing in enumerate(problem.between_workers()):
        if crossing:
            left, right = problem.workers[stage], problem.workers[stage + 1]
            channel[DOWN, stage] = numbers.setdefault((left, right), len(numbers))
            channel[UP, stage + 1] = numbers.setdefault((right, left), len(numbers))
    return channel, len(numbers)


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
