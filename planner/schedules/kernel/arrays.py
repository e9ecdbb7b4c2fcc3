"""A scheduling problem and its orders as arrays, the form that code compiled with numba reads.

An action is an integer: the lowest `MICROBATCH_BITS` bits are the microbatch, the next two bits the kind, and the
higher bits the stage. A sequence holds the actions of all workers, worker by worker, each in order.
"""

from typing import Any, NamedTuple, TypeVar

import numpy as np
from numba import njit

from planner.schedules.kernel.problem import GRACE, Floats, Ints, Orders, SchedulingProblem

Function = TypeVar("Function")

# numba option that turns off reference counting in a function. To count the arrays of a tuple at every call would take
# ten times as long as the work itself, and is not needed, because callers hold the references.
_UNCOUNTED: dict[str, Any] = {"_nrt": False}


def inner(function: Function) -> Function:
    """Compile a function with numba to be inlined in compiled code, its only caller; it must allocate no arrays."""
    options: dict[str, Any] = {"cache": True, "forceinline": True}
    try:
        compiled: Function = njit(**options, **_UNCOUNTED)(function)
    except KeyError:  # The option `_nrt` is not public, and another version of numba may not have it.
        compiled = njit(**options)(function)
    return compiled


# Directions of a transfer: activations go down the pipeline, gradients up.
DOWN, UP = 0, 1


class Tables(NamedTuple):
    """A scheduling problem as compiled code reads it.

    The axis ``kind`` is ordered as `planner.schedules.kernel.problem.KINDS` (F, B, I, W), the axis ``direction`` as
    `DOWN` and `UP`. Floats are float64, integers int64.

    Attributes:
        worker: Worker of each stage, [stages].
        held: Stages sorted by worker, [stages].
        first_held: Index in ``held`` of each worker's first stage, [workers + 1].
        channel: Number of the channel on which a stage sends, [direction, stages]; -1 where the stage sends nothing, or
            sends to a stage of the same worker.
        channels: Number of channels.
        duration_s: Seconds of each action, [kind, stages, microbatches].
        load_s: Total seconds of each worker's actions, [workers].
        transmission_s: Transmission seconds of a stage's output, [direction, stages, microbatches].
        latency_s: Propagation seconds of a stage's output, [direction, stages].
        activation_bytes: Bytes held from F to the end of I, [stages, microbatches].
        weight_bytes: Bytes held from the end of I until the end of W, [stages, microbatches]; if they exceed
            ``activation_bytes``, from the start of I on.
        largest_bytes: Largest ``activation_bytes`` of any microbatch, [stages].
        capacity_bytes: Bytes that activations may fill, times 1 + `GRACE`, [workers].
        reserve_bytes: Largest number of bytes that one backward recomputes, [workers].
        in_flight: Limit on the microbatches between the start of F and the end of I or B, [stages].
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
        # Always of one type and order: another one would be compiled again.
        np.ascontiguousarray(duration_s, dtype=np.float64),
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
    """Return `Tables.channel` and the number of channels: one for each ordered pair of workers with transfers."""
    channel = np.full((2, problem.stages), -1, dtype=np.int64)
    numbers: dict[tuple[int, int], int] = {}
    for stage, between in enumerate(problem.between_workers()):
        if between:
            left, right = problem.workers[stage], problem.workers[stage + 1]
            channel[DOWN, stage] = numbers.setdefault((left, right), len(numbers))
            channel[UP, stage + 1] = numbers.setdefault((right, left), len(numbers))
    return channel, len(numbers)


MICROBATCH_BITS = 16
MICROBATCH_MASK = (1 << MICROBATCH_BITS) - 1
KIND_BITS = 2
KIND_MASK = (1 << KIND_BITS) - 1
KIND_COUNT = 1 << KIND_BITS

# Entry of a sequence in place of an action that was removed.
NOTHING = -1


@inner
def encode(stage: int, kind: int, microbatch: int) -> int:
    """Return an action as an integer."""
    return ((stage << KIND_BITS | kind) << MICROBATCH_BITS) | microbatch


@inner
def decode(number: int) -> tuple[int, int, int]:
    """Return the stage, kind and microbatch of an action's integer."""
    group = number >> MICROBATCH_BITS
    return group >> KIND_BITS, group & KIND_MASK, number & MICROBATCH_MASK


def to_sequence(orders: Orders) -> Ints:
    """Return the actions as integers, [actions]."""
    group = orders.stage.astype(np.int64) << KIND_BITS | orders.kind
    return np.asarray(group << MICROBATCH_BITS | orders.microbatch, dtype=np.int64)


def to_orders(sequence: Ints, first: Ints) -> Orders:
    """Return the orders of a sequence without its entries `NOTHING`.

    ``first`` is the index of each worker's first action, [workers + 1].
    """
    kept = sequence != NOTHING
    before = np.concatenate([[0], np.cumsum(kept)])
    group, microbatch = sequence[kept] >> MICROBATCH_BITS, sequence[kept] & MICROBATCH_MASK
    kind, stage = (group & KIND_MASK).astype(np.int8), (group >> KIND_BITS).astype(np.int32)
    return Orders(before[first].astype(np.int64), kind, stage, microbatch.astype(np.int32))


def first_actions(problem: SchedulingProblem, split: bool) -> Ints:
    """Return the index of each worker's first action, [workers + 1].

    A stage has the actions F, I and W for each microbatch with ``split``, otherwise F and B.
    """
    each = problem.microbatches * (3 if split else 2)
    counts = np.bincount(problem.workers, minlength=problem.worker_count) * each
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
