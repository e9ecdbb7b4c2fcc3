"""The orders in which the workers of a plan act."""

from planner.pipeline_costs import scheduling_problem
from planner.plan import EXPLICIT, Plan
from planner.scenario import Scenario
from planner.schedules import SCHEDULES
from planner.schedules.orders import Orders


def plan_orders(plan: Plan, scenario: Scenario) -> list[Orders]:
    """Return the orders of each pipeline; with ``order: dynamic`` what its rule comes to on steady links."""
    return [_pipeline_orders(plan, index, scenario) for index in range(len(plan.pipelines))]


def _pipeline_orders(plan: Plan, index: int, scenario: Scenario) -> Orders:
    pipeline = plan.pipelines[index]
    if plan.schedule == EXPLICIT:
        return Orders.from_actions(pipeline.orders)
    import inspect

    if len(inspect.signature(SCHEDULES[plan.schedule]).parameters) == 2:
        return Orders.from_actions([SCHEDULES[plan.schedule](pipeline, s) for s in range(len(pipeline.stages))])
    return SCHEDULES[plan.schedule](scheduling_problem(pipeline, scenario))
