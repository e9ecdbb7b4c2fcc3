"""Which gradients are summed over which devices, and how."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from planner.cost.collectives import Exchange, all_reduce
from planner.cost.network import ConstantRatePath
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.scenario.scenario import Scenario


@dataclass(frozen=True, slots=True)
class GradientSync:
    """Gradients of consecutive layers, summed over the devices that hold them.

    Attributes:
        first_layer: Index of the first layer.
        end_layer: Index after the last one.
        devices: In the order of the plan.
        elements: Numbers to sum.
        algorithm: One of `planner.plan.plan.ALGORITHMS`.
        regions: Where each of the devices stands.
    """

    first_layer: int
    end_layer: int
    devices: tuple[str, ...]
    elements: int
    algorithm: str
    regions: tuple[str, ...]

    def exchanges(self, device: str) -> tuple[Exchange, ...]:
        """Return what a device sends and receives, in order; positions in it are indices into ``devices``."""
        return all_reduce(self.algorithm, self.elements, self.regions, self.devices.index(device))

    def among(self, devices: Iterable[str]) -> "GradientSync":
        """Return the same sum over others, each in the place, and the region, of one of these devices."""
        return replace(self, devices=tuple(devices))


def gradient_syncs(plan: Plan, scenario: Scenario) -> tuple[GradientSync, ...]:
    """Return the runs of layers that the same devices hold, where those are more than one.

    Replicas of a stage always sum their gradients; pipelines do among each other if the plan's method is
    ``allreduce``. Where sums overlap with backward a run is cut into buckets, and the last layers come first, as their
    gradients do.
    """
    if plan.synchronisation.bucket_bytes:
        return tuple(reversed([*_syncs_over(plan.pipelines, plan, scenario)]))
    if plan.synchronisation.method == "allreduce":
        return tuple(_syncs_over(plan.pipelines, plan, scenario))
    return tuple(sync for pipeline in plan.pipelines for sync in _syncs_over([pipeline], plan, scenario))


def _syncs_over(pipelines: Sequence[Pipeline], plan: Plan, scenario: Scenario) -> Iterator[GradientSync]:
    for run in _runs(pipelines, plan, scenario):
        replicas = [replica for *_, replica in holders(pipelines, run[0])]
        devices = tuple(replica.device for replica in replicas)
        # Each device of a tensor-parallel group sums its shard at the same time: the first one's stands for all.
        degree = min(replica.tensor_parallel for replica in replicas)
        shard_bytes = scenario.model.at_degree(degree).parameter_bytes(run[0], run[-1] + 1)
        elements = shard_bytes // scenario.training.element_bytes
        if len(devices) > 1 and elements > 0:
            regions = tuple(scenario.cluster.by_name[device].region for device in devices)
            yield GradientSync(run[0], run[-1] + 1, devices, elements, plan.synchronisation.algorithm, regions)


def _runs(pipelines: Sequence[Pipeline], plan: Plan, scenario: Scenario) -> Iterator[list[int]]:
    """Consecutive layers that are summed together."""
    bucket_bytes = plan.synchronisation.bucket_bytes

    def held_by(layer: int) -> tuple[tuple[str, int], ...]:
        # The stages of a device have done their last backward at different times.
        held = holders(pipelines, layer)
        return tuple((replica.device, stage if bucket_bytes else 0) for _, stage, _, replica in held)

    for _, layers in groupby(range(len(scenario.model.layers)), key=held_by):
        run = list(layers)
        yield from _buckets(run, scenario, bucket_bytes) if bucket_bytes else [run]


def _buckets(run: Sequence[int], scenario: Scenario, bucket_bytes: int) -> list[list[int]]:
    """A run of layers in parts of at least so many bytes, filled from its end; the first part may have fewer."""
    buckets: list[list[int]] = []
    room_bytes = 0
    for layer in reversed(run):
        if room_bytes <= 0:
            buckets.insert(0, [])
            room_bytes = bucket_bytes
        buckets[0].insert(0, layer)
        room_bytes -= scenario.model.layers[layer].parameter_bytes
    return buckets


def ring_s(paths: Iterable[ConstantRatePath], size_bytes: float, holders: int) -> float:
    """Return how long a ring all-reduce takes, seconds.

    In each of 2 (n - 1) rounds every one of the n holders sends an n-th of the bytes to the next one (Patarasuk and
    Yuan, 2009), and the slowest hop sets the pace.

    Args:
        paths: Paths of the hops, at least one; hops over equal paths may be given once.
        size_bytes: Bytes that each device holds.
        holders: Number of devices in the ring; one device has nothing to wait for.
    """
    part_bytes = size_bytes / holders
    return 2 * (holders - 1) * max(path.latency_s + path.transmission_s(part_bytes) for path in paths)


def holders(pipelines: Iterable[Pipeline], layer: int) -> Iterator[tuple[int, int, Stage, Replica]]:
    """Give who holds a layer, each with the number of its pipeline, the index of its stage there, and the stage."""
    for number, pipeline in enumerate(pipelines):
        for index, stage in enumerate(pipeline.stages):
            if stage.first_layer <= layer < stage.end_layer:
                yield from ((number, index, stage, replica) for replica in stage.replicas)
