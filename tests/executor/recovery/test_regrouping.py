"""What is left after a loss is enough or it is not, and what travels then is what is missing."""

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from planner.adapt.copies import layers_of, missing_layers, newest_complete, restoring_moves
from planner.adapt.migration import LayerTransfer, backup_holders, backup_moves
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.scenario.scenario import Scenario
from tests.helpers.scenarios.builders import mesh_scenario

LAYERS = 5
DEVICES = 4

HELD = st.dictionaries(st.integers(0, 6), st.frozensets(st.integers(0, LAYERS - 1)), max_size=4)


def scenario() -> Scenario:
    return mesh_scenario(DEVICES, [1.0] * LAYERS, [1.0] * LAYERS, parameter_bytes=[1000, 2000, 3000, 4000, 5000])


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


@given(plan=plans())
def test_backups_get_what_they_keep(plan: Plan) -> None:
    kept = {(move.target, layer) for move in backup_moves(plan, scenario()) for layer in _layers(move)}
    assert kept == {(holder, layer) for layer, holders in backup_holders(plan).items() for holder in holders}
    for move in backup_moves(plan, scenario()):
        assert set(_layers(move)) <= layers_of(plan, move.source)


def _layers(move: LayerTransfer) -> range:
    return range(move.first_layer, move.end_layer)
