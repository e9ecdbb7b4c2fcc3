"""Forecasts of steps beside the steps of simulated runs."""

import math
from dataclasses import replace

import numpy as np
import pytest

from planner.adapt.observation import Observation
from planner.adapt.policy import Coverage, coverage_of
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.step.orders import with_schedule
from planner.systems.auto.forecasting.predictions import PROBABILITY, Predictions
from planner.systems.auto.policy import AutoPolicy
from planner.systems.registry import checked_policy
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import chain_plan, chain_scenario
from tests.helpers.strategies.run_strategies import with_links
from traces.trace import LinkTrace


class Predicting:
    """A policy that never changes the plan, and predicts steps.

    Attributes:
        changes: Number of steps with a new regime of a link.
        hoped_s: Predicted time after each step, if links without use were as declared, and with links as seen.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.predictions = Predictions(scenario)
        self.hoped_s: list[tuple[float, float]] = []
        self.changes = 0
        self._ended_s = 0.0

    def decide(self, observation: Observation, plan: Plan) -> None:
        duration_s, self._ended_s = observation.end_s - self._ended_s, observation.end_s
        self.changes += self.predictions.learn(observation, duration_s)[1]
        self.predictions.believe()
        self.hoped_s.append((self.predictions.optimistic_s(plan), self.predictions.step_s(plan)))


def two_stages(latency_s: float, **options: object) -> tuple[Scenario, Plan]:
    scenario = chain_scenario([0.1, 0.1], [0.2, 0.2], output_bytes=[1000, 0], bandwidth_bps=1e6, **options)  # type: ignore[arg-type]
    scenario = with_links(scenario, [replace(link, latency_s=latency_s) for link in scenario.cluster.links])
    return scenario, replace(
        with_schedule(chain_plan(scenario, depths=[6, 3]), scenario, "compact-zb"), order="dynamic"
    )


def test_a_link_in_use_is_not_hoped_to_be_as_declared_when_its_rate_changes() -> None:
    scenario, plan = two_stages(0.1)
    trace = LinkTrace(np.array([0.0, 60.0]), np.array([1e6, 1e4]), 240.0)
    scenario = with_links(scenario, [replace(link, trace=trace) for link in scenario.cluster.links])
    policy = Predicting(scenario)
    Simulator(duration_s=200.0).run(scenario, plan, policy, 1000)
    assert policy.changes
    assert [hoped_s for hoped_s, _ in policy.hoped_s] == pytest.approx([step_s for _, step_s in policy.hoped_s])


def test_the_interval_holds_the_errors_of_predictions_with_its_probability() -> None:
    scenario, plan = two_stages(0.1)
    predictions = Predictions(scenario)
    assert predictions.interval_s(plan) is None
    step_s, random = predictions.step_s(plan), np.random.default_rng(3)
    for value in random.normal(0.0, 0.1, 400):
        predictions.bias.learn(plan, step_s * math.exp(value), step_s)
    interval_s = predictions.interval_s(plan)
    assert interval_s is not None
    least_s, most_s = interval_s
    held = np.mean([least_s <= step_s * math.exp(value) <= most_s for value in random.normal(0.0, 0.1, 2000)])
    assert held == pytest.approx(PROBABILITY, abs=0.07)


def test_steps_within_their_forecasts_are_counted_whoever_owns_the_policy() -> None:
    scenario, plan = two_stages(0.1)
    policy = AutoPolicy(scenario, lambda *_: (plan, 0.0))
    Simulator().run(scenario, plan, policy, 20)
    assert policy.coverage.steps > 10
    assert policy.coverage.share == 1.0
    assert coverage_of(checked_policy(policy)) is policy.coverage
    coverage = Coverage()
    for duration_s in (0.9, 1.0, 1.5, 2.0, 2.1):
        coverage.add((1.0, 2.0), duration_s)
    assert coverage.share == 0.6
