"""What makes plans, by name: one file each, behind one small interface."""

from collections.abc import Callable, Mapping

from planner.check import check_plan
from planner.plan import Plan
from planner.scenario import Scenario
from planner.strategies.ddp import ddp
from planner.strategies.megatron import megatron
from planner.strategies.pipedream import pipedream
from traces.naming import find_by_name

Strategy = Callable[[Scenario], Plan]

STRATEGIES: Mapping[str, Strategy] = {"ddp": ddp, "megatron": megatron, "pipedream": pipedream}


def make_plan(strategy: str, scenario: Scenario) -> Plan:
    """Return the checked plan that a strategy makes for a scenario.

    Raises:
        InputError: No strategy has this name, or its plan does not fit the scenario.
    """
    plan = find_by_name(strategy, STRATEGIES, "strategy")(scenario)
    check_plan(plan, scenario)
    return plan
