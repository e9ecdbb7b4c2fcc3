"""The orders in which the workers of a plan act."""

from planner.cost.stage import scheduling_problems
from planner.plan.plan import EXPLICIT, Plan
from planner.scenario.scenario import Scenario
from planner.schedules import SCHEDULES, WHOLE
from planner.schedules.dynamic import dynamic_orders
from planner.schedules.kernel.orders import Orders
from planner.schedules.kernel.problem import SchedulingProblem


def plan_orders(plan: Plan, scenario: Scenario) -> list[Orders]:
    """Return the orders of each pipeline; with ``order: dynamic`` what its rule comes to on steady links."""
    if plan.schedule == EXPLICIT:
        return [Orders.from_actions(pipeline.orders) for pipeline in plan.pipelines]
    made: dict[tuple[object, ...], Orders] = {}
    orders = []
    for problem in scheduling_problems(plan, scenario):
        # Pipelines that are copies of each other have one order.
        key = _content(problem)
        if key not in made:
            made[key] = _make(plan, problem)
        orders.append(made[key])
    return orders


def _make(plan: Plan, problem: SchedulingProblem) -> Orders:
    if plan.order == "dynamic":
        return dynamic_orders(problem, split=plan.schedule not in WHOLE)
    return SCHEDULES[plan.schedule](problem)


def _content(problem: SchedulingProblem) -> tuple[object, ...]:
    return (
        problem.workers,
        problem.in_flight,
        *(
            column.tobytes()
            for column in (
                problem.forward_s,
                problem.backward_input_s,
                problem.backward_weight_s,
                problem.forward_occupancy_s,
                problem.backward_occupancy_s,
                problem.forward_latency_s,
                problem.backward_latency_s,
                problem.activation_bytes,
                problem.weight_bytes,
                problem.capacity_bytes,
            )
        ),
    )
