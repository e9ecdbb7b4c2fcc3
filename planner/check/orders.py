"""Check that the explicit orders of a plan are complete, on the right workers, and free of deadlock."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from planner.plan.actions import Action, Kind
from planner.plan.plan import EXPLICIT, Pipeline, Plan
from traces.common.errors import InputError

# Kinds of backward that send a gradient to the previous stage.
_GRADIENT = (Kind.BACKWARD, Kind.BACKWARD_INPUT)


@dataclass(frozen=True, slots=True)
class Wait:
    """A worker whose next action waits for an action of another worker, or for a later action of its own.

    Attributes:
        action: Next action in the worker's order.
        needs: Action for whose result ``action`` waits.
        holder: Number of the worker that runs ``needs``.
    """

    worker: int
    action: Action
    needs: Action
    holder: int

    def describe(self, pipeline: Pipeline) -> str:
        """Return the wait as text that names the devices."""
        if self.holder == self.worker:
            return f"{_devices(pipeline, self.worker)} has {self.action} before {self.needs}, which it needs"
        return (
            f"{_devices(pipeline, self.worker)} has {self.action} next, which needs {self.needs} of "
            f"{_devices(pipeline, self.holder)}"
        )


def find_cycle(pipeline: Pipeline) -> tuple[Wait, ...]:
    """Return a cycle of workers, each of which waits for the next one; empty if the orders do not deadlock.

    The orders must be complete: every microbatch has all its actions in every stage.
    """
    kinds: defaultdict[tuple[int, int], set[Kind]] = defaultdict(set)
    for order in pipeline.orders:
        for action in order:
            kinds[action.stage, action.microbatch].add(action.kind)
    done: set[Action] = set()
    position = [0] * len(pipeline.orders)
    # Workers by the action that they wait for.
    waiting: defaultdict[Action, list[int]] = defaultdict(list)
    ready = list(range(len(pipeline.orders)))
    while ready:
        worker = ready.pop()
        order = pipeline.orders[worker]
        while position[worker] < len(order):
            action = order[position[worker]]
            missing = next((need for need in _needs(action, kinds) if need not in done), None)
            if missing is not None:
                waiting[missing].append(worker)
                break
            done.add(action)
            position[worker] += 1
            ready += waiting.pop(action, [])
    return _trace_cycle(pipeline, {worker: needs for needs, workers in waiting.items() for worker in workers}, position)


def _needs(action: Action, kinds: Mapping[tuple[int, int], set[Kind]]) -> Iterator[Action]:
    stage, microbatch = action.stage, action.microbatch
    if action.kind is Kind.FORWARD:
        if stage > 0:
            yield Action(stage - 1, Kind.FORWARD, microbatch)
    elif action.kind is Kind.BACKWARD_WEIGHT:
        yield Action(stage, Kind.BACKWARD_INPUT, microbatch)
    else:
        yield Action(stage, Kind.FORWARD, microbatch)
        for kind in _GRADIENT:
            if kind in kinds.get((stage + 1, microbatch), ()):
                yield Action(stage + 1, kind, microbatch)


def _trace_cycle(pipeline: Pipeline, needs: Mapping[int, Action], position: list[int]) -> tuple[Wait, ...]:
    """Return the cycle found by following the waits from one blocked worker until a worker repeats."""
    if not needs:
        return ()
    holders = pipeline.workers
    waits: dict[int, Wait] = {}
    worker = min(needs)
    while worker not in waits:
        holder = holders[needs[worker].stage]
        waits[worker] = Wait(worker, pipeline.orders[worker][position[worker]], needs[worker], holder)
        worker = holder
    chain = list(waits.values())
    return tuple(chain[list(waits).index(worker) :])


def _devices(pipeline: Pipeline, worker: int) -> str:
    stage = pipeline.stages[pipeline.workers.index(worker)]
    names = ", ".join(f"'{replica.device}'" for replica in stage.replicas)
    return f"device {names}" if len(stage.replicas) == 1 else f"devices {names}"


# Kinds of the actions of one microbatch in one stage, with a whole or a split backward.
_COMPLETE = (
    Counter((Kind.FORWARD, Kind.BACKWARD)),
    Counter((Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)),
)


def check_orders(pipeline: Pipeline, plan: Plan, where: str) -> None:
    """Refuse orders in a plan whose schedule is not `EXPLICIT`, and orders that cannot be carried out."""
    where = f"{where}.orders"
    if plan.schedule != EXPLICIT:
        if pipeline.orders:
            valid = f"remove the orders, or write schedule '{EXPLICIT}'"
            raise InputError(f"the plan has orders but its schedule is '{plan.schedule}'", where=where, valid=valid)
        return
    if plan.order != "scheduled":
        valid = "write order 'scheduled', or a schedule other than 'explicit', which decides whether backward is split"
        raise InputError(f"the plan has explicit orders, but its order is '{plan.order}'", where="order", valid=valid)
    workers = max(pipeline.workers) + 1
    if len(pipeline.orders) != workers:
        raise InputError(
            f"the schedule is '{EXPLICIT}', with orders for {len(pipeline.orders)} workers",
            where=where,
            valid=f"give one list of actions for each of the {workers} workers, in the order in which stages name them",
        )
    _check_actions(pipeline, where)
    _check_complete(pipeline, where)
    cycle = find_cycle(pipeline)
    if cycle:
        waits = "; ".join(wait.describe(pipeline) for wait in cycle)
        valid = "let one of these actions come later in its order"
        raise InputError(f"devices wait for each other in a cycle: {waits}", where=where, valid=valid)


def _check_actions(pipeline: Pipeline, where: str) -> None:
    stages, microbatches, holders = len(pipeline.stages), len(pipeline.microbatches), pipeline.workers
    for worker, order in enumerate(pipeline.orders):
        for position, action in enumerate(order):
            place = f"{where}[{worker}][{position}]"
            if not (0 <= action.stage < stages and 0 <= action.microbatch < microbatches):
                raise InputError(
                    f"action {action} is of a stage or microbatch that does not exist",
                    where=place,
                    valid=f"there are stages 0 to {stages - 1}, microbatches 0 to {microbatches - 1}",
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
