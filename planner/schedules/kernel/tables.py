"""A scheduling problem as the plain arrays that compiled code reads."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.schedules.kernel.problem import Floats, SchedulingProblem

Ints = NDArray[np.int64]

# Directions of a transfer: activations go down the pipeline, gradients up.
DOWN, UP = 0, 1

# Bytes and limits are compared with this much grace, for sums of floats in another order.
GRACE = 1e-9


class Tables(NamedTuple):
    """What compiled schedulers read; a kind is its number in `planner.schedules.kernel.orders`.

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
        alike: Whether microbatches are interchangeable.
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
    alike: bool


def tables_of(problem: SchedulingProblem) -> Tables:
    """Return the problem's tables."""
    stages, microbatches = problem.stages, problem.microbatches
    worker = np.array(problem.workers, dtype=np.int64)
    counts = np.bincount(worker, minlength=problem.worker_count)
    channel, channels = _channels(problem)
    transmission_s, latency_s = np.zeros((2, stages, microbatches)), np.zeros((2, stages))
    transmission_s[DOWN, :-1], transmission_s[UP, 1:] = problem.forward_occupancy_s, problem.backward_occupancy_s
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
        problem.has_alike_microbatches,
    )


def _channels(problem: SchedulingProblem) -> tuple[Ints, int]:
    """Number the ordered pairs of workers that send to each other."""
    channel = np.full((2, problem.stages), -1, dtype=np.int64)
    numbers: dict[tuple[int, int], int] = {}
    for stage, crossing in enumerate(problem.crossings()):
        if crossing:
            left, right = problem.workers[stage], problem.workers[stage + 1]
            channel[DOWN, stage] = numbers.setdefault((left, right), len(numbers))
            channel[UP, stage + 1] = numbers.setdefault((right, left), len(numbers))
    return channel, len(numbers)
