"""The sum over all copies of parameters that layers share: once in a step, apart from the sums of everything else."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cost.synchronisation import gradient_syncs, holders
from planner.plan.plan import Plan, Synchronisation
from planner.scenario.scenario import Scenario
from planner.step.evaluate import step_time_s
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import layered_plan, mesh_scenario

BYTES = [60, 40, 20, 80]
TABLE_BYTES = 40


def tied_scenario(devices: int, link: tuple[float, float] = (8e3, 0.5)) -> Scenario:
    """Four layers of which the first and the last share a table of ten numbers."""
    scenario = mesh_scenario(
        devices, [1.0] * 4, [1.0] * 4, parameter_bytes=BYTES, global_batch=4, link=lambda a, b: link
    )
    first, *inner, last = scenario.model.layers
    tied = (replace(first, tied_bytes=TABLE_BYTES), *inner, replace(last, tied_bytes=TABLE_BYTES))
    return replace(scenario, model=replace(scenario.model, layers=tied))


def names(*numbers: int) -> tuple[str, ...]:
    return tuple(f"device-{number}" for number in numbers)


def test_the_two_ends_of_a_pipeline_sum_their_copies() -> None:
    scenario = tied_scenario(3)
    plan = layered_plan(scenario, [([(1, 1, 1), (3, 1, 1), (4, 1, 1)], [2, 2])])
    syncs = gradient_syncs(plan, scenario)
    assert [(sync.devices, sync.elements, sync.tied) for sync in syncs] == [(names(0, 2), 10, True)]


def test_one_device_with_both_copies_sends_nothing() -> None:
    scenario = tied_scenario(1)
    assert gradient_syncs(layered_plan(scenario, [([(4, 1, 1)], [4])]), scenario) == ()


def test_replicas_sum_the_table_once_although_they_hold_it_twice() -> None:
    scenario = tied_scenario(2)
    whole, tied = gradient_syncs(layered_plan(scenario, [([(4, 2, 1)], [4])]), scenario)
    assert (whole.elements, whole.tied) == ((sum(BYTES) - 2 * TABLE_BYTES) // 4, False)
    assert (tied.elements, tied.tied, tied.devices) == (10, True, whole.devices)


def test_without_waiting_each_pipeline_sums_its_own_copies() -> None:
    scenario = tied_scenario(3)
    plan = layered_plan(scenario, [([(2, 1, 1), (4, 1, 1)], [2]), ([(4, 1, 1)], [2])])
    plan = replace(plan, synchronisation=Synchronisation("asgd"))
    assert [sync.devices for sync in gradient_syncs(plan, scenario)] == [names(0, 1)]


@st.composite
def plans(draw: st.DrawFn) -> tuple[Scenario, Plan]:
    """Up to two pipelines, each of up to four stages with up to two replicas."""
    pipelines, devices = [], 0
    for _ in range(draw(st.integers(1, 2))):
        cuts = draw(st.sets(st.integers(1, 3)))
        stages = [(end, draw(st.integers(1, 2)), 1) for end in [*sorted(cuts), 4]]
        devices += sum(replicas for _, replicas, _ in stages)
        pipelines.append((stages, [2]))
    scenario = tied_scenario(devices)
    scenario = replace(scenario, training=replace(scenario.training, global_batch=2 * len(pipelines)))
    plan = layered_plan(scenario, pipelines)
    bucket_bytes = draw(st.sampled_from([0, 30]))
    return scenario, replace(plan, synchronisation=Synchronisation(bucket_bytes=bucket_bytes))


@given(plans())
def test_every_gradient_is_summed_once_over_all_that_hold_it(case: tuple[Scenario, Plan]) -> None:
    scenario, plan = case
    syncs = gradient_syncs(plan, scenario)
    own = {layer: {replica.device for *_, replica in holders(plan.pipelines, layer)} for layer in range(4)}
    summed = dict.fromkeys(range(4), 0)
    for sync in syncs:
        if sync.tied:
            assert (set(sync.devices), sync.elements) == (own[0] | own[3], 10)
            continue
        rest = [BYTES[layer] - (TABLE_BYTES if layer in (0, 3) else 0) for layer in range(4)]
        layers = range(sync.first_layer, sync.end_layer)
        assert sync.elements == sum(rest[layer] for layer in layers) // 4
        for layer in layers:
            assert set(sync.devices) == own[layer]
            summed[layer] += 1
    assert [summed[layer] for layer in range(4)] == [int(len(own[layer]) > 1) for layer in range(4)]
    assert sum(sync.tied for sync in syncs) == int(len(own[0] | own[3]) > 1)
    for device in plan.devices:
        keys = [sync.key for sync in syncs if device in sync.devices]
        assert len(keys) == len(set(keys))


@given(plans())
def test_the_simulator_takes_as_long_as_the_plan_says(case: tuple[Scenario, Plan]) -> None:
    scenario, plan = case
    run = Simulator().run(scenario, plan, None, 1)
    assert max(event.end_s for event in run.events) == pytest.approx(step_time_s(plan, scenario))


def test_a_bucket_that_begins_behind_the_last_tied_layer_is_another_sum() -> None:
    scenario = tied_scenario(2, (8e2, 0.0))
    first, inner, behind, last = scenario.model.layers
    layers = (first, replace(inner, tied_bytes=TABLE_BYTES), behind, replace(last, tied_bytes=0))
    scenario = replace(scenario, model=replace(scenario.model, layers=layers))
    plan = layered_plan(scenario, [([(4, 2, 1)], [4])])
    plan = replace(plan, synchronisation=Synchronisation(bucket_bytes=BYTES[2] + BYTES[3]))
    keys = [sync.key for sync in gradient_syncs(plan, scenario)]
    assert len(keys) == len(set(keys)) == 3
    run = Simulator().run(scenario, plan, None, 1)
    assert max(event.end_s for event in run.events) == pytest.approx(step_time_s(plan, scenario))
