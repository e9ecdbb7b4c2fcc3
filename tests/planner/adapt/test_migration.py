"""What travels between two plans: what a device needs and does not hold, from the nearest that holds it."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.adapt.migration import (
    LayerTransfer,
    Migration,
    held_shards,
    migration_between,
    migration_time_s,
    time_to_reach_s,
)
from planner.plan.plan import Plan, Replica, Stage
from planner.scenario.scenario import Scenario
from planner.scenario.training import Optimizer
from tests.helpers.scenarios.builders import layered_plan, mesh_scenario
from traces.common.errors import InputError

LAYERS = 5
DEVICES = 4


def scenario(optimizer: str = "sgd") -> Scenario:
    """Layers of 1, 2, 3 ... kB; the link from a device is the faster the nearer the other one's number is."""
    made = mesh_scenario(
        DEVICES,
        [0.1] * LAYERS,
        [0.1] * LAYERS,
        link=lambda a, b: (8e6 / abs(a - b), 0.5 * abs(a - b)),
        parameter_bytes=[1000 * (layer + 1) for layer in range(LAYERS)],
        global_batch=4,
    )
    return replace(made, training=replace(made.training, optimizer=Optimizer(optimizer)))


def placed(ends: Sequence[int], holders: Sequence[Sequence[int]]) -> Plan:
    plan = layered_plan(scenario(), [([(LAYERS, 1, 1)], [4])])
    stages = tuple(
        Stage(first, end, tuple(Replica(f"device-{name}") for name in names), 1)
        for first, end, names in zip([0, *ends], ends, holders, strict=False)
    )
    return replace(plan, pipelines=(replace(plan.pipelines[0], stages=stages),))


def test_it_comes_from_the_nearest_holder_with_what_the_optimizer_keeps() -> None:
    old, new = placed([3, 5], [[0, 2], [3]]), placed([2, 5], [[0, 1], [3]])
    moves = migration_between(old, new, scenario("adamw")).moves
    # Devices 0 and 2 are as near to device 1: the one that comes first.
    assert moves == (
        LayerTransfer("device-0", "device-1", 0, 2, 3 * 3000),
        LayerTransfer("device-2", "device-3", 2, 3, 3 * 3000),
    )


def test_devices_of_a_tensor_parallel_group_hold_parts_of_their_layers() -> None:
    whole = placed([5], [[0, 1]])
    group = tuple(replace(each, replicas=(Replica("device-0", partners=("device-1",)),)) for each in whole.stages)
    sharded = replace(whole, pipelines=(replace(whole.pipelines[0], stages=group),))
    assert held_shards(whole) == held_shards(replace(whole, schedule="gpipe")) != held_shards(sharded)


def test_who_is_gone_gives_nothing_and_a_backup_does() -> None:
    old, new = placed([2, 5], [[0], [1]]), placed([5], [[1]])
    backups = {0: ("device-2",), 1: ("device-2",)}
    assert migration_between(old, new, scenario()).moves == (LayerTransfer("device-0", "device-1", 0, 2, 3000),)
    gone = migration_between(old, new, scenario(), ["device-0"], backups)
    assert gone.moves == (LayerTransfer("device-2", "device-1", 0, 2, 3000),)
    at_home = migration_between(old, new, scenario(), ["device-0"], {0: ("device-1",), 1: ("device-1",)})
    assert at_home == Migration(())
    with pytest.raises(InputError, match="no device holds layer 0 any more"):
        migration_between(old, new, scenario(), ["device-0"])


def grouped(*replicas: Replica) -> Plan:
    whole = placed([LAYERS], [[0]])
    stage = replace(whole.stages[0], replicas=replicas)
    return replace(whole, pipelines=(replace(whole.pipelines[0], stages=(stage,)),))


PAIR = Replica("device-0", 0.5, ("device-1",))


def test_a_part_of_a_layer_is_not_the_layer() -> None:
    """A device of a tensor-parallel group gets the other part, too; one that has the whole layer gets nothing."""
    made = scenario()
    made = replace(made, model=replace(made.model, sharded={2: made.model}))
    parts, whole = grouped(PAIR, Replica("device-2", 0.5)), placed([LAYERS], [[0]])
    (move,) = migration_between(parts, whole, made, ["device-2"]).moves
    assert (move.source, move.target, move.first_layer, move.end_layer) == ("device-1", "device-0", 0, LAYERS)
    both = placed([LAYERS], [[0, 2]])
    assert {each.target for each in migration_between(both, grouped(PAIR), made, ["device-2"]).moves} == {"device-1"}
    with pytest.raises(InputError, match="no device holds layer 0 any more"):
        migration_between(grouped(PAIR), whole, made, ["device-1"])


def test_tensor_parallel_groups_stay_unless_a_device_is_lost() -> None:
    """Their ranks are formed once; what needs no new set-up may change."""
    made = scenario()
    made = replace(made, model=replace(made.model, sharded={2: made.model}))
    group, whole = grouped(PAIR, Replica("device-2", 0.5)), placed([LAYERS], [[0]])
    for old, new in ((group, whole), (whole, group), (group, replace(group, connections=2))):
        assert time_to_reach_s(old, new, made) == inf
        assert time_to_reach_s(old, new, made, ["device-3"]) == inf
        with pytest.raises(InputError, match="tensor-parallel groups cannot change during a run"):
            migration_between(old, new, made)
    assert time_to_reach_s(group, replace(group, order="dynamic"), made) == 0
    assert time_to_reach_s(group, whole, made, ["device-2"]) < inf


def test_the_time_is_that_of_the_busiest_link_and_the_longest_latency() -> None:
    one, other, far = (LayerTransfer("device-0", f"device-{target}", 0, 1, 10**6) for target in (1, 1, 3))
    assert migration_time_s(Migration(()), scenario()) == 0
    assert migration_time_s(Migration((one,)), scenario()) == pytest.approx(1.5)
    assert migration_time_s(Migration((one, other)), scenario()) == pytest.approx(2.5)
    assert migration_time_s(Migration((one, far)), scenario()) == pytest.approx(3 + 1.5)


@st.composite
def placements(draw: st.DrawFn) -> Plan:
    names = list(draw(st.permutations(range(DEVICES))))
    ends = [*sorted(draw(st.sets(st.integers(1, LAYERS - 1), max_size=2))), LAYERS]
    return placed(ends, [[names.pop() for _ in range(draw(st.integers(1, 1 + (len(names) > 3))))] for _ in ends])


def held(plan: Plan) -> set[tuple[str, int]]:
    return {
        (replica.device, layer)
        for stage in plan.pipelines[0].stages
        for replica in stage.replicas
        for layer in range(stage.first_layer, stage.end_layer)
    }


@given(placements(), placements())
def test_everybody_gets_what_is_missing_once_from_somebody_who_holds_it(old: Plan, new: Plan) -> None:
    migration = migration_between(old, new, scenario())
    moved = [(move, layer) for move in migration.moves for layer in range(move.first_layer, move.end_layer)]
    assert sorted((move.target, layer) for move, layer in moved) == sorted(held(new) - held(old))
    assert {(move.source, layer) for move, layer in moved} <= held(old)
    assert migration.size_bytes == sum(1000 * (layer + 1) for _, layer in moved)
    assert migration_between(old, old, scenario()) == Migration(())
