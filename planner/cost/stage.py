"""A pipeline of a plan as a scheduler sees it: what each stage's actions and transfers take on steady links."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from planner.cost.memory import recomputed_bytes, saved_activation_bytes, state_bytes, workspace_bytes
from planner.cost.network import ConstantRatePath, compression_between, nominal_path, wire_bytes
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.scenario.profile import ComputeTimes
from planner.scenario.scenario import Scenario
from planner.schedules.kernel.problem import SchedulingProblem

Floats = NDArray[np.float64]


def replica_times(scenario: Scenario, stage: Stage, replica: Replica, samples: int) -> ComputeTimes:
    """Return what one microbatch of ``samples`` takes on one replica.

    Where the stage recomputes, its forward is part of the input gradient, which begins with it.

    Raises:
        InputError: The profile has no times for its device kind or its degree of tensor parallelism.
    """
    model = scenario.model.at_degree(replica.tensor_parallel)
    kind = scenario.cluster.by_name[replica.device].kind
    times = model.times(stage.first_layer, stage.end_layer, kind, samples)
    if not stage.recompute:
        return times
    return replace(times, backward_input_s=times.forward_s + times.backward_input_s)


# A step asks for those of its plan.
@lru_cache(maxsize=32)
def scheduling_problems(plan: Plan, scenario: Scenario) -> tuple[SchedulingProblem, ...]:
    """Return the pipelines of a plan as scheduling problems, on the declared links."""
    return tuple(scheduling_problem(pipeline, scenario, plan.compression) for pipeline in plan.pipelines)


def scheduling_problem(
    pipeline: Pipeline,
    scenario: Scenario,
    compression: str = "none",
    path: Callable[[str, str], ConstantRatePath] | None = None,
) -> SchedulingProblem:
    """Return one pipeline as a scheduling problem; a stage is as slow as its slowest replica.

    Args:
        pipeline: Of a plan for the scenario.
        scenario: Gives times, sizes and links.
        compression: The plan's, one of `planner.plan.plan.COMPRESSIONS`.
        path: The path from one device to another; the declared bandwidths and latencies if None.
    """
    find_path = path or (lambda source, target: nominal_path(scenario, source, target))
    transfers = _Transfers(scenario, compression, find_path)
    sizes, which = np.unique(np.array(pipeline.microbatches), return_inverse=True)
    times = np.array([[_slowest(scenario, stage, int(size)) for size in sizes] for stage in pipeline.stages])
    boundaries = [
        (transfers.crossing(left, right, sizes), transfers.crossing(right, left, sizes))
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


@dataclass(frozen=True, slots=True)
class _Transfers:
    """How transfers of a pipeline travel."""

    scenario: Scenario
    compression: str
    find_path: Callable[[str, str], ConstantRatePath]

    def crossing(self, senders: Stage, receivers: Stage, sizes: NDArray[np.int64]) -> tuple[list[float], float]:
        """Seconds for which each microbatch size keeps the slowest pair of replicas busy, and the longest delay."""
        if senders.replicas == receivers.replicas:
            return [0.0] * len(sizes), 0.0
        sample_bytes = self.scenario.model.layers[min(senders.end_layer, receivers.end_layer) - 1].output_bytes
        busy_s, delay_s = [0.0] * len(sizes), 0.0
        for index, size in enumerate(sizes.tolist()):
            for sender, (start, stop) in zip(senders.replicas, senders.intervals(size), strict=True):
                for receiver, (first, end) in zip(receivers.replicas, receivers.intervals(size), strict=True):
                    samples = min(stop, end) - max(start, first)
                    if samples > 0:
                        ends = sender.device, receiver.device
                        form = compression_between(self.compression, self.scenario.cluster, *ends)
                        path, size_bytes = self.find_path(*ends), wire_bytes(form, samples, sample_bytes)
                        busy_s[index] = max(busy_s[index], path.transmission_s(size_bytes))
                        delay_s = max(delay_s, path.propagation_s(size_bytes))
        return busy_s, delay_s


def _activation_bytes(scenario: Scenario, stage: Stage, sizes: NDArray[np.int64]) -> list[list[float]]:
    """Bytes until the backward and from it until the weight gradient, on the replica that holds the most.

    Assumed: all of a microbatch's activations stay until its weight gradient. Of a transformer layer most do
    (Qi et al., Zero Bubble Pipeline Parallelism, 2024, count 32 of 34 + 5 as/h units). Both are the same but where the
    stage recomputes: then only its input waits for the backward.
    """
    waiting: list[float] = []
    staying: list[float] = []
    degrees = [replica.tensor_parallel for replica in stage.replicas]
    kept = [saved_activation_bytes(scenario, stage, degree) for degree in degrees]
    every = [each + recomputed_bytes(scenario, stage, degree) for each, degree in zip(kept, degrees, strict=True)]
    for size in sizes.tolist():
        widths = [end - first for first, end in stage.intervals(size)]
        waiting.append(max(width * each for width, each in zip(widths, kept, strict=True)))
        staying.append(max(width * each for width, each in zip(widths, every, strict=True)))
    return [waiting, staying]


def _capacity_bytes(pipeline: Pipeline, scenario: Scenario) -> Floats:
    """Bytes that each worker's activations may fill, in terms of the replica that holds the most of a microbatch."""
    capacity = np.full(max(pipeline.workers) + 1, np.inf)
    for worker in range(len(capacity)):
        stages = [stage for stage, holder in zip(pipeline.stages, pipeline.workers, strict=True) if holder == worker]
        largest = max(stages[0].most_samples(pipeline.microbatches))
        for index, samples in enumerate(stages[0].most_samples(pipeline.microbatches)):
            replica = stages[0].replicas[index]
            free = min(scenario.cluster.by_name[device].memory_bytes for device in replica.devices)
            degree = replica.tensor_parallel
            free -= sum(state_bytes(scenario, stage.first_layer, stage.end_layer, degree) for stage in stages)
            # Framework and workspace are there once, whatever the number of stages.
            free -= scenario.effects.memory.framework_bytes
            free -= max(workspace_bytes(scenario, stage, samples, degree) for stage in stages)
            if samples:
                capacity[worker] = min(capacity[worker], free * largest / samples)
    return capacity
