"""Backups: those layers that stand on one device alone have a copy on another one, and no others have."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.adapt.migration import backup_holders, migration_between
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.scenario.scenario import Scenario
from tests.helpers.scenarios.builders import layered_plan, mesh_scenario
from traces.common.errors import InputError


def made(widths: list[int]) -> tuple[Scenario, Plan]:
    """A stage of two layers and so many replicas for each width, and a device besides."""
    layers = 2 * len(widths)
    scenario = mesh_scenario(sum(widths) + 1, [0.1] * layers, [0.1] * layers, global_batch=4)
    stages = [(2 * (index + 1), width, 1) for index, width in enumerate(widths)]
    return scenario, layered_plan(scenario, [(stages, [4])])


def test_a_stage_alone_is_kept_by_the_next_and_the_last_by_the_first() -> None:
    _, plan = made([1, 2, 1])
    kept = {0: ("device-1",), 1: ("device-1",), 4: ("device-0",), 5: ("device-0",)}
    assert backup_holders(plan) == kept


def test_layers_of_several_pipelines_need_none() -> None:
    scenario = mesh_scenario(2, [0.1], [0.1], global_batch=4)
    assert backup_holders(layered_plan(scenario, [([(1, 1, 1)], [2])] * 2)) == {}


def test_nobody_keeps_what_a_device_alone_holds() -> None:
    _, plan = made([1])
    assert backup_holders(plan) == {}


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.data())
def test_any_one_device_may_leave_where_there_are_several_stages_or_replicas(
    widths: list[int], data: st.DataObject
) -> None:
    scenario, plan = made(widths)
    gone = data.draw(st.sampled_from(plan.devices))
    spare = scenario.cluster.devices[-1].name
    layers = len(scenario.model.layers)
    whole = Stage(0, layers, (Replica(spare),), 1)
    from_spare = replace(plan, pipelines=(Pipeline((whole,), (4,)),))
    if widths == [1]:
        with pytest.raises(InputError, match="no device holds layer 0"):
            migration_between(plan, from_spare, scenario, [gone], backup_holders(plan))
        return
    moves = migration_between(plan, from_spare, scenario, [gone], backup_holders(plan)).moves
    assert sorted(layer for move in moves for layer in range(move.first_layer, move.end_layer)) == list(range(layers))
    assert gone not in {move.source for move in moves}
