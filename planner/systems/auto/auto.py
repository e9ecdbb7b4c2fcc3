"""``auto``, ours: searches what a plan can say, and starts from what the published systems find.

Skeletons come from dynamic programmes over layers and groups of devices: over pools of alike devices with as many
pipelines side by side as divide them (`planner.systems.auto.candidates.skeletons`), unlike pipelines on different pools
(`planner.systems.auto.candidates.mixed`), and, for few devices, every set of them as a stage
(`planner.systems.auto.candidates.few_devices`). The best are built, judged by the compiled evaluator
(`planner.step.evaluate`) and improved by small changes (`planner.systems.auto.local_search.improve`); the order of
actions is then searched by `compact-zb`. With few devices the plans of DeepCEE, Asteroid and Cannikin take part, so
that the result is never worse than the best of them; Cloudless-Training's train without a barrier, which is another
update rule.

It keeps nothing from one call to the next, and every effort is counted, not timed: equal scenarios get equal plans.
"""

from collections.abc import Iterator

from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.systems.asteroid.strategy import asteroid
from planner.systems.auto.objective import CostModel, Objective
from planner.systems.auto.search import search
from planner.systems.cannikin.cannikin import cannikin
from planner.systems.cannikin.lb_bsp import lb_bsp
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
