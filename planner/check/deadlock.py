"""Orders that wait for themselves: found by carrying them out without a clock.

Each worker does its actions in order, each as soon as what it needs is done: F of stage s needs F of stage s - 1; I or
B needs its own F, and I or B of stage s + 1; W needs its own I. Who then still stands waits in a circle.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from planner.plan.actions import Action, Kind
from planner.plan.plan import Pipeline

# What hands a gradient on.
_GRADIENT = (Kind.BACKWARD, Kind.BACKWARD_INPUT)


@dataclass(frozen=True, slots=True)
class Wait:
    """A worker that stands.

    Attributes:
        worker: Its number.
        action: What it is about to do.
        needs: What must be done before.
        holder: The worker that does that.
    """

    worker: int
    action: Action
    needs: Action
    holder: int

    def describe(self, pipeline: Pipeline) -> str:
        """Return the wait in words, with the devices of the pipeline."""
        if self.holder == self.worker:
            return f"{_devices(pipeline, self.worker)} has {self.action} before {self.needs}, which it needs"
        return (
            f"{_devices(pipeline, self.worker)} has {self.action} next, which needs {self.needs} of "
            f"{_devices(pipeline, self.holder)}"
        )


def find_cycle(pipeline: Pipeline) -> tuple[Wait, ...]:
    """Return the workers that wait for each other, each for the next and the last for the first; empty if none do.

    Args:
        pipeline: With complete orders.
    """
    kinds: defaultdict[tuple[int, int], set[Kind]] = defaultdict(set)
    for order in pipeline.orders:
        for action in order:
            kinds[action.stage, action.microbatch].add(action.kind)
    done: set[Action] = set()
    position = [0] * len(pipeline.orders)
    # Who waits for an action that is not done yet.
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
    return _circle(pipeline, {worker: needs for needs, workers in waiting.items() for worker in workers}, position)


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


def _circle(pipeline: Pipeline, needs: Mapping[int, Action], position: list[int]) -> tuple[Wait, ...]:
    """Follow who waits for whom from any worker that stands until one comes again."""
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
