"""What is left after a loss is enough or it is not, and what travels then is what is missing."""

from collections.abc import Mapping
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from planner.adapt.copies import layers_of, missing_layers, newest_complete, newest_of_workers, restoring_moves
from planner.adapt.migration import LayerTransfer, backup_holders, backup_moves
from planner.plan.plan import Pipeline, Plan, Replica, Stage, Synchronisation
from planner.scenario.scenario import Scenario
from tests.helpers.scenarios.builders import mesh_scenario

LAYERS = 5
DEVICES = 4

HELD = st.dictionaries(st.integers(0, 6), st.frozensets(st.integers(0, LAYERS - 1)), max_size=4)


def scenario() -> Scenario:
    """Device 0 is nearest to device 2, and device 1 to device 3."""
    return mesh_scenario(
        DEVICES,
        [1.0] * LAYERS,
        [1.0] * LAYERS,
        link=lambda a, b: (2e6 if a - b == 2 else 1e6, 0.0),
        parameter_bytes=[1000, 2000, 3000, 4000, 5000],
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Pipelines of stages, with replicas, on some of the devices."""
    names = [f"device-{index}" for index in draw(st.permutations(range(DEVICES)))]
    pipelines = []
    while names and (not pipelines or draw(st.booleans())):
        ends = [*sorted(draw(st.sets(st.integers(1, LAYERS - 1), max_size=min(2, len(names) - 1)))), LAYERS]
        first, stages = 0, []
        for index, end in enumerate(ends):
            spare = len(names) - (len(ends) - index)
            width = 1 + (draw(st.integers(0, min(1, spare))) if spare > 0 else 0)
            stages.append(Stage(first, end, tuple(Replica(names.pop()) for _ in range(width)), 1))
            first = end
        pipelines.append(Pipeline(tuple(stages), (4,)))
    return Plan("mesh", "mesh", "hand", "1f1b", tuple(pipelines))


@given(held=st.lists(HELD, min_size=1, max_size=4), latest=st.integers(0, 6))
def test_the_newest_step_of_which_everything_is_there(held: list[Mapping[int, frozenset[int]]], latest: int) -> None:
    complete = [
        step
        for step in range(latest + 1)
        if all(any(layer in each.get(step, ()) for each in held) for layer in range(LAYERS))
    ]
    assert newest_complete(held, LAYERS, latest) == max(complete, default=None)
    newest = max((step for each in held for step in each if step <= latest), default=0)
    there = {layer for each in held for layer in each.get(newest, ())}
    assert missing_layers(held, LAYERS, latest) == sorted(set(range(LAYERS)) - there)


@given(plan=plans(), held=st.lists(HELD, min_size=DEVICES, max_size=DEVICES), owner=st.integers(0, DEVICES - 1))
def test_what_travels_is_what_is_missing(plan: Plan, held: list[dict[int, frozenset[int]]], owner: int) -> None:
    held[owner][3] = frozenset(range(LAYERS))
    copies = {f"device-{index}": each for index, each in enumerate(held)}
    have = {device: set(each.get(3, ())) for device, each in copies.items()}
    moves = restoring_moves(plan, scenario(), 3, copies).moves
    for move in moves:
        layers = set(range(move.first_layer, move.end_layer))
        assert layers <= have[move.source]
        assert not layers & have[move.target]
        assert move.size_bytes == sum(1000 * (layer + 1) for layer in layers)
    received = {(move.target, layer) for move in moves for layer in range(move.first_layer, move.end_layer)}
    wanted = {(device, layer) for device in plan.devices for layer in layers_of(plan, device)}
    assert received == {(device, layer) for device, layer in wanted if layer not in have[device]}


@st.composite
def whole_pipelines(draw: st.DrawFn) -> Plan:
    """Pipelines that each have all layers, and meet in outer steps."""
    return replace(draw(plans()), synchronisation=Synchronisation("diloco", interval_steps=4))


@given(plan=whole_pipelines(), lost=st.sets(st.integers(0, DEVICES - 1)), data=st.data())
def test_workers_get_layers_from_their_own_first_replicas_or_begin_anew(
    plan: Plan, lost: set[int], data: st.DataObject
) -> None:
    gone = {f"device-{index}" for index in lost}
    newest = {device: data.draw(st.integers(1, 3)) for device in plan.devices}
    copies = {
        device: dict.fromkeys(range(data.draw(st.integers(0, newest[device])), newest[device] + 1), layers)
        for device in plan.devices
        if device not in gone and (layers := layers_of(plan, device))
    }
    step = newest_of_workers(copies, lambda step: plan, LAYERS, 3)
    leaders = {(stage.replicas[0].device, layer) for stage in plan.stages for layer in stage.layers}
    there = {at: {pair for pair in leaders if at in copies.get(pair[0], {})} for at in range(4)}
    able = [at for at in there if {layer for _, layer in there[at]} == set(range(LAYERS))]
    common = [at for at in able if all(at in each for each in copies.values())]
    assert step == max(common or able, default=None)
    if step is None:
        return
    moves = restoring_moves(plan, scenario(), step, copies, plan).moves
    source = {(move.target, layer): move.source for move in moves for layer in _layers(move)}
    for stage in plan.stages:
        leader, *others = (replica.device for replica in stage.replicas)
        for layer in stage.layers:
            if (leader, layer) in there[step]:
                lacking = {device for device in others if step not in copies.get(device, {})}
                assert {device: source.get((device, layer)) for device in others} == {
                    device: leader if device in lacking else None for device in others
                }
            else:
                # Replicas have equal states.
                (found,) = {source[device, layer] for device in (leader, *others)}
                assert (found, layer) in there[step]
    for move in moves:
        own_bytes = sum(1000 * (layer + 1) for layer in _layers(move))
        outer_bytes = 3 * own_bytes + 4 * len(_layers(move))
        assert move.size_bytes == own_bytes + (outer_bytes if (move.target, move.first_layer) in leaders else 0)


def test_replicas_that_begin_anew_have_one_source() -> None:
    """Otherwise their optimizers' states would differ, which nothing would show."""
    stages = [Stage(0, LAYERS, tuple(map(Replica, names)), 1) for names in (("device-0", "device-1"), ("device-2",))]
    stages.append(replace(stages[1], replicas=(Replica("device-3"),)))
    pipelines = tuple(Pipeline((stage,), (4,)) for stage in stages)
    plan = Plan("mesh", "mesh", "hand", "1f1b", pipelines, synchronisation=Synchronisation("diloco", interval_steps=4))
    copies = {name: {3: frozenset(range(LAYERS))} for name in ("device-1", "device-2", "device-3")}
    moves = restoring_moves(plan, scenario(), 3, copies, plan).moves
    assert [(move.source, move.target) for move in moves] == [("device-2", "device-0"), ("device-2", "device-1")]


@given(plan=plans())
def test_backups_get_what_they_keep(plan: Plan) -> None:
    kept = {(move.target, layer) for move in backup_moves(plan, scenario()) for layer in _layers(move)}
    assert kept == {(holder, layer) for layer, holders in backup_holders(plan).items() for holder in holders}
    for move in backup_moves(plan, scenario()):
        assert set(_layers(move)) <= layers_of(plan, move.source)


def _layers(move: LayerTransfer) -> range:
    return range(move.first_layer, move.end_layer)
