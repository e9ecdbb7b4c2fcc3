"""Orders of actions of a plan, and the change of a plan to another schedule on the same devices."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

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
    """Return the orders of each pipeline; for the dynamic order, the orders that result at declared rates."""
    if plan.schedule == EXPLICIT:
        return [Orders.from_actions(pipeline.orders) for pipeline in plan.pipelines]
    return [_make(plan.schedule, plan.order, problem) for problem in scheduling_problems(plan, scenario)]


# Cached, because pipelines whose problems are equal have the same orders, in a plan and in others.
@lru_cache(maxsize=256)
def _make(schedule: str, order: str, problem: SchedulingProblem) -> Orders:
    if order == "dynamic":
        return dynamic_orders(problem, split=schedule not in WHOLE)
    return SCHEDULES[schedule](problem)


# Schedules with two stages on every worker, and whether the second stages are placed in reverse order of workers.
TWO_ROUNDS = {"interleaved-1f1b": False, "zb-v": True}

# Schedules that search for an order; `with_schedule` gives them the depths that hide round trips.
SEARCHING = frozenset({"compact-zb", "portfolio", "optimal"})

# The schedule whose orders depend on the speed of the machine that plans, so that plans store them.
SOLVED = "optimal"


def with_schedule(plan: Plan, scenario: Scenario, schedule: str, order: str = "scheduled") -> Plan:
    """Return the plan with another schedule.

    For schedules in `TWO_ROUNDS`, each stage is split in two, unless a worker has several stages already. For schedules
    in `SEARCHING` and for the dynamic order, depths are those of `hiding_depths`. The orders that ``optimal`` finds are
    stored in the plan, whose schedule becomes `EXPLICIT`.

    Raises:
        InputError: A stage has a single layer where two are needed.
    """
    pipelines = []
    for number, pipeline in enumerate(plan.pipelines):
        placed = replace(pipeline, orders=())
        if schedule in TWO_ROUNDS and len(set(pipeline.workers)) == len(pipeline.stages):
            placed = _in_two_rounds(placed, f"pipelines[{number}]", schedule, back=TWO_ROUNDS[schedule])
        if schedule in SEARCHING or order == "dynamic":
            depths = hiding_depths(placed, scenario, plan.compression)
            placed = placed.with_depths(depths)
        if schedule == SOLVED and order == "scheduled":
            placed = _stored(placed, SCHEDULES[SOLVED](scheduling_problem(placed, scenario, plan.compression)))
        pipelines.append(placed)
    if schedule == SOLVED and order == "scheduled":
        schedule = EXPLICIT
    return replace(plan, schedule=schedule, order=order, pipelines=tuple(pipelines))


def with_orders(plan: Plan, orders: Sequence[Sequence[Action]]) -> Plan:
    """Return the plan with these explicit orders, one row per worker, the same in every pipeline."""
    rows = tuple(tuple(row) for row in orders)
    return replace(
        plan, schedule=EXPLICIT, pipelines=tuple(replace(pipeline, orders=rows) for pipeline in plan.pipelines)
    )


def with_found_orders(plan: Plan, scenario: Scenario) -> Plan:
    """Return the plan with the orders that its schedule finds for the links of ``scenario``, stored as explicit orders.

    A plan whose orders do not depend on links is returned as it is.
    """
    if plan.schedule not in SEARCHING or plan.order == "dynamic":
        return plan
    pairs = zip(plan.pipelines, plan_orders(plan, scenario), strict=True)
    return replace(plan, schedule=EXPLICIT, pipelines=tuple(_stored(*pair) for pair in pairs))


def _stored(pipeline: Pipeline, orders: Orders) -> Pipeline:
    return replace(pipeline, orders=tuple(orders.actions(worker) for worker in range(orders.worker_count)))


def _in_two_rounds(pipeline: Pipeline, where: str, schedule: str, *, back: bool) -> Pipeline:
    """Return the pipeline with each stage split in two, so that every worker has a stage in each half of the model."""
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
    """Return the most microbatches in flight at a stage in interleaved 1F1B with two stages on each worker.

    The number follows from the order of Narayanan et al., Efficient Large-Scale Language Model Training on GPU
    Clusters, 2021.
    """
    turn, worker = divmod(stage, workers)
    return (1 - turn) * workers + min(workers, 2 * (workers - worker) - 1)


def hiding_depths(pipeline: Pipeline, scenario: Scenario, compression: str = "none") -> tuple[int, ...]:
    """Return the depths of `latency_aware_depths`, lowered to the number of microbatches that fit into memory.

    If not even one microbatch fits into the memory of some stage, the pipeline's current depths are returned.
    """
    problem = scheduling_problem(pipeline, scenario, compression)
    total_s = problem.forward_s + problem.backward_input_s + problem.backward_weight_s
    busy_s = (problem.forward_transmission_s + problem.backward_transmission_s).max(axis=1) / 2
    latency_s = (problem.forward_latency_s + problem.backward_latency_s) / 2
    wanted = latency_aware_depths(total_s.max(axis=1).tolist(), busy_s.tolist(), latency_s.tolist())
    fitted = fitting_depths(wanted, pipeline.stages, scenario, pipeline.microbatches)
    return fitted or tuple(stage.in_flight for stage in pipeline.stages)
