from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.check import check_plan
from planner.cost.network import ConstantRatePath
from planner.plan.plan import Plan
from planner.scenario.effects import ComputeEffects, Effects
from planner.scenario.scenario import Scenario
from planner.step.evaluate import step_time_s, step_times_s
from planner.step.orders import with_schedule
from planner.step.shared_links.step_time import shared_step_time_s
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import chain_plan, chain_scenario, layered_plan, makespan_s, mesh_scenario

RATES = st.tuples(st.floats(1e3, 1e7), st.floats(0, 3))


@settings(max_examples=30)
@given(st.lists(RATES, min_size=1, max_size=6), st.sampled_from(["gpipe", "1f1b", "zb-h1"]))
def test_many_networks_at_once_are_as_many_alone(networks: list[tuple[float, float]], schedule: str) -> None:
    scenario = chain_scenario([1.0, 2.0, 0.5], [2.0, 3.0, 1.0], global_batch=6)
    plan = chain_plan(scenario, schedule=schedule, microbatches=[1, 2, 3])
    paths = [lambda source, target, each=each: ConstantRatePath(*each) for each in networks]
    alone = [step_time_s(plan, scenario, path) for path in paths]
    assert step_times_s(plan, scenario, paths).tolist() == pytest.approx(alone, rel=1e-12)


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-h2", "compact-zb", "portfolio", "interleaved-1f1b", "zb-v"])
@pytest.mark.parametrize("blocks", [False, True])
def test_every_schedule_takes_in_the_simulator_what_the_evaluator_says(schedule: str, blocks: bool) -> None:
    scenario, plan = blocking_case(blocks)
    made = with_schedule(plan, scenario, schedule)
    check_plan(made, scenario)
    assert step_time_s(made, scenario) == pytest.approx(makespan_s(Simulator().run(scenario, made, None, 1)), rel=1e-9)


@pytest.mark.parametrize("blocks", [False, True])
def test_devices_that_choose_their_actions_are_kept_from_none_by_messages(blocks: bool) -> None:
    scenario, plan = blocking_case(blocks)
    made = with_schedule(plan, scenario, "1f1b", "dynamic")
    simulated_s = makespan_s(Simulator().run(scenario, made, None, 1))
    assert shared_step_time_s(made, scenario) == pytest.approx(simulated_s, rel=1e-9)
    assert step_time_s(made, scenario) == pytest.approx(step_time_s(made, blocking_case(False)[0]), rel=1e-9)


def blocking_case(blocks: bool) -> tuple[Scenario, Plan]:
    """Two stages with slow messages, which keep devices from computing if ``blocks``."""
    scenario = mesh_scenario(
        2,
        [1.0] * 4,
        [2.0, 3.0, 1.0, 2.5],
        output_bytes=[500, 900, 100, 0],
        link=lambda a, b: (4e4, 0.75),
        global_batch=8,
    )
    scenario = replace(scenario, effects=Effects(compute=ComputeEffects(transfers_block=blocks)))
    return scenario, layered_plan(scenario, [([(2, 1, 2), (4, 1, 1)], [1] * 8)])
