"""Lower bounds on the makespan of any order of F (forward), I (input gradient) and W (weight gradient).

The bound is the largest of these times, over all workers, stages and channels:

- the earliest start of a worker's first F, plus all actions of the worker;
- the same start, plus all F and I of the worker, plus the shortest time from the end of an I to the end of the step;
- the round trip of one microbatch through all stages;
- the earliest start of a channel's first transfer, plus all its transmissions, plus the shortest time after the last;
- the time in which all microbatches pass through a stage or worker that, because of memory or ``in_flight``, can hold
  only some microbatches at once.

Measured on 8 to 16 stages, the bound is within 0.2 % of the optimum for many microbatches, and up to a third below the
optimum for few microbatches.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from planner.schedules.kernel.problem import Floats, SchedulingProblem


@dataclass(frozen=True, slots=True)
class _Paths:
    """Shortest times between events of a microbatch in a stage, seconds, each [stages, microbatches].

    Attributes:
        head: Seconds from the beginning of the step to the start of F.
        trip: Seconds from the start of F to the end of I.
        tail: Seconds from the end of I to the end of the step.
        rest: Seconds from the start of F to the end of the step.
        down: Seconds from the end of F to the arrival at the next stage.
        up: Seconds from the end of I to the arrival at the preceding stage.
    """

    head: Floats
    trip: Floats
    tail: Floats
    rest: Floats
    down: Floats
    up: Floats


def lower_bound_s(problem: SchedulingProblem) -> float:
    """Return a lower bound on the makespan of any order of F, I and W (or B), seconds."""
    paths = _paths(problem)
    bounds = [float(paths.rest[0].max()), *_channel_bounds_s(problem, paths)]
    for worker in range(problem.worker_count):
        stages = list(problem.stages_of(worker))
        head = float(paths.head[stages].min())
        ahead = problem.forward_s[stages].sum() + problem.backward_input_s[stages].sum()
        bounds.append(head + ahead + problem.backward_weight_s[stages].sum())
        bounds.append(head + ahead + paths.tail[stages].min())
        held = problem.activation_bytes[stages] * paths.trip[stages]
        held = held + problem.recomputed_bytes[stages] * problem.backward_input_s[stages]
        held = held + problem.weight_bytes[stages] * problem.backward_weight_s[stages]
        if held.sum() > 0 and problem.capacity_bytes[worker] > 0:
            bounds.append(head + held.sum() / problem.capacity_bytes[worker])
        bounds.extend(_window_bound_s(problem, paths, stage) for stage in stages)
    return max(bounds)


def _paths(problem: SchedulingProblem) -> _Paths:
    shape = problem.forward_s.shape
    down, up = np.zeros(shape), np.zeros(shape)
    for stage, between in enumerate(problem.between_workers()):
        if between:
            down[stage] = problem.forward_transmission_s[stage] + problem.forward_latency_s[stage]
            up[stage + 1] = problem.backward_transmission_s[stage] + problem.backward_latency_s[stage]
    head, trip, tail, rest = (np.zeros(shape) for _ in range(4))
    tail[0] = problem.backward_weight_s[0]
    for stage in range(1, problem.stages):
        before = stage - 1
        head[stage] = head[before] + problem.forward_s[before] + down[before]
        drain = up[stage] + problem.backward_input_s[before] + tail[before]
        tail[stage] = np.maximum(problem.backward_weight_s[stage], drain)
    for stage in reversed(range(problem.stages)):
        trip[stage] = problem.forward_s[stage] + problem.backward_input_s[stage]
        if stage < problem.stages - 1:
            trip[stage] += down[stage] + trip[stage + 1] + up[stage + 1]
        rest[stage] = trip[stage] + tail[stage]
    return _Paths(head, trip, tail, rest, down, up)


def _window_bound_s(problem: SchedulingProblem, paths: _Paths, stage: int) -> float:
    """Return the bound by the number n of microbatches that a stage can hold at once.

    At least ceil(M / n) of the M microbatches pass through the stage one after the other.
    """
    head, rest, hold = float(paths.head[stage].min()), float(paths.rest[stage].min()), float(paths.trip[stage].min())
    rounds = -(-problem.microbatches // max(1, problem.in_flight[stage]))
    bound_s = head + (rounds - 1) * hold + rest
    least_bytes = float(problem.activation_bytes[stage].min())
    room = float(problem.capacity_bytes[problem.workers[stage]]) / least_bytes if least_bytes else np.inf
    if not 1 <= room < problem.microbatches:
        return bound_s
    if np.all(problem.weight_bytes[stage] >= problem.activation_bytes[stage]):
        hold += float(problem.backward_weight_s[stage].min())
    rounds = -(-problem.microbatches // int(room + 1e-9))
    return max(bound_s, head + (rounds - 1) * hold + rest)


def _channel_bounds_s(problem: SchedulingProblem, paths: _Paths) -> list[float]:
    """Return the bound by each channel: earliest first transfer, all transmissions, shortest rest after the last."""
    parts: dict[tuple[int, int], list[tuple[float, float, float]]] = defaultdict(list)
    for stage, between in enumerate(problem.between_workers()):
        if not between:
            continue
        left, right = problem.workers[stage], problem.workers[stage + 1]
        begin = (paths.head[stage] + problem.forward_s[stage]).min()
        after = problem.forward_latency_s[stage] + paths.rest[stage + 1].min()
        parts[left, right].append((begin, problem.forward_transmission_s[stage].sum(), after))
        begin = (paths.head[stage + 1] + paths.trip[stage + 1]).min()
        after = problem.backward_latency_s[stage] + (problem.backward_input_s[stage] + paths.tail[stage]).min()
        parts[right, left].append((begin, problem.backward_transmission_s[stage].sum(), after))
    return [
        float(
            min(begin for begin, _, _ in each) + sum(load for _, load, _ in each) + min(after for _, _, after in each)
        )
        for each in parts.values()
    ]
