"""What has to travel when layers change devices: the difference between two plans.

A layer's state is its parameters and what the optimizer keeps of them; gradients live for a step only, and plans change
between steps. A device that holds a layer already needs nothing. Everybody else takes it from the nearest device that
holds it, over the path with the highest rate.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from planner.cost.network import nominal_path, payload_bps
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.scenario.training import OPTIMIZER_STATES
from traces.common.errors import InputError


@dataclass(frozen=True, slots=True)
class LayerTransfer:
    """The state of neighbouring layers on its way from one device to another.

    Attributes:
        source: Sends.
        target: Receives, and holds the layers afterwards.
        first_layer: Index of the first.
        end_layer: Index after the last.
        size_bytes: Parameters and optimizer state, as the target will hold them.
    """

    source: str
    target: str
    first_layer: int
    end_layer: int
    size_bytes: int

    @property
    def layers(self) -> range:
        """The indices of the layers."""
        return range(self.first_layer, self.end_layer)


@dataclass(frozen=True, slots=True)
class Migration:
    """All moves between two plans, by target and layer."""

    moves: tuple[LayerTransfer, ...]

    @property
    def size_bytes(self) -> int:
        """Sum over the moves."""
        return sum(move.size_bytes for move in self.moves)


NO_MIGRATION = Migration(())


@dataclass(frozen=True, slots=True)
class _Shard:
    """What a device holds of a layer: one part of ``degree``, where tensor parallelism shares it."""

    layer: int
    degree: int
    part: int


def migration_between(
    old: Plan,
    new: Plan,
    scenario: Scenario,
    gone: Collection[str] = (),
    backups: Mapping[int, Sequence[str]] | None = None,
) -> Migration:
    """Return what devices of ``new`` need that they do not hold with ``old``.

    Assumed: where the degree of tensor parallelism changes, a part comes as a whole from one of the devices that hold
    a part of the layer.

    Args:
        old: The plan until now.
        new: The plan from now on.
        scenario: Gives sizes and paths.
        gone: Devices that hold nothing any more.
        backups: Layer to the devices that keep a copy of its state besides.

    Raises:
        InputError: Nobody holds a layer any more.
    """
    before = {device: shards for device, shards in _held(old).items() if device not in gone}
    holders: dict[int, list[str]] = defaultdict(list)
    for device, shards in before.items():
        for shard in shards:
            holders[shard.layer].append(device)
    for layer, copies in (backups or {}).items():
        holders[layer] += [device for device in copies if device not in gone]
    moves: list[LayerTransfer] = []
    for target, shards in _held(new).items():
        missing = sorted(shards - before.get(target, frozenset()), key=_layer)
        sources = ((_nearest(holders[shard.layer], target, shard.layer, scenario), shard) for shard in missing)
        moves += _joined(target, [(source, shard) for source, shard in sources if source != target], scenario)
    return Migration(tuple(moves))


def state_bytes(scenario: Scenario, first_layer: int, end_layer: int, degree: int = 1) -> int:
    """Return the bytes of the parameters and the optimizer's state of layers, as one of ``degree`` devices has them."""
    copies = 1 + OPTIMIZER_STATES[scenario.training.optimizer.name]
    return copies * scenario.model.at_degree(degree).parameter_bytes(first_layer, end_layer)


def moves_from(held: Mapping[str, Collection[int]], plan: Plan, scenario: Scenario) -> Migration:
    """Return what the devices of a plan without tensor parallelism need that they do not hold.

    Args:
        held: By device, the layers whose state it has.
        plan: The plan from now on.
        scenario: Gives sizes and paths.

    Raises:
        InputError: Nobody holds a layer.
    """
    holders: dict[int, list[str]] = defaultdict(list)
    for device, layers in held.items():
        for layer in layers:
            holders[layer].append(device)
    moves: list[LayerTransfer] = []
    for target, shards in _held(plan).items():
        wanted = sorted((shard for shard in shards if shard.layer not in held.get(target, ())), key=_layer)
        moves += _joined(
            target,
            [(_nearest(holders[shard.layer], target, shard.layer, scenario), shard) for shard in wanted],
            scenario,
        )
    return Migration(tuple(moves))


def migration_time_s(migration: Migration, scenario: Scenario) -> float:
    """Return how long all moves at once take at the bandwidths that the cluster declares, seconds.

    That of the busiest link, and its latency: a lower bound of what shared links make of it.
    """
    bits: dict[str, float] = defaultdict(float)
    capacity_bps = {}
    latency_s = 0.0
    for move in migration.moves:
        links = scenario.cluster.path(move.source, move.target)
        latency_s = max(latency_s, sum(link.latency_s for link in links))
        for link in links:
            bits[link.name] += 8 * move.size_bytes
            capacity_bps[link.name] = payload_bps(scenario.effects.network, link.bandwidth_bps)
    return latency_s + max((amount / capacity_bps[name] for name, amount in bits.items()), default=0.0)


def _held(plan: Plan) -> dict[str, frozenset[_Shard]]:
    held: dict[str, set[_Shard]] = defaultdict(set)
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            for replica in stage.replicas:
                for part, device in enumerate(replica.devices):
                    layers = stage.layers
                    held[device] |= {_Shard(layer, replica.tensor_parallel, part) for layer in layers}
    return {device: frozenset(shards) for device, shards in held.items()}


def _layer(shard: _Shard) -> int:
    return shard.layer


def _nearest(holders: Iterable[str], target: str, layer: int, scenario: Scenario) -> str:
    known = list(dict.fromkeys(holders))
    if target in known:
        return target
    if not known:
        raise InputError(
            f"nobody holds layer {layer} any more",
            where=f"device '{target}'",
            valid="stages of one device need a backup of their state on another one",
        )
    return max(known, key=lambda source: nominal_path(scenario, source, target).rate_bps)


def _joined(target: str, missing: Sequence[tuple[str, _Shard]], scenario: Scenario) -> list[LayerTransfer]:
    """Moves of neighbouring layers from the same source as one."""
    moves = []
    runs = groupby(
        enumerate(missing), key=lambda entry: (entry[1][0], entry[1][1].degree, entry[1][1].layer - entry[0])
    )
    for (source, degree, _), run in runs:
        layers = [shard.layer for _, (_, shard) in run]
        first, end = layers[0], layers[-1] + 1
        moves.append(LayerTransfer(source, target, first, end, state_bytes(scenario, first, end, degree)))
    return moves


def backup_holders(plan: Plan) -> Mapping[int, tuple[str, ...]]:
    """Return layer to the devices that keep a copy of its state; only those layers that need one.

    A pipeline of one stage on one device has no neighbour to keep a copy: nothing saves it.
    """
    copies: Counter[int] = Counter()
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            copies.update({layer: len(stage.replicas) for layer in stage.layers})
    holders: dict[int, tuple[str, ...]] = {}
    for pipeline in plan.pipelines:
        for index, stage in enumerate(pipeline.stages):
            neighbour = pipeline.stages[(index + 1) % len(pipeline.stages)].replicas[0].device
            if neighbour not in {device for replica in stage.replicas for device in replica.devices}:
                alone = (layer for layer in stage.layers if copies[layer] == 1)
                holders |= dict.fromkeys(alone, (neighbour,))
    return holders


def backup_moves(plan: Plan, scenario: Scenario) -> tuple[LayerTransfer, ...]:
    """Return what travels so that all backups of a plan are as new as the layers, in an order that all agree on."""
    owners = {
        layer: replica.device
        for pipeline in plan.pipelines
        for stage in pipeline.stages
        for replica in stage.replicas
        for layer in stage.layers
    }
    copies = sorted(backup_holders(plan).items())
    wanted = [(owners[layer], holder, layer) for layer, holders in copies for holder in holders]
    moves = []
    for (source, target, _), run in groupby(enumerate(wanted), lambda each: (*each[1][:2], each[1][2] - each[0])):
        layers = [layer for _, (_, _, layer) in run]
        first, end = layers[0], layers[-1] + 1
        moves.append(LayerTransfer(source, target, first, end, state_bytes(scenario, first, end)))
    return tuple(moves)
