"""Exchanges that keep the parameters of devices equal: all-reduce of gradients, and updates without a barrier.

With the methods asgd, asgd-ga and ma, pipelines do not wait for each other. The first replica of each stage sends and
receives the stage's updates, as a region's communicator does in Cloudless-Training (arXiv 2303.05330). The other
replicas of the stage get received updates with the stage's next sum of gradients.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby, pairwise

from planner.cost.collectives import Exchange, hierarchical_exchanges, ring_exchanges, tree_exchanges
from planner.cost.network import ConstantRatePath
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.scenario.scenario import Scenario
from planner.scenario.training import FLOAT32_BYTES

_ALGORITHMS: Mapping[str, Callable[[int, tuple[str, ...], int], tuple[Exchange, ...]]] = {
    "ring": lambda elements, regions, position: ring_exchanges(elements, len(regions), position),
    "tree": lambda elements, regions, position: tree_exchanges(elements, len(regions), position),
    "hierarchical": hierarchical_exchanges,
}


# Cached, because every device calls this in every step.
@lru_cache(maxsize=1024)
def all_reduce(algorithm: str, elements: int, regions: tuple[str, ...], position: int) -> tuple[Exchange, ...]:
    """Return the exchanges of one participant in an all-reduce of ``elements`` elements, in the order of rounds.

    ``algorithm`` is one of `planner.plan.plan.ALGORITHMS`, ``regions`` the region of each participant, and ``position``
    the index of the participant.
    """
    return _ALGORITHMS[algorithm](elements, regions, position)


@dataclass(frozen=True, slots=True)
class GradientSync:
    """An all-reduce of the gradients of layers ``first_layer`` to ``end_layer - 1``, or of what tied layers share.

    Attributes:
        devices: Names of the devices that hold these layers, in the order of the plan.
        elements: Number of elements to sum on each device.
        algorithm: One of `planner.plan.plan.ALGORITHMS`.
        regions: Region of each device.
        shards: Number of devices of a tensor-parallel group for which each of ``devices`` stands: each of them sums a
            shard of its own at the same time, over the same links.
        in_one_message: Whether each of ``devices`` sends the shards of its whole group, as in paced runs; in training
            each device of a group sends its own.
        tied: Whether the sum is over the copies of the parameters that the model's tied layers share, and only over
            these; ``first_layer`` is the first of the tied layers, and ``end_layer`` follows the last one. The other
            sums leave these copies out.
    """

    first_layer: int
    end_layer: int
    devices: tuple[str, ...]
    elements: int
    algorithm: str
    regions: tuple[str, ...]
    shards: int = 1
    in_one_message: bool = False
    tied: bool = False

    @property
    def key(self) -> int:
        """Number that no other sum of a device has: a tied layer and a bucket may begin with the same layer."""
        return 2 * self.first_layer + self.tied

    @property
    def messages(self) -> int:
        """Number of equal messages, by as many devices of a group, for which one exchange of a device stands."""
        return 1 if self.in_one_message else self.shards

    @property
    def size_bytes(self) -> int:
        """Bytes of the gradients, of all shards."""
        return self.elements * self.shards * FLOAT32_BYTES

    def sent_bytes(self, exchange: Exchange) -> int:
        """Return the bytes that a device, with the rest of its group, sends in an exchange."""
        return exchange.send_elements * FLOAT32_BYTES * self.messages

    def exchanges(self, device: str) -> tuple[Exchange, ...]:
        """Return a device's exchanges in the order of rounds; positions in exchanges are indices into ``devices``."""
        exchanges = all_reduce(self.algorithm, self.elements, self.regions, self.devices.index(device))
        return tuple(each.times(self.shards) for each in exchanges) if self.in_one_message else exchanges

    def among(self, devices: Iterable[str]) -> "GradientSync":
        """Return the same all-reduce over other devices, which take the positions and regions of the present ones."""
        return replace(self, devices=tuple(devices))


def gradient_syncs(plan: Plan, scenario: Scenario) -> tuple[GradientSync, ...]:
    """Return the all-reduces of a plan: one for each run of consecutive layers held by the same two or more devices.

    Replicas of a stage always sum their gradients; pipelines do so only with the method ``allreduce``. With
    ``bucket_bytes`` above 0, runs are cut into buckets, last layers first, which is the order of backward. Last comes
    the sum over all devices with copies of tied parameters, as that of embedding and head in Megatron-LM; a device with
    several copies adds their gradients itself.
    """
    if plan.synchronisation.method == "allreduce":
        return (*_syncs_over(plan.pipelines, plan, scenario), *_tied_sync(plan.pipelines, plan, scenario))
    each = [[pipeline] for pipeline in plan.pipelines]
    return tuple(sync for one in each for sync in (*_syncs_over(one, plan, scenario), *_tied_sync(one, plan, scenario)))


def uneven_sum(plan: Plan, scenario: Scenario) -> tuple[GradientSync, str, str] | None:
    """Return a sum over groups of unlike sizes, whose shards differ, and the first devices of two such groups.

    Training does not carry out such a sum. The result is None if the plan has none.
    """
    degrees = {replica.device: replica.tensor_parallel for replica in plan.replicas}
    if len(set(degrees.values())) > 1:
        for sync in gradient_syncs(plan, scenario):
            first, *others = sync.devices
            for other in others:
                if degrees[other] != degrees[first]:
                    return sync, first, other
    return None


def _syncs_over(pipelines: Sequence[Pipeline], plan: Plan, scenario: Scenario) -> Iterator[GradientSync]:
    runs = list(_runs(pipelines, plan, scenario))
    for run in reversed(runs) if plan.synchronisation.bucket_bytes else runs:
        replicas = [replica for *_, replica in holders(pipelines, run[0])]
        degree = min(replica.tensor_parallel for replica in replicas)
        model = scenario.model.at_degree(degree)
        own_bytes = group_bytes(scenario, run[0], run[-1] + 1, degree) // degree
        shard_bytes = own_bytes - model.tied_bytes(run[0], run[-1] + 1)
        yield from _sync(run[0], run[-1] + 1, replicas, shard_bytes, plan, scenario)


def _tied_sync(pipelines: Sequence[Pipeline], plan: Plan, scenario: Scenario) -> Iterator[GradientSync]:
    tied = scenario.model.tied_layers
    if tied:
        found = [replica for one in pipelines for layer in tied for *_, replica in holders([one], layer)]
        replicas = list({replica.device: replica for replica in found}.values())
        degree = min(replica.tensor_parallel for replica in replicas)
        shard_bytes = scenario.model.at_degree(degree).layers[tied[0]].tied_bytes
        yield from _sync(tied[0], tied[-1] + 1, replicas, shard_bytes, plan, scenario, tied=True)


def _sync(
    first: int,
    end: int,
    replicas: Sequence[Replica],
    shard_bytes: int,
    plan: Plan,
    scenario: Scenario,
    *,
    tied: bool = False,
) -> Iterator[GradientSync]:
    """Yield the sum over several replicas, unless there is nothing to sum."""
    elements = shard_bytes // FLOAT32_BYTES
    if len(replicas) > 1 and elements > 0:
        devices = tuple(replica.device for replica in replicas)
        regions = tuple(scenario.cluster.by_name[device].region for device in devices)
        degree = min(replica.tensor_parallel for replica in replicas)
        algorithm = plan.synchronisation.algorithm
        yield GradientSync(first, end, devices, elements, algorithm, regions, degree, tied=tied)


def group_bytes(scenario: Scenario, first_layer: int, end_layer: int, degree: int) -> int:
    """Return the bytes of gradients, or of parameters, that one holder of layers exchanges: those of its whole group.

    Each of the ``degree`` devices exchanges its own shard, which contains the parameters that every device holds whole.
    """
    return degree * scenario.model.at_degree(degree).parameter_bytes(first_layer, end_layer)


def _runs(pipelines: Sequence[Pipeline], plan: Plan, scenario: Scenario) -> Iterator[list[int]]:
    """Yield runs of consecutive layers, each for one all-reduce."""
    bucket_bytes = plan.synchronisation.bucket_bytes

    def held_by(layer: int) -> tuple[tuple[str, int], ...]:
        # With buckets, a run must not span two stages of a device, whose last backwards end at different times.
        return tuple(
            (replica.device, stage if bucket_bytes else 0) for _, stage, _, replica in holders(pipelines, layer)
        )

    # Only where stages begin or end can there be other holders.
    ends = {end for pipeline in pipelines for stage in pipeline.stages for end in (stage.first_layer, stage.end_layer)}
    pieces = pairwise(sorted(ends | {0, len(scenario.model.layers)}))
    for _, group in groupby(pieces, key=lambda piece: held_by(piece[0])):
        run = [layer for piece in group for layer in range(*piece)]
        yield from _buckets(run, scenario, bucket_bytes) if bucket_bytes else [run]


def _buckets(run: Sequence[int], scenario: Scenario, bucket_bytes: int) -> list[list[int]]:
    """Cut a run of layers, beginning at its end, into buckets of ``bucket_bytes`` or more; the first may be smaller."""
    buckets: list[list[int]] = []
    missing_bytes = 0
    for layer in reversed(run):
        if missing_bytes <= 0:
            buckets.insert(0, [])
            missing_bytes = bucket_bytes
        buckets[0].insert(0, layer)
        missing_bytes -= scenario.model.layers[layer].parameter_bytes - scenario.model.layers[layer].tied_bytes
    return buckets


def ring_s(paths: Iterable[ConstantRatePath], size_bytes: float, holders: int, shards: int = 1) -> float:
    """Return how long a ring all-reduce of ``size_bytes`` over n = ``holders`` devices takes, seconds.

    In each of 2 (n - 1) rounds, each device sends 1/n of the bytes to the next one; a round takes as long as the
    slowest hop (Patarasuk and Yuan, 2009; see `planner.cost.collectives`). ``paths`` are the paths of the hops, at
    least one; hops over equal paths may be given once. Each holder is a tensor-parallel group of ``shards`` devices,
    which send at the same time; ``size_bytes`` are those of all shards.
    """
    part_bytes = size_bytes / holders
    return 2 * (holders - 1) * max(path.delivery_s(part_bytes, shards) for path in paths)


def holders(pipelines: Iterable[Pipeline], layer: int) -> Iterator[tuple[int, int, Stage, Replica]]:
    """Yield (pipeline index, stage index, stage, replica) for each replica that holds a layer."""
    for number, pipeline in enumerate(pipelines):
        for index, stage in enumerate(pipeline.stages):
            if stage.first_layer <= layer < stage.end_layer:
                yield from ((number, index, stage, replica) for replica in stage.replicas)


@dataclass(frozen=True, slots=True)
class UpdateEdge:
    """The updates that device ``sender`` of one pipeline sends to device ``receiver`` of another pipeline.

    Attributes:
        pipelines: Indices of the sender's and the receiver's pipeline.
        stage: Index of the receiver's stage in its pipeline.
        layers: First and end index (exclusive) of the layers that both devices hold.
        size_bytes: Bytes of an update: the gradients or the parameters of these layers, of all devices of a group.
        fragment: Index of the fragment of the model that the layers belong to.
        part: Index of the pipeline to which the part of the layers belongs that the update contains: the receiver's for
            pseudo-gradients, the sender's for their means. None for the whole layers.
    """

    sender: str
    receiver: str
    pipelines: tuple[int, int]
    stage: int
    layers: tuple[int, int]
    size_bytes: int
    fragment: int = 0
    part: int | None = None

    @property
    def carries_means(self) -> bool:
        """Whether the update contains means of pseudo-gradients, which the sender has received before."""
        return self.part == self.pipelines[0]


def update_edges(plan: Plan, scenario: Scenario) -> tuple[UpdateEdge, ...]:
    """Return all sender-receiver pairs of updates between pipelines.

    There are none for the methods ``allreduce`` and ``diloco-decoupled``, whose pipelines exchange layers with syncers.
    """
    if plan.synchronisation.method == "allreduce" or plan.synchronisation.is_decoupled:
        return ()
    edges: list[UpdateEdge] = []
    for p, own in enumerate(plan.pipelines):
        for q, other in enumerate(plan.pipelines):
            for sending in own.stages if p != q else ():
                for index, receiving in enumerate(other.stages):
                    edges += _edges((p, q), sending, (index, receiving), plan, scenario)
    return tuple(edges)


def _edges(
    pipelines: tuple[int, int], sending: Stage, receiving: tuple[int, Stage], plan: Plan, scenario: Scenario
) -> Iterator[UpdateEdge]:
    """Yield the updates from one stage to another one, whose index comes first, for each run of shared layers."""
    index, target = receiving
    ends = (sending.replicas[0], target.replicas[0])
    degree = min(replica.tensor_parallel for replica in ends)
    for fragment, runs in enumerate(_fragments(plan, len(scenario.model.layers))):
        for start, stop in runs:
            first = max(sending.first_layer, target.first_layer, start)
            end = max(first, min(sending.end_layer, target.end_layer, stop))
            for part in _parts(plan, pipelines):
                size_bytes = _update_bytes(plan, scenario, range(first, end), degree, part)
                if size_bytes:
                    devices = (ends[0].device, ends[1].device)
                    yield UpdateEdge(*devices, pipelines, index, (first, end), size_bytes, fragment, part)


def _parts(plan: Plan, pipelines: tuple[int, int]) -> tuple[int | None, ...]:
    """Return the parts of layers that a pipeline sends to another one: pseudo-gradients of its, means of the own."""
    sender, receiver = pipelines
    how = plan.synchronisation
    return (receiver, sender) if how.has_outer_step and how.outer.parts(len(plan.pipelines)) > 1 else (None,)


def syncer_pairs(plan: Plan) -> tuple[tuple[str, str], ...]:
    """Return the (sender, receiver) devices of messages to and from `OuterStep.syncers`; empty if there are none."""
    names = [name for leaders in plan.leaders for name in leaders]
    each = ((name, syncer) for name in names for syncer in plan.synchronisation.outer.syncers)
    return tuple(pair for one, other in each for pair in ((one, other), (other, one)))


def layer_elements(plan: Plan, scenario: Scenario) -> list[dict[str, tuple[int, dict[int, int]]]]:
    """Return what devices exchange with syncers: for each pipeline, by device, its first stage and its layers.

    A device exchanges the layers of the stages whose first one it is: their numbers of parameters, by layer, without
    layers that have none.
    """
    found: list[dict[str, tuple[int, dict[int, int]]]] = []
    for pipeline in plan.pipelines:
        devices: dict[str, tuple[int, dict[int, int]]] = {}
        for index, stage in enumerate(pipeline.stages):
            first = stage.replicas[0]
            _, layers = devices.setdefault(first.device, (index, {}))
            for layer in stage.layers:
                size_bytes = group_bytes(scenario, layer, layer + 1, first.tensor_parallel)
                if size_bytes:
                    layers[layer] = size_bytes // FLOAT32_BYTES
        found.append(devices)
    return found


def _update_bytes(plan: Plan, scenario: Scenario, layers: range, degree: int, part: int | None) -> int:
    """Return the bytes of an update of consecutive layers; pseudo-gradients are packed layer by layer."""
    how = plan.synchronisation
    if not how.has_outer_step:
        return group_bytes(scenario, layers.start, layers.stop, degree)
    sizes = (group_bytes(scenario, layer, layer + 1, degree) for layer in layers)
    count = len(plan.pipelines)
    return sum(how.outer.part_bytes(size_bytes // FLOAT32_BYTES, part, count) for size_bytes in sizes)


def _fragments(plan: Plan, layers: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    how = plan.synchronisation
    return how.outer.fragment_runs(layers) if how.has_outer_step else (((0, layers),),)


def samples_of_an_update(plan: Plan, pipeline: int) -> int:
    """Return the number of samples by which a pipeline divides its summed gradients.

    With the method ``ma`` and those with outer steps this is the pipeline's own number of samples, because pipelines
    train separately between exchanges. With other methods it is the global batch, because the gradients of all
    pipelines are added.
    """
    return plan.pipelines[pipeline].samples if plan.synchronisation.trains_separately else plan.global_batch
