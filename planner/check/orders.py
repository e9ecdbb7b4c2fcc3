"""The orders that a plan carries itself: complete, on the right workers, and not waiting for themselves."""

from collections import Counter

from planner.check.deadlock import find_cycle
from planner.plan.actions import Kind
from planner.plan.plan import EXPLICIT, Pipeline, Plan
from traces.common.errors import InputError

# A microbatch passes a stage with a whole backward, or with one that is split.
_COMPLETE = (
    Counter((Kind.FORWARD, Kind.BACKWARD)),
    Counter((Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)),
)


def check_orders(pipeline: Pipeline, plan: Plan, where: str) -> None:
    """Refuse orders that a plan should not have, or that cannot be carried out.

    Raises:
        InputError: With the first action that is wrong, or the devices that wait for each other.
    """
    where = f"{where}.orders"
    if plan.schedule != EXPLICIT:
        if pipeline.orders:
            valid = f"remove the orders, or write schedule '{EXPLICIT}'"
            raise InputError(f"the plan has orders but its schedule is '{plan.schedule}'", where=where, valid=valid)
        return
    if plan.order != "scheduled":
        valid = "write order 'scheduled', or name the schedule whose kind of backward the devices follow"
        raise InputError(f"the plan carries its orders but asks for order '{plan.order}'", where="order", valid=valid)
    workers = max(pipeline.workers) + 1
    if len(pipeline.orders) != workers:
        raise InputError(
            f"the schedule is '{EXPLICIT}', with orders for {len(pipeline.orders)} workers",
            where=where,
            valid=f"one list of actions for each of the {workers} workers, as stages first name their devices",
        )
    _check_actions(pipeline, where)
    _check_complete(pipeline, where)
    circle = find_cycle(pipeline)
    if circle:
        waits = "; ".join(wait.describe(pipeline) for wait in circle)
        valid = "let one of these actions come later in its order"
        raise InputError(f"devices wait for each other in a circle: {waits}", where=where, valid=valid)


def _check_actions(pipeline: Pipeline, where: str) -> None:
    stages, microbatches, holders = len(pipeline.stages), len(pipeline.microbatches), pipeline.workers
    for worker, order in enumerate(pipeline.orders):
        for position, action in enumerate(order):
            place = f"{where}[{worker}][{position}]"
            if action.stage >= stages or action.microbatch >= microbatches:
                raise InputError(
                    f"action {action} is of a stage or microbatch that is not there",
                    where=place,
                    valid=f"stages 0 to {stages - 1}, microbatches 0 to {microbatches - 1}",
                )
            holder = holders[action.stage]
            if holder != worker:
                raise InputError(
                    f"action {action} is in the order of worker {worker}",
                    where=place,
                    valid=f"worker {holder} holds stage {action.stage}: move it to orders[{holder}]",
                )


def _check_complete(pipeline: Pipeline, where: str) -> None:
    found: dict[tuple[int, int], Counter[Kind]] = {}
    for order in pipeline.orders:
        for action in order:
            found.setdefault((action.stage, action.microbatch), Counter())[action.kind] += 1
    for stage in range(len(pipeline.stages)):
        for microbatch in range(len(pipeline.microbatches)):
            kinds = found.get((stage, microbatch), Counter())
            if kinds not in _COMPLETE:
                actions = ", ".join(f"{stage}{kind}{microbatch}" for kind in kinds.elements()) or "no action"
                raise InputError(
                    f"microbatch {microbatch} passes stage {stage} with {actions}",
                    where=f"{where}[{pipeline.workers[stage]}]",
                    valid=f"give {stage}F{microbatch} and {stage}B{microbatch}, or {stage}F{microbatch}, "
                    f"{stage}I{microbatch} and {stage}W{microbatch}, each once",
                )
