"""Updates that pipelines send each other without waiting (asgd, asgd-ga, ma): who sends what to whom.

The first replica of a stage speaks for it, as the communicator of a region does in Cloudless-Training (arXiv
2303.05330); it passes on what it receives with the stage's own next sum of gradients.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby

from planner.cost.collectives import Exchange, ring_exchanges, tree_exchanges
from planner.cost.hierarchical import hierarchical_exchanges
from planner.cost.network import ConstantRatePath
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.scenario.scenario import Scenario

_ALGORITHMS: Mapping[str, Callable[[int, tuple[str, ...], int], tuple[Exchange, ...]]] = {
    "ring": lambda elements, regions, position: ring_exchanges(elements, len(regions), position),
    "tree": lambda elements, regions, position: tree_exchanges(elements, len(regions), position),
    "hierarchical": hierarchical_exchanges,
}


def all_reduce(algorithm: str, elements: int, regions: Sequence[str], position: int) -> tuple[Exchange, ...]:
    """Return what one participant sends and receives, in order, until it has the sum over all of them.

    Args:
        algorithm: One of `planner.plan.plan.ALGORITHMS`.
        elements: Numbers to sum.
        regions: Where each participant stands.
        position: Of the participant in question, an index into ``regions``.
    """
    return _remembered(algorithm, elements, tuple(regions), position)


# Every device asks in every step.
@lru_cache(maxsize=1024)
def _remembered(algorithm: str, elements: int, regions: tuple[str, ...], position: int) -> tuple[Exchange, ...]:
    return _ALGORITHMS[algorithm](elements, regions, position)


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


@dataclass(frozen=True, slots=True)
class UpdateEdge:
    """Layers that two stages of different pipelines both hold.

    Attributes:
        sender: Device whose updates go out.
        receiver: Device that applies them.
        pipelines: Of sender and receiver.
        stage: The receiver's.
        layers: Index of the first one, and after the last one.
        size_bytes: Of their gradients or parameters.
    """

    sender: str
    receiver: str
    pipelines: tuple[int, int]
    stage: int
    layers: tuple[int, int]
    size_bytes: int


def update_edges(plan: Plan, scenario: Scenario) -> tuple[UpdateEdge, ...]:
    """Return who sends updates to whom; nobody where pipelines sum their gradients and wait."""
    if plan.synchronisation.method == "allreduce":
        return ()
    edges = []
    for p, own in enumerate(plan.pipelines):
        for q, other in enumerate(plan.pipelines):
            for sending in own.stages if p != q else ():
                for index, receiving in enumerate(other.stages):
                    layers = _shared_layers(sending, receiving)
                    size_bytes = _shared_bytes(scenario, sending, receiving, layers)
                    if size_bytes:
                        ends = (sending.replicas[0].device, receiving.replicas[0].device)
                        edges.append(UpdateEdge(*ends, (p, q), index, layers, size_bytes))
    return tuple(edges)


def samples_of_an_update(plan: Plan, pipeline: int) -> int:
    """Return over how many samples the gradient of a pipeline's update is a mean.

    The global batch where gradients add up to those of all pipelines; a pipeline's own samples where parameters are
    averaged, since each pipeline then trains by itself.
    """
    return plan.pipelines[pipeline].samples if plan.synchronisation.method == "ma" else plan.global_batch


def _shared_layers(one: Stage, other: Stage) -> tuple[int, int]:
    return max(one.first_layer, other.first_layer), min(one.end_layer, other.end_layer)


def _shared_bytes(scenario: Scenario, one: Stage, other: Stage, layers: tuple[int, int]) -> int:
    degree = min(one.replicas[0].tensor_parallel, other.replicas[0].tensor_parallel)
    return scenario.model.at_degree(degree).parameter_bytes(*layers) if layers[0] < layers[1] else 0
