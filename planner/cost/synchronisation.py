"""What devices exchange to keep their parameters the same: sums of gradients, and updates without a barrier.

Where pipelines do not wait for each other (asgd, asgd-ga, ma) the first replica of each stage sends its updates, as
the communicator of a region does in Cloudless-Training (arXiv 2303.05330); it passes on what it receives with the
stage's next sum of gradients.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby

from planner.cost.collectives import (
    Exchange,
    hierarchical_exchanges,
    ring_exchanges,
    tree_exchanges,
)
from planner.cost.network import ConstantRatePath
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.scenario.scenario import Scenario

_ALGORITHMS: Mapping[str, Callable[[int, tuple[str, ...], int], tuple[Exchange, ...]]] = {
    "ring": lambda elements, regions, position: ring_exchanges(elements, len(regions), position),
    "tree": lambda elements, regions, position: tree_exchanges(elements, len(regions), position),
    "hierarchical": hierarchical_exchanges,
}


# Every device asks in every step.
@lru_cache(maxsize=1024)
def all_reduce(algorithm: str, elements: int, regions: tuple[str, ...], position: int) -> tuple[Exchange, ...]:
    """Return what one participant sends and receives, in order, to get the sum over all participants.

    Args:
        algorithm: One of `planner.plan.plan.ALGORITHMS`.
        elements: Number of elements to sum.
        regions: Region of each participant.
        position: Index of the participant in question in ``regions``.
    """
    return _ALGORITHMS[algorithm](elements, regions, position)


@dataclass(frozen=True, slots=True)
class GradientSync:
    """Gradients of consecutive layers, summed over the devices that hold them.

    Attributes:
        first_layer: Index of the first layer.
        end_layer: Index after the last layer.
        devices: Names of the devices, in the order of the plan.
        elements: Number of elements to sum.
        algorithm: One of `planner.plan.plan.ALGORITHMS`.
        regions: Region of each device.
    """

    first_layer: int
    end_layer: int
    devices: tuple[str, ...]
    elements: int
    algorithm: str
    regions: tuple[str, ...]

    def exchanges(self, device: str) -> tuple[Exchange, ...]:
        """Return what a device sends and receives, in order; positions are indices into ``devices``."""
        return all_reduce(self.algorithm, self.elements, self.regions, self.devices.index(device))

    def among(self, devices: Iterable[str]) -> "GradientSync":
        """Return the same sum over other devices, each in the place and region of one of these."""
        return replace(self, devices=tuple(devices))


def gradient_syncs(plan: Plan, scenario: Scenario) -> tuple[GradientSync, ...]:
    """Return the sums of a plan: one for each run of layers that the same devices hold, two devices at least.

    Replicas of a stage always sum their gradients; pipelines sum theirs if the plan's method is ``allreduce``. Where
    sums overlap with backward, each run is cut into buckets, and the sums of the last layers come first, as their
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
        # The devices of a tensor-parallel group sum their shards at the same time: the first one's stands for all.
        degree = min(replica.tensor_parallel for replica in replicas)
        shard_bytes = scenario.model.at_degree(degree).parameter_bytes(run[0], run[-1] + 1)
        elements = shard_bytes // scenario.training.element_bytes
        if len(devices) > 1 and elements > 0:
            regions = tuple(scenario.cluster.by_name[device].region for device in devices)
            yield GradientSync(run[0], run[-1] + 1, devices, elements, plan.synchronisation.algorithm, regions)


def _runs(pipelines: Sequence[Pipeline], plan: Plan, scenario: Scenario) -> Iterator[list[int]]:
    """Yield consecutive layers that are summed together."""
    bucket_bytes = plan.synchronisation.bucket_bytes

    def held_by(layer: int) -> tuple[tuple[str, int], ...]:
        # Two stages on a device have their last backward at different times.
        return tuple(
            (replica.device, stage if bucket_bytes else 0) for _, stage, _, replica in holders(pipelines, layer)
        )

    for _, layers in groupby(range(len(scenario.model.layers)), key=held_by):
        run = list(layers)
        yield from _buckets(run, scenario, bucket_bytes) if bucket_bytes else [run]


def _buckets(run: Sequence[int], scenario: Scenario, bucket_bytes: int) -> list[list[int]]:
    """Cut a run of layers into parts of ``bucket_bytes`` or more, from its end; the first part may have fewer."""
    buckets: list[list[int]] = []
    missing_bytes = 0
    for layer in reversed(run):
        if missing_bytes <= 0:
            buckets.insert(0, [])
            missing_bytes = bucket_bytes
        buckets[0].insert(0, layer)
        missing_bytes -= scenario.model.layers[layer].parameter_bytes
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
    return 2 * (holders - 1) * max(path.delivery_s(part_bytes) for path in paths)


def holders(pipelines: Iterable[Pipeline], layer: int) -> Iterator[tuple[int, int, Stage, Replica]]:
    """Yield the number of a pipeline, the index of its stage, the stage and the replica, for all holders of a layer."""
    for number, pipeline in enumerate(pipelines):
        for index, stage in enumerate(pipeline.stages):
            if stage.first_layer <= layer < stage.end_layer:
                yield from ((number, index, stage, replica) for replica in stage.replicas)


@dataclass(frozen=True, slots=True)
class UpdateEdge:
    """Layers that two stages of different pipelines both hold.

    Attributes:
        sender: Device that sends updates.
        receiver: Device that applies them.
        pipelines: Numbers of the sender's pipeline and of the receiver's.
        stage: Index of the receiver's stage in its pipeline.
        layers: Index of the first layer, and after the last one.
        size_bytes: Size of an update: gradients or parameters of these layers.
    """

    sender: str
    receiver: str
    pipelines: tuple[int, int]
    stage: int
    layers: tuple[int, int]
    size_bytes: int


def update_edges(plan: Plan, scenario: Scenario) -> tuple[UpdateEdge, ...]:
    """Return who sends updates to whom; empty where pipelines sum their gradients."""
    if plan.synchronisation.method == "allreduce":
        return ()
    edges = []
    for p, own in enumerate(plan.pipelines):
        for q, other in enumerate(plan.pipelines):
            for sending in own.stages if p != q else ():
                for index, receiving in enumerate(other.stages):
                    first = max(sending.first_layer, receiving.first_layer)
                    end = max(first, min(sending.end_layer, receiving.end_layer))
                    degree = min(sending.replicas[0].tensor_parallel, receiving.replicas[0].tensor_parallel)
                    size_bytes = scenario.model.at_degree(degree).parameter_bytes(first, end)
                    if size_bytes:
                        ends = (sending.replicas[0].device, receiving.replicas[0].device)
                        edges.append(UpdateEdge(*ends, (p, q), index, (first, end), size_bytes))
    return tuple(edges)


def samples_of_an_update(plan: Plan, pipeline: int) -> int:
    """Return the number of samples over which a pipeline's update averages gradients.

    It is the global batch where the pipelines' gradients add up, and the pipeline's own samples where parameters are
    averaged, since each pipeline then trains by itself.
    """
    return plan.pipelines[pipeline].samples if plan.synchronisation.method == "ma" else plan.global_batch
