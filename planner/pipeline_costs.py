"""A pipeline of a plan as a scheduler sees it: what each stage's actions and transfers take on steady links."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from planner.memory import standing_bytes, state_bytes
from planner.plan import Pipeline, Replica, Stage
from planner.profile import ComputeTimes
from planner.scenario import Scenario
from planner.schedules.problem import SchedulingProblem
from planner.steady_path import SteadyPath, nominal_path

Floats = NDArray[np.float64]


def replica_times(scenario: Scenario, stage: Stage, replica: Replica, samples: int) -> ComputeTimes:
    """Return what one microbatch of ``samples`` takes on one replica.

    Raises:
        InputError: The profile has no times for its device kind or its degree of tensor parallelism.
    """
    model = scenario.model.at_degree(replica.tensor_parallel)
    kind = scenario.cluster.by_name[replica.device].kind
    return model.times(stage.first_layer, stage.end_layer, kind, samples)


def scheduling_problem(
    pipeline: Pipeline, scenario: Scenario, path: Callable[[str, str], SteadyPath] | None = None
) -> SchedulingProblem:
    """Return one pipeline as a scheduling problem; a stage is as slow as its slowest replica.

    Args:
        pipeline: Of a plan for the scenario.
        scenario: Gives times, sizes and links.
        path: The path from one device to another; the declared bandwidths and latencies if None.
    """
    find_path = path or (lambda source, target: nominal_path(scenario, source, target))
    sizes, which = np.unique(np.array(pipeline.microbatches), return_inverse=True)
    times = np.array([[_slowest(scenario, stage, int(size)) for size in sizes] for stage in pipeline.stages])
    boundaries = [
        (_crossing(scenario, find_path, left, right, sizes), _crossing(scenario, find_path, right, left, sizes))
        for left, right in zip(pipeline.stages, pipeline.stages[1:], strict=False)
    ]
    occupancy = np.array([[way[0] for way in both] for both in boundaries]).reshape(-1, 2, len(sizes))[:, :, which]
    latency = np.array([[way[1] for way in both] for both in boundaries]).reshape(-1, 2)
    held = np.array([_activation_bytes(scenario, stage, sizes) for stage in pipeline.stages])[:, :, which]
    launch_s = scenario.effects.compute.launch_overhead_s
    return SchedulingProblem(
        pipeline.workers,
        tuple(stage.in_flight for stage in pipeline.stages),
        times[:, which, 0] + launch_s,
        times[:, which, 1] + launch_s,
        times[:, which, 2],
        occupancy[:, 0],
        occupancy[:, 1],
        latency[:, 0],
        latency[:, 1],
        held[:, 0],
        held[:, 1],
        _capacity_bytes(pipeline, scenario),
    )


def _slowest(scenario: Scenario, stage: Stage, samples: int) -> tuple[float, float, float]:
    times = [
        replica_times(scenario, stage, replica, end - first)
        for replica, (first, end) in zip(stage.replicas, stage.intervals(samples), strict=True)
        if end > first
    ]
    return (
        max(each.forward_s for each in times),
        max(each.backward_input_s for each in times),
        max(each.backward_weight_s for each in times),
    )


def _crossing(
    scenario: Scenario,
    find_path: Callable[[str, str], SteadyPath],
    senders: Stage,
    receivers: Stage,
    sizes: NDArray[np.int64],
) -> tuple[list[float], float]:
    """Seconds for which each microbatch size keeps the slowest pair of replicas busy, and the longest latency."""
    if senders.replicas == receivers.replicas:
        return [0.0] * len(sizes), 0.0
    boundary = min(senders.end_layer, receivers.end_layer) - 1
    sample_bytes = scenario.model.layers[boundary].output_bytes
    busy_s, latency_s = [0.0] * len(sizes), 0.0
    for index, size in enumerate(sizes.tolist()):
        for sender, (start, stop) in zip(senders.replicas, senders.intervals(size), strict=True):
            for receiver, (first, end) in zip(receivers.replicas, receivers.intervals(size), strict=True):
                samples = min(stop, end) - max(start, first)
                if samples > 0:
                    path = find_path(sender.device, receiver.device)
                    busy_s[index] = max(busy_s[index], path.occupancy_s(samples * sample_bytes))
                    latency_s = max(latency_s, path.latency_s)
    return busy_s, latency_s


def _activation_bytes(scenario: Scenario, stage: Stage, sizes: NDArray[np.int64]) -> list[list[float]]:
    """Bytes from forward to backward, and of these until the weight gradient, on the replica that holds the most.

    Assumed: all of a microbatch's activations stay until its weight gradient. Of a transformer layer most do
    (Qi et al., Zero Bubble Pipeline Parallelism, 2024, count 32 of 34 + 5 as/h units).
    """
    held: list[float] = []
    for size in sizes.tolist():
        each = (
            (end - first) * _sample_bytes(scenario, stage, replica)
            for replica, (first, end) in zip(stage.replicas, stage.intervals(size), strict=True)
        )
        held.append(max(each))
    return [held, held]


def _sample_bytes(scenario: Scenario, stage: Stage, replica: Replica) -> int:
    model = scenario.model.at_degree(replica.tensor_parallel)
    return model.activation_bytes(stage.first_layer, stage.end_layer)


def _capacity_bytes(pipeline: Pipeline, scenario: Scenario) -> Floats:
    """Bytes that each worker's activations may fill, in terms of the replica that holds the most of a microbatch."""
    capacity = np.full(max(pipeline.workers) + 1, np.inf)
    for worker in range(len(capacity)):
        stages = [stage for stage, holder in zip(pipeline.stages, pipeline.workers, strict=True) if holder == worker]
        largest = max(stages[0].most_samples(pipeline.microbatches))
        for index, samples in enumerate(stages[0].most_samples(pipeline.microbatches)):
            replica = stages[0].replicas[index]
            free = min(scenario.cluster.by_name[device].memory_bytes for device in replica.devices)
            states = [_states(scenario, stage, replica) for stage in stages]
            standing = [standing_bytes(scenario, stage, replica, samples) for stage in stages]
            # Framework and workspace are there once, whatever the number of stages.
            free -= sum(states) + max(every - own for every, own in zip(standing, states, strict=True))
            if samples:
                capacity[worker] = min(capacity[worker], free * largest / samples)
    return capacity


def _states(scenario: Scenario, stage: Stage, replica: Replica) -> int:
    return state_bytes(scenario, stage.first_layer, stage.end_layer, replica.tensor_parallel)
