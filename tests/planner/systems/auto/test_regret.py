"""The budget of regret: what the policy loses at most against the first plan, on courses of a link drawn at random."""

from itertools import accumulate

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from planner.adapt.regret import HOUR_S, REGRET_SHARE, RegretBudget
from planner.plan.plan import Plan
from planner.runs.metrics import measure
from planner.scenario.scenario import Scenario
from planner.systems.auto.policy import AutoPolicy
from planner.systems.auto.portfolio import planned, searched_once
from sim.simulator import Simulator
from tests.helpers.scenarios.wide import NOMINAL_BPS, on_one_device, wide_scenario

LENGTHS_S = (5.0, 20.0, 60.0, 150.0, 400.0)
# Links are never slower than one that was never seen is assumed to be.
FACTORS = (0.25, 0.7, 1.0, 1.5)

# (seconds, rate as a multiple of the declared one) of each piece of a trace, which is repeated.
Course = list[tuple[float, float]]
COURSES = st.lists(st.tuples(st.sampled_from(LENGTHS_S), st.sampled_from(FACTORS)), min_size=2, max_size=8)


def scenario_on(course: Course) -> Scenario:
    """A link over which moving a layer takes seconds at the declared rate."""
    starts_s = [0.0, *accumulate(length_s for length_s, _ in course)]
    rates_at = [(start_s, NOMINAL_BPS * factor) for start_s, (_, factor) in zip(starts_s, course, strict=False)]
    return wide_scenario(*rates_at, parameter_bytes=20_000_000, ends_s=starts_s[-1] or 1e5)


def assert_within_the_budget(course: Course, start: Plan) -> None:
    scenario = scenario_on(course)
    policy = AutoPolicy(scenario, searched_once)
    plain, adapted = (
        measure(Simulator(duration_s=HOUR_S).run(scenario, start, each, 10**6)).samples_per_s for each in (None, policy)
    )
    # The budget pays the way there; the way back takes as long.
    assert adapted >= (1 - 2 * REGRET_SHARE) * plain


@pytest.mark.slow
@settings(max_examples=3, derandomize=True)
@given(COURSES)
# The link recovers twice while the policy is away from it: it returns when the budget is spent, and loses 3.4 %.
@example([(150.0, 0.05), (20.0, 1.0), (60.0, 0.7)])
def test_a_link_in_sight_costs_no_more_than_the_budget_and_the_way_back(course: Course) -> None:
    assert_within_the_budget(course, planned(scenario_on([])))


@pytest.mark.slow
@settings(max_examples=3, derandomize=True)
@given(COURSES)
def test_a_link_out_of_sight_costs_no_more_than_the_budget_and_the_way_back(course: Course) -> None:
    assert_within_the_budget(course, on_one_device(scenario_on([])))


def test_the_budget_by_hand() -> None:
    budget = RegretBudget(on_one_device(scenario_on([])))
    whole_s = REGRET_SHARE * HOUR_S
    assert budget.left_s == whole_s
    budget.see(3.0, 2.0)
    assert budget.left_s == pytest.approx(whole_s - 1)
    budget.see(1.0, 2.5)
    assert budget.left_s == pytest.approx(whole_s - 0.25)
    # Out of sight a second of each step is at stake; then the first plan turns out to be half as fast as that.
    for _ in range(4):
        budget.guess(3.0, 2.0)
    assert budget.left_s == pytest.approx(whole_s - 4.25)
    budget.see(2.5, 2.5)
    assert budget.left_s == pytest.approx(whole_s - 2.25)
