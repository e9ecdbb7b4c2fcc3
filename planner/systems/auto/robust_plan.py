"""The plan of strategy ``auto`` for links that sway."""

from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.systems.auto.auto import plan_for
from planner.systems.auto.objective import Objective
from planner.systems.auto.robust import in_bad_windows, robust_judge


def robust_plan(scenario: Scenario, objective: Objective, quantile: float) -> Plan:
    """Return the best plan by what it reaches in all but a share ``quantile`` of the windows of the links' traces.

    It is searched twice, around the links' means and around what they are in bad windows: a plan that keeps off a link
    which often fails is none of the best at its mean.

    Raises:
        InputError: The quantile is not a share below 1, or no plan fits or keeps within the limits.
    """
    judge = robust_judge(scenario, quantile)
    plans = [plan_for(each, objective, judge) for each in (scenario, in_bad_windows(scenario, quantile))]
    return min(plans, key=lambda plan: objective.score(plan, judge(plan), scenario))
