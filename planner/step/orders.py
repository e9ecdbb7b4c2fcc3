"""A plan with another schedule: the same layers on the same devices, as far as the schedule lets them."""

from collections.abc import Sequence
from dataclasses import replace

from planner.cost.in_flight import fitting_depths, latency_aware_depths
from planner.cost.stage import scheduling_problem, scheduling_problems
from planner.plan.actions import Action
from planner.plan.plan import EXPLICIT, Pipeline, Plan, Stage
from planner.scenario.scenario import Scenario
from planner.schedules import SCHEDULES, WHOLE
from planner.schedules.dynamic import dynamic_orders
from planner.schedules.kernel.problem import Orders, SchedulingProblem
from traces.common.errors import InputError


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
                problem.forward_transmission_s,
                problem.backward_transmission_s,
                problem.forward_latency_s,
                problem.backward_latency_s,
                problem.activation_bytes,
                problem.weight_bytes,
                problem.capacity_bytes,
            )
        ),
    )


# Schedules that need two stages on every worker, and whether the second round goes the other way.
TWO_ROUNDS = {"interleaved-1f1b": False, "zb-v": True}

# Schedules that search for an order, with as many microbatches in flight as hide the round trips.
SEARCHING = frozenset({"compact-zb", "portfolio", "optimal"})

# The one whose search depends on the machine's speed: a plan holds what it found.
SOLVED = "optimal"


def with_schedule(plan: Plan, scenario: Scenario, schedule: str, order: str = "scheduled") -> Plan:
    """Return the plan with another schedule.

    For those that need two stages on every worker each stage is cut in two; those that hide round trips get the
    depths for it, as far as memory allows. Of a plan that already has several stages on a worker nothing is cut. The
    order that `optimal` finds becomes the plan's own.

    Raises:
        InputError: A stage has a single layer where two are needed.
    """
    pipelines = []
    for number, pipeline in enumerate(plan.pipelines):
        placed = replace(pipeline, orders=())
        if schedule in TWO_ROUNDS and len(set(pipeline.workers)) == len(pipeline.stages):
            placed = _in_two_rounds(placed, f"pipelines[{number}]", schedule, back=TWO_ROUNDS[schedule])
        if schedule in SEARCHING or order == "dynamic":
            placed = _hiding(placed, scenario, plan.compression)
        if schedule == SOLVED and order == "scheduled":
            orders = SCHEDULES[SOLVED](scheduling_problem(placed, scenario, plan.compression))
            rows = tuple(orders.actions(worker) for worker in range(orders.worker_count))
            placed = replace(placed, orders=rows)
        pipelines.append(placed)
    if schedule == SOLVED and order == "scheduled":
        schedule = EXPLICIT
    return replace(plan, schedule=schedule, order=order, pipelines=tuple(pipelines))


def with_orders(plan: Plan, orders: Sequence[Sequence[Action]]) -> Plan:
    """Return the plan with these orders in every pipeline, a row per worker, such as a file for torch gives."""
    rows = tuple(tuple(row) for row in orders)
    return replace(
        plan, schedule=EXPLICIT, pipelines=tuple(replace(pipeline, orders=rows) for pipeline in plan.pipelines)
    )


def _in_two_rounds(pipeline: Pipeline, where: str, schedule: str, *, back: bool) -> Pipeline:
    """Each worker's layers in two stages: one of the first half of the model, one of the second."""
    sizes = [stage.end_layer - stage.first_layer for stage in pipeline.stages]
    if min(sizes) < 2:
        thin = sizes.index(min(sizes))
        raise InputError(
            f"stage {thin} has one layer",
            where=f"{where}.stages[{thin}]",
            valid=f"schedule '{schedule}' puts two stages on every device: give each two layers or more",
        )
    firsts = [(stage, size - size // 2) for stage, size in zip(pipeline.stages, sizes, strict=True)]
    seconds = [(stage, size // 2) for stage, size in zip(pipeline.stages, sizes, strict=True)]
    stages: list[Stage] = []
    count = 2 * len(sizes)
    for stage, size in (*firsts, *(reversed(seconds) if back else seconds)):
        first = stages[-1].end_layer if stages else 0
        depth = count - len(stages) if back else _interleaved_depth(len(stages), len(sizes))
        stages.append(replace(stage, first_layer=first, end_layer=first + size, in_flight=depth))
    return replace(pipeline, stages=tuple(stages))


def _interleaved_depth(stage: int, workers: int) -> int:
    """Return how many microbatches the published order holds of a stage at most, two of them a worker."""
    turn, worker = divmod(stage, workers)
    return (1 - turn) * workers + min(workers, 2 * (workers - worker) - 1)


def hiding_depths(pipeline: Pipeline, scenario: Scenario, compression: str = "none") -> tuple[int, ...]:
    """Return the depths of a pipeline's stages that hide its round trips, as far as memory allows.

    Those that it has, where not even one microbatch fits.
    """
    problem = scheduling_problem(pipeline, scenario, compression)
    total_s = problem.forward_s + problem.backward_input_s + problem.backward_weight_s
    busy_s = (problem.forward_transmission_s + problem.backward_transmission_s).max(axis=1) / 2
    latency_s = (problem.forward_latency_s + problem.backward_latency_s) / 2
    wanted = latency_aware_depths(total_s.max(axis=1).tolist(), busy_s.tolist(), latency_s.tolist())
    fitted = fitting_depths(wanted, pipeline.stages, scenario, pipeline.microbatches)
    return fitted or tuple(stage.in_flight for stage in pipeline.stages)


def _hiding(pipeline: Pipeline, scenario: Scenario, compression: str) -> Pipeline:
    depths = hiding_depths(pipeline, scenario, compression)
    stages = tuple(replace(stage, in_flight=depth) for stage, depth in zip(pipeline.stages, depths, strict=True))
    return replace(pipeline, stages=stages)
