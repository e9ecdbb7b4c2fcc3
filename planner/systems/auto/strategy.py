"""The plan of strategy ``auto`` for links that sway."""

from collections.abc import Iterator

from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.systems.asteroid.strategy import asteroid
from planner.systems.auto.objective import CostModel, Objective
from planner.systems.auto.robust import in_bad_windows, robust_cost_model
from planner.systems.auto.search import search
from planner.systems.cannikin.strategy import cannikin, lb_bsp
from planner.systems.deepcee.strategy import deepcee
from traces.common.errors import InputError

# For more devices the published planners take too long: Asteroid's with the square of their number.
MOST_SEEDED, MOST_OF_ASTEROID = 32, 12


def auto(scenario: Scenario) -> Plan:
    """Return the plan with the shortest step.

    Raises:
        InputError: Nothing fits into memory, or the profile lacks a device kind.
    """
    return plan_for(scenario, Objective())


def plan_for(scenario: Scenario, objective: Objective, judge: CostModel | None = None) -> Plan:
    """Return the best plan for an objective.

    Args:
        scenario: What to plan for.
        objective: What is to be least, and within which limits.
        judge: Says how long a step takes; the compiled evaluator if None.

    Raises:
        InputError: Nothing fits into memory or keeps within the limits, or the profile lacks a device kind.
    """
    return search(scenario, objective, judge, seeds=_published(scenario))


def _published(scenario: Scenario) -> Iterator[Plan]:
    """The plans of the published systems with one update rule, and of LB-BSP, as far as they have one."""
    devices = len(scenario.cluster.devices)
    strategies = (deepcee, cannikin, lb_bsp) if devices <= MOST_SEEDED else ()
    for strategy in (*strategies, asteroid) if devices <= MOST_OF_ASTEROID else strategies:
        try:
            yield strategy(scenario)
        except InputError:
            continue


def robust_plan(scenario: Scenario, objective: Objective, quantile: float) -> Plan:
    """Return the best plan by what it reaches in all but a share ``quantile`` of the windows of the links' traces.

    It is searched twice, around the links' means and around what they are in bad windows: a plan that keeps off a link
    which often fails is none of the best at its mean.

    Raises:
        InputError: The quantile is not a share below 1, or no plan fits or keeps within the limits.
    """
    judge = robust_cost_model(scenario, quantile)
    plans = [plan_for(each, objective, judge) for each in (scenario, in_bad_windows(scenario, quantile))]
    return min(plans, key=lambda plan: objective.score(plan, judge(plan), scenario))
