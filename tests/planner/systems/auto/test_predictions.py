"""Predicted steps against the steps of simulated runs."""

from dataclasses import replace

import numpy as np
import pytest

from planner.adapt.observation import Observation
from planner.adapt.policy import covered_share
from planner.plan.plan import Plan
from planner.runs.metrics import measure
from planner.scenario.scenario import Scenario
from planner.step.evaluate import step_time_s
from planner.step.orders import with_schedule
from planner.systems.auto.forecasting.predictions import Predictions
from planner.systems.auto.policy import AutoPolicy
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import chain_plan, chain_scenario
from tests.helpers.strategies.run_strategies import with_links
from traces.trace import LinkTrace


class Predicting:
    """A policy that never changes the plan, and predicts each step before it has learnt an error.

    Attributes:
        pairs_s: Predicted time of each step, on links as before it, and its time, seconds.
        changes: Number of steps with a new regime of a link.
        hoped_s: Predicted time after each step, if links without use were as declared, and with links as seen.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.predictions = Predictions(scenario)
        self.pairs_s: list[tuple[float, float]] = []
        self.hoped_s: list[tuple[float, float]] = []
        self.changes = 0
        self._ended_s = 0.0

    def decide(self, observation: Observation, plan: Plan) -> None:
        duration_s, self._ended_s = observation.end_s - self._ended_s, observation.end_s
        self.pairs_s.append((self.predictions.step_s(plan), duration_s))
        self.changes += self.predictions.learn(observation, duration_s)[1]
        self.predictions.believe()
        self.hoped_s.append((self.predictions.optimistic_s(plan), self.predictions.step_s(plan)))


def two_stages(latency_s: float, **options: object) -> tuple[Scenario, Plan]:
    scenario = chain_scenario([0.1, 0.1], [0.2, 0.2], output_bytes=[1000, 0], bandwidth_bps=1e6, **options)  # type: ignore[arg-type]
    scenario = with_links(scenario, [replace(link, latency_s=latency_s) for link in scenario.cluster.links])
    return scenario, replace(
        with_schedule(chain_plan(scenario, depths=[6, 3]), scenario, "compact-zb"), order="dynamic"
    )


@pytest.mark.parametrize("latency_s", [0.0, 0.3, 1.0])
def test_steps_are_those_in_the_midst_of_a_run(latency_s: float) -> None:
    scenario, plan = two_stages(latency_s)
    policy = Predicting(scenario)
    step_s = measure(Simulator().run(scenario, plan, policy, 8)).step_s
    predicted_s, _ = policy.pairs_s[-1]
    assert predicted_s == pytest.approx(step_s, rel=0.01)
    if not latency_s:
        # A single step would be too long.
        assert step_time_s(plan, scenario) > 1.03 * step_s


def test_a_link_in_use_is_not_hoped_to_be_as_declared_when_its_rate_changes() -> None:
    scenario, plan = two_stages(0.1)
    trace = LinkTrace(np.array([0.0, 60.0]), np.array([1e6, 1e4]), 240.0)
    scenario = with_links(scenario, [replace(link, trace=trace) for link in scenario.cluster.links])
    policy = Predicting(scenario)
    Simulator(duration_s=200.0).run(scenario, plan, policy, 1000)
    assert policy.changes
    assert [hoped_s for hoped_s, _ in policy.hoped_s] == pytest.approx([step_s for _, step_s in policy.hoped_s])


def test_steady_steps_are_within_their_forecasts() -> None:
    scenario, plan = two_stages(0.1)
    policy = AutoPolicy(scenario, lambda *_: (plan, 0.0))
    Simulator().run(scenario, plan, policy, 20)
    assert policy.coverage.steps == 19
    assert covered_share(policy) == 1.0
