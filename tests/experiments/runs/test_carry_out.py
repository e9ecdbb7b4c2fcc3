"""What is printed of a run."""

from dataclasses import replace

import pytest

from experiments.runs.carry_out import present
from planner.plan.plan import Synchronisation
from planner.runs.record import RunRecord
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import chain_plan, chain_scenario


@pytest.mark.parametrize(("interval_steps", "is_said"), [(3, True), (2, False)])
def test_a_run_that_is_shorter_than_an_interval_says_so(interval_steps: int, is_said: bool) -> None:
    scenario = chain_scenario([1e-3] * 2, [1e-3] * 2)
    simulated = Simulator().run(scenario, chain_plan(scenario), None, 2)
    plan = replace(simulated.plan, synchronisation=Synchronisation("diloco", interval_steps=interval_steps))
    text = present(RunRecord("simulated", scenario, plan, simulated.events, ()), as_json=False)
    assert ("exchanges    the plan has them after every 3 steps, more than the run had" in text) is is_said
