"""The strategy ``auto``: the best plan that a search over everything a plan can express finds."""

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

# Most devices for which the published planners are asked: the time of Asteroid's grows with the square of their number.
MOST_SEEDED, MOST_OF_ASTEROID = 32, 12


def auto(scenario: Scenario) -> Plan:
    """Return the plan with the highest throughput.

    Raises:
        InputError: No plan fits into memory, or the profile lacks a device kind.
    """
    return plan_for(scenario, Objective())


def plan_for(scenario: Scenario, objective: Objective, cost_model: CostModel | None = None) -> Plan:
    """Return the best plan for an objective.

    Args:
        scenario: Scenario to plan for.
        objective: Quantity to minimise, and its limits.
        cost_model: Function that returns the time of a plan's step; the compiled evaluator if None.

    Raises:
        InputError: No plan fits into memory or keeps within the limits, or the profile lacks a device kind.
    """
    return search(scenario, objective, cost_model, seeds=_published(scenario))


def _published(scenario: Scenario) -> Iterator[Plan]:
    """The plans of LB-BSP and of the published systems with the same update rule, as far as they have one."""
    devices = len(scenario.cluster.devices)
    strategies = (deepcee, cannikin, lb_bsp) if devices <= MOST_SEEDED else ()
    for strategy in (*strategies, asteroid) if devices <= MOST_OF_ASTEROID else strategies:
        try:
            yield strategy(scenario)
        except InputError:
            continue


def robust_plan(scenario: Scenario, objective: Objective, quantile: float) -> Plan:
    """Return the plan with the best score in all but a share ``quantile`` of the windows of the links' traces.

    Two searches are made, one around the links' mean rates and one around those of bad windows: a plan that avoids a
    link which often fails is not among the best at its mean rate.

    Raises:
        InputError: The quantile is not a share below 1, or no plan fits or keeps within the limits.
    """
    cost_model = robust_cost_model(scenario, quantile)
    plans = [plan_for(each, objective, cost_model) for each in (scenario, in_bad_windows(scenario, quantile))]
    return min(plans, key=lambda plan: objective.score(plan, cost_model(plan), scenario))
