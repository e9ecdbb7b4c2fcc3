"""Transfers of layer state between devices: for a new plan, and for backups.

A layer's state is its parameters and the optimizer's values for them. Gradients are not part of it, because plans
change between steps. A device that needs a layer which it does not hold receives the state from the holder whose path
to it has the highest rate.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import groupby

from planner.adapt.observation import Observation
from planner.cost.network import nominal_path, payload_bps
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.scenario.training import OPTIMIZER_STATES
from planner.step.shared_links.step_time import transfer_time_s
from traces.common.errors import InputError


@dataclass(frozen=True, slots=True)
class LayerTransfer:
    """The state of layers ``first_layer`` to ``end_layer - 1``, sent from device ``source`` to device ``target``.

    Attributes:
        size_bytes: Bytes of all that is sent.
        has_outer_state: Whether the state of the layers' outer steps is sent, too.
    """

    source: str
    target: str
    first_layer: int
    end_layer: int
    size_bytes: int
    has_outer_state: bool = False

    @property
    def layers(self) -> range:
        """Indices of the layers."""
        return range(self.first_layer, self.end_layer)


@dataclass(frozen=True, slots=True)
class Migration:
    """All transfers for a change from one plan to another, sorted by target and layer."""

    moves: tuple[LayerTransfer, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all transfers."""
        return sum(move.size_bytes for move in self.moves)


NO_MIGRATION = Migration(())


@dataclass(frozen=True, slots=True)
class Shard:
    """Part number ``part`` of the ``degree`` equal parts into which tensor parallelism divides a layer."""

    layer: int
    degree: int
    part: int


# Fields of a plan that may change from step to step while devices run on, if each device keeps its layers. A change of
# any other field needs a new set-up: all devices finish the previous step, and connections are made anew.
_CHANGEABLE = ("strategy", "schedule", "order", "pipelines", "compression", "noise_scale")


def needs_set_up(old: Plan, new: Plan) -> bool:
    """Return whether a change of plan needs a new set-up: layers move, or a field outside of `_CHANGEABLE` differs.

    With outer steps the weights of the mean are set up, too, which are the samples of the pipelines.
    """
    reweighs = new.synchronisation.has_outer_step and old.exchange_weights != new.exchange_weights
    once = any(getattr(old, name) != getattr(new, name) for name in set_up_once())
    return once or reweighs or _holders(old) != _holders(new)


def set_up_once() -> list[str]:
    """Return the fields of a plan whose change needs a new set-up."""
    return [field.name for field in fields(Plan) if field.name not in _CHANGEABLE]


def _holders(plan: Plan) -> list[list[tuple[int, int, list[tuple[str, ...]]]]]:
    """Return the layers and devices of each stage."""
    return [
        [(stage.first_layer, stage.end_layer, [replica.devices for replica in stage.replicas]) for stage in each.stages]
        for each in plan.pipelines
    ]


def migration_between(
    old: Plan,
    new: Plan,
    scenario: Scenario,
    gone: Collection[str] = (),
    backups: Mapping[int, Sequence[str]] | None = None,
) -> Migration:
    """Return the transfers of all layer state that devices need for the plan ``new`` and do not hold with ``old``.

    The state of the devices ``gone`` is lost; ``backups`` lists, by layer index, the devices that hold a backup of a
    layer's state. Assumption: if the degree of tensor parallelism changes, each new part of a layer is sent whole, by
    one device that holds an old part of the layer. Pipelines that train without a barrier have different parameters, so
    that a device gets the state of a device of its own pipeline.

    Raises:
        InputError: No device holds the state of a layer that ``new`` needs, or tensor-parallel groups would have to
            change although no device of ``old`` is lost: ranks form them once.
    """
    grouped = any(replica.partners for replica in (*old.replicas, *new.replicas))
    if grouped and set(gone).isdisjoint(old.devices) and needs_set_up(old, new):
        raise InputError(
            "tensor-parallel groups cannot change during a run, nor the layers and settings of a plan that has them",
            where="policy",
            valid="change microbatches, depths, schedules or compression, or use plans without groups",
        )
    if new.synchronisation.method != "allreduce" and len(new.pipelines) == len(old.pipelines) > 1:
        each = [
            _between(replace(old, pipelines=(before,)), replace(new, pipelines=(after,)), scenario, gone, backups)
            for before, after in zip(old.pipelines, new.pipelines, strict=True)
        ]
        return Migration(tuple(sorted((move for one in each for move in one.moves), key=_place)))
    return _between(old, new, scenario, gone, backups)


def time_to_reach_s(old: Plan, new: Plan, scenario: Scenario, away: Collection[str] = ()) -> float:
    """Return the time after which devices have their layers of ``new``, seconds; infinite if they cannot have them.

    The state of the devices in ``away`` is lost, but not the backups of it.
    """
    try:
        migration = migration_between(old, new, scenario, away, backup_holders(old) if away else None)
    except InputError:
        return math.inf
    return migration_time_s(migration, scenario, new.connections)


def is_reachable(observation: Observation, new: Plan, scenario: Scenario) -> bool:
    """Return whether present devices, or backups on them, have the state of all layers that ``new`` needs."""
    running = observation.plan
    try:
        migration_between(running, new, scenario, observation.missing, backup_holders(running))
    except InputError:
        return False
    return True


def _place(move: LayerTransfer) -> tuple[str, int]:
    return move.target, move.first_layer


def _between(
    old: Plan,
    new: Plan,
    scenario: Scenario,
    gone: Collection[str],
    backups: Mapping[int, Sequence[str]] | None,
) -> Migration:
    held = {device: shards for device, shards in held_shards(old).items() if device not in gone}
    copies = {layer: [each for each in own if each not in gone] for layer, own in (backups or {}).items()}
    return _from_nearest(held, copies, new, scenario)


def moves_from(held: Mapping[str, Collection[int]], plan: Plan, scenario: Scenario) -> Migration:
    """Return the transfers of all layer state that devices need for a plan without tensor parallelism and do not hold.

    ``held`` gives the indices of the layers whose state a device holds, by device name.

    Raises:
        InputError: No device holds a layer.
    """
    whole = {device: frozenset(Shard(layer, 1, 0) for layer in layers) for device, layers in held.items()}
    return _from_nearest(whole, {}, plan, scenario)


def _from_nearest(
    held: Mapping[str, frozenset[Shard]], backups: Mapping[int, Sequence[str]], new: Plan, scenario: Scenario
) -> Migration:
    """Return the transfers of the shards that devices need for ``new`` and do not hold, from their nearest holders."""
    holders: dict[int, list[str]] = defaultdict(list)
    for device, shards in held.items():
        for shard in shards:
            holders[shard.layer].append(device)
    for layer, devices in backups.items():
        holders[layer] += devices

    def source_of(target: str, layer: int) -> str:
        # What a device holds of a layer contains every part of it only if it holds the whole one.
        degrees = {shard.degree for shard in held.get(target, ()) if shard.layer == layer}
        known = [each for each in holders.get(layer, ()) if each != target or not degrees or 1 in degrees]
        return nearest(known, target, layer, scenario)

    wanted = [
        (source, target, shard.degree, shard.layer)
        for target, shards in held_shards(new).items()
        for shard in sorted(shards - held.get(target, frozenset()), key=lambda shard: shard.layer)
        if (source := source_of(target, shard.layer)) != target
    ]
    return Migration(joined(wanted, partial(_shards, scenario)))


def migration_time_s(migration: Migration, scenario: Scenario, connections: int = 1) -> float:
    """Return an estimate of the time of a migration, seconds.

    All transfers start at the same time and share links as in the simulator, at the bandwidths that the cluster
    declares, over connections that have sent nothing before: ``connections`` between two regions, one inside a region.
    If windows of TCP open in both directions of a link at a time, acknowledgements may take longer than estimated.
    """
    sizes_bytes: dict[tuple[str, str], list[int]] = defaultdict(list)
    for move in migration.moves:
        sizes_bytes[move.source, move.target].append(move.size_bytes)
    return transfer_time_s(sizes_bytes, scenario, connections) if sizes_bytes else 0.0


def least_migration_s(migration: Migration, scenario: Scenario) -> float:
    """Return a lower bound on the time of a migration, seconds: the last transfer over its busiest link must arrive."""
    bits: dict[str, float] = defaultdict(float)
    arrives_s: dict[str, float] = {}
    capacity_bps = {}
    for move in migration.moves:
        later_s = nominal_path(scenario, move.source, move.target).propagation_s(move.size_bytes)
        for link in scenario.cluster.path(move.source, move.target):
            bits[link.name] += 8 * move.size_bytes
            arrives_s[link.name] = min(later_s, arrives_s.get(link.name, later_s))
            capacity_bps[link.name] = payload_bps(scenario.effects.network, link.bandwidth_bps)
    return max((amount / capacity_bps[name] + arrives_s[name] for name, amount in bits.items()), default=0.0)


def state_bytes(scenario: Scenario, first_layer: int, end_layer: int, degree: int = 1) -> int:
    """Return the bytes of parameters and optimizer state of layers, as one of ``degree`` devices holds them."""
    copies = 1 + OPTIMIZER_STATES[scenario.training.optimizer.name]
    return copies * scenario.model.at_degree(degree).parameter_bytes(first_layer, end_layer)


def held_shards(plan: Plan) -> dict[str, frozenset[Shard]]:
    """Return the shards that each device holds."""
    held: dict[str, frozenset[Shard]] = defaultdict(frozenset)
    for stage in plan.stages:
        for replica in stage.replicas:
            for part, device in enumerate(replica.devices):
                held[device] |= {Shard(layer, replica.tensor_parallel, part) for layer in stage.layers}
    return held


def nearest(holders: Iterable[str], target: str, layer: int, scenario: Scenario) -> str:
    """Return the holder of a layer whose path to a device has the highest rate: the device itself if it holds it.

    Raises:
        InputError: There is no holder.
    """
    known = list(dict.fromkeys(holders))
    if target in known:
        return target
    if not known:
        raise InputError(
            f"no device holds layer {layer} any more",
            where=f"device '{target}'",
            valid="keep each layer on two devices, or its backup on another device",
        )
    return max(known, key=lambda source: nominal_path(scenario, source, target).rate_bps)


def joined(
    wanted: Sequence[tuple[str, str, int, int]], transfer: Callable[[str, str, int, int, int], LayerTransfer]
) -> tuple[LayerTransfer, ...]:
    """Return transfers from tuples (source, target, form, layer), with consecutive layers of one form joined.

    ``transfer`` returns one by source, target, the first layer, the end (exclusive) and their form.
    """
    transfers = []
    for (source, target, form, _), run in groupby(
        enumerate(wanted), key=lambda entry: (*entry[1][:3], entry[1][3] - entry[0])
    ):
        layers = [layer for _, (_, _, _, layer) in run]
        first, end = layers[0], layers[-1] + 1
        transfers.append(transfer(source, target, first, end, form))
    return tuple(transfers)


def backup_holders(plan: Plan) -> Mapping[int, tuple[str, ...]]:
    """Return the devices that back up a layer's state, by layer index, for each layer that only one device trains.

    The backup is on the first device of the next stage; the first stage follows the last one. A pipeline of one stage
    has no backups, and neither have workers that take outer steps: a new one gets the state of another worker.
    """
    if plan.synchronisation.has_outer_step:
        return {}
    copies: Counter[int] = Counter()
    for stage in plan.stages:
        copies.update({layer: len(stage.replicas) for layer in stage.layers})
    holders: dict[int, tuple[str, ...]] = {}
    for pipeline in plan.pipelines:
        for index, stage in enumerate(pipeline.stages):
            neighbour = pipeline.stages[(index + 1) % len(pipeline.stages)].replicas[0].device
            if neighbour not in {device for replica in stage.replicas for device in replica.devices}:
                alone = (layer for layer in stage.layers if copies[layer] == 1)
                holders |= dict.fromkeys(alone, (neighbour,))
    return holders


# The largest number of steps whose backups are incomplete at a time; if links are slow, further backups are skipped.
MOST_INCOMPLETE_BACKUPS = 2


def backup_moves(plan: Plan, scenario: Scenario) -> tuple[LayerTransfer, ...]:
    """Return the transfers that update all backups of a plan, sorted by layer, so that all devices agree on them."""
    owners = {layer: replica.device for stage in plan.stages for replica in stage.replicas for layer in stage.layers}
    copies = sorted(backup_holders(plan).items())
    wanted = [(owners[layer], holder, 1, layer) for layer, held_by in copies for holder in held_by]
    return joined(wanted, partial(_shards, scenario))


def _shards(scenario: Scenario, source: str, target: str, first: int, end: int, degree: int) -> LayerTransfer:
    return LayerTransfer(source, target, first, end, state_bytes(scenario, first, end, degree))
