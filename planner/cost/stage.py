"""Convert pipelines to scheduling problems: durations of each stage's actions and transfers at declared rates."""

from dataclasses import replace
from functools import lru_cache

import numpy as np

from planner.cost.layers import with_launches
from planner.cost.link_sharing import boundary_samples
from planner.cost.memory import (
    deferred_bytes,
    recomputed_bytes,
    saved_activation_bytes,
    split_workspace_bytes,
    state_bytes,
    workspace_bytes,
)
from planner.cost.network import message_bytes, nominal_path
from planner.cost.tensor_parallel import interconnect, with_group_sums, with_received
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.scenario.profile import ComputeTimes
from planner.scenario.scenario import Scenario
from planner.schedules.kernel.problem import Floats, Ints, SchedulingProblem


def replica_times(scenario: Scenario, stage: Stage, replica: Replica, samples: int) -> ComputeTimes:
    """Return the compute times of a replica for a microbatch of ``samples``.

    On a tensor-parallel group the times include the sums over its devices. If the stage recomputes, the time of the
    input gradient includes another forward.

    Raises:
        InputError: The profile has no times for the replica's device kind or degree of tensor parallelism.
    """
    model = scenario.model.at_degree(replica.tensor_parallel)
    kind = scenario.cluster.by_name[replica.device].kind
    times = model.times(stage.first_layer, stage.end_layer, kind, samples)
    group = interconnect(scenario, replica.devices) if replica.partners and samples else None
    if group is not None:
        times = with_group_sums(times, scenario, stage.layers, samples, group)
    if stage.recompute:
        times = replace(times, backward_input_s=times.forward_s + times.backward_input_s)
    return times


def stage_times(scenario: Scenario, pipeline: Pipeline, index: int, replica: Replica, samples: int) -> ComputeTimes:
    """Return the `replica_times` of a pipeline's stage, with the passing on of what other stages send to a group.

    Stages on the same devices hand over in memory.

    Raises:
        InputError: As `replica_times`.
    """
    times = replica_times(scenario, pipeline.stages[index], replica, samples)
    if not replica.partners or not samples:
        return times
    return with_received(
        times, interconnect(scenario, replica.devices), *_received_bytes(scenario, pipeline, index, samples)
    )


def _received_bytes(scenario: Scenario, pipeline: Pipeline, index: int, samples: int) -> tuple[int, int]:
    """Return the bytes of the input and of the output's gradient that other workers send to a stage."""
    workers, stage = pipeline.workers, pipeline.stages[index]

    def sent_bytes(other: int, last_layer: int) -> int:
        comes = 0 <= other < len(workers) and workers[other] != workers[index]
        return samples * scenario.model.layers[last_layer].output_bytes if comes else 0

    return sent_bytes(index - 1, stage.first_layer - 1), sent_bytes(index + 1, stage.end_layer - 1)


# Cached, because every step calls this for its plan.
@lru_cache(maxsize=32)
def scheduling_problems(plan: Plan, scenario: Scenario) -> tuple[SchedulingProblem, ...]:
    """Return the pipelines of a plan as scheduling problems."""
    return tuple(scheduling_problem(pipeline, scenario, plan.compression) for pipeline in plan.pipelines)


def scheduling_problem(pipeline: Pipeline, scenario: Scenario, compression: str = "none") -> SchedulingProblem:
    """Return one pipeline as a scheduling problem, in which a stage takes the time of its slowest replica.

    ``compression`` is one of `planner.scenario.training.COMPRESSIONS`.
    """
    sizes, which = distinct_sizes(pipeline.microbatches)
    times = np.array(
        [[_slowest(scenario, pipeline, index, size) for size in sizes] for index in range(len(pipeline.stages))]
    )
    boundaries = [
        [_transfers(scenario, compression, *ends, sizes) for ends in ((left, right), (right, left))]
        for left, right in zip(pipeline.stages, pipeline.stages[1:], strict=False)
    ]
    transmission = np.array([[way[0] for way in both] for both in boundaries]).reshape(-1, 2, len(sizes))[:, :, which]
    latency = np.array([[way[1] for way in both] for both in boundaries]).reshape(-1, 2)
    held = np.array([_activation_bytes(scenario, stage, sizes) for stage in pipeline.stages])[:, :, which]
    return SchedulingProblem(
        pipeline.workers,
        tuple(stage.in_flight for stage in pipeline.stages),
        times[:, which, 0],
        times[:, which, 1],
        times[:, which, 2],
        transmission[:, 0],
        transmission[:, 1],
        latency[:, 0],
        latency[:, 1],
        held[:, 0],
        held[:, 1],
        _capacity_bytes(pipeline, scenario),
    )


# Cached, because the candidates of a search have few different microbatches.
@lru_cache(maxsize=256)
def distinct_sizes(microbatches: tuple[int, ...]) -> tuple[tuple[int, ...], Ints]:
    """Return the different sizes of microbatches, rising, and the index of each microbatch's size."""
    sizes = sorted(set(microbatches))
    index = {size: place for place, size in enumerate(sizes)}
    which = np.array([index[size] for size in microbatches], np.int64)
    which.setflags(write=False)
    return tuple(sizes), which


def _slowest(scenario: Scenario, pipeline: Pipeline, index: int, samples: int) -> tuple[float, float, float]:
    """Return the seconds of forward, input gradient and weight gradient, each the maximum over the replicas."""
    stage = pipeline.stages[index]
    times = [
        with_launches(stage_times(scenario, pipeline, index, replica, stop - start), scenario)
        for replica, (start, stop) in zip(stage.replicas, stage.intervals(samples), strict=True)
        if stop > start
    ]
    return (
        max(each.forward_s for each in times),
        max(each.backward_input_s for each in times),
        max(each.backward_weight_s for each in times),
    )


def _transfers(
    scenario: Scenario, compression: str, senders: Stage, receivers: Stage, sizes: tuple[int, ...]
) -> tuple[list[float], float]:
    """Return transmission seconds for each microbatch size, and the latency: maxima over the pairs of replicas."""
    if senders.replicas == receivers.replicas:
        return [0.0] * len(sizes), 0.0
    sample_bytes = scenario.model.layers[min(senders.end_layer, receivers.end_layer) - 1].output_bytes
    transmission_s, latency_s = [0.0] * len(sizes), 0.0
    for index, size in enumerate(sizes):
        for (source, target), samples in boundary_samples(senders, receivers, size).items():
            path = nominal_path(scenario, source, target)
            size_bytes = message_bytes(scenario, compression, source, target, samples, sample_bytes)
            transmission_s[index] = max(transmission_s[index], path.transmission_s(size_bytes))
            latency_s = max(latency_s, path.propagation_s(size_bytes))
    return transmission_s, latency_s


def _activation_bytes(scenario: Scenario, stage: Stage, sizes: tuple[int, ...]) -> list[list[float]]:
    """Return bytes on the most loaded replica, [2, sizes]: from forward to input gradient, and to the weight gradient.

    The rows are equal for a stage that does not recompute and whose split backward was not measured.
    """
    degrees = [replica.tensor_parallel for replica in stage.replicas]
    return [
        [
            max((stop - start) * each for (start, stop), each in zip(stage.intervals(size), of_sample, strict=True))
            for size in sizes
        ]
        for of_sample in (
            [saved_activation_bytes(scenario, stage, degree) for degree in degrees],
            [deferred_bytes(scenario, stage, degree) for degree in degrees],
        )
    ]


def _capacity_bytes(pipeline: Pipeline, scenario: Scenario) -> Floats:
    """Return the bytes free for each worker's activations, [workers].

    The replicas of a worker may take different numbers of samples. The free bytes of each replica are scaled to the
    replica with the most samples, and the least of them is returned.
    """
    capacity = np.full(max(pipeline.workers) + 1, np.inf)
    for worker in range(len(capacity)):
        stages = [stage for stage, holder in zip(pipeline.stages, pipeline.workers, strict=True) if holder == worker]
        largest = max(stages[0].most_samples(pipeline.microbatches))
        for index, samples in enumerate(stages[0].most_samples(pipeline.microbatches)):
            replica = stages[0].replicas[index]
            free = min(scenario.cluster.by_name[device].memory_bytes for device in replica.devices)
            degree = replica.tensor_parallel
            free -= sum(state_bytes(scenario, stage.first_layer, stage.end_layer, degree) for stage in stages)
            # Framework and workspace count once, whatever the number of stages.
            free -= scenario.effects.memory.framework_bytes
            free -= max(_beside_bytes(scenario, stage, samples, degree) for stage in stages)
            if samples:
                capacity[worker] = min(capacity[worker], free * largest / samples)
    return capacity


def _beside_bytes(scenario: Scenario, stage: Stage, samples: int, degree: int) -> int:
    """Return the most bytes that a backward, or a part of a split one, holds beside what the scheduling problem counts.

    That is `SchedulingProblem.activation_bytes` with `SchedulingProblem.recomputed_bytes`.
    """
    saved = saved_activation_bytes(scenario, stage, degree)
    whole = samples * (saved + recomputed_bytes(scenario, stage, degree))
    counted = samples * max(saved, deferred_bytes(scenario, stage, degree))
    of_input, of_weight = split_workspace_bytes(scenario, stage, samples, degree)
    unsplit = workspace_bytes(scenario, stage, samples, degree)
    return max(whole + max(unsplit, of_input) - counted, of_weight)
