"""The steps of workers that train at their own speed: which may begin, and who gets the samples that are left.

A run of n steps has the samples of n global batches. Each worker has the first `LEAD_STEPS` steps from the start on;
with the end of each of its steps it gets one more, as long as there are samples left. So the faster workers take more
steps, and a worker that is gone for ever leaves its share to the others.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from planner.plan.decoupled import LEAD_STEPS
from planner.plan.plan import Plan
from traces.common.errors import RunError


@dataclass(eq=False, slots=True)
class _Progress:
    """The progress of a worker, which is a pipeline.

    Attributes:
        samples: Samples of a step.
        actors: The actors of its devices.
        granted: Number of its steps that may begin.
        begun: Number of its steps that an actor has begun.
        finished: Number of its steps that all of its actors have finished.
        by_actors: How many actors have finished each of the later steps.
        waiting: Actors that wait until their next step may begin.
        is_over: Whether no further steps may begin.
        is_gone: Whether one of its devices never returns.
    """

    samples: int
    actors: frozenset[int]
    granted: int = 0
    begun: int = 0
    finished: int = 0
    by_actors: Counter[int] = field(default_factory=Counter)
    waiting: list[int] = field(default_factory=list)
    is_over: bool = False
    is_gone: bool = False

    @property
    def has_ended(self) -> bool:
        """Whether the worker has finished all of its steps, or never will."""
        return self.is_gone or (self.is_over and self.finished == self.granted)


class WorkerSteps:
    """Gives out the samples of a run to its workers.

    Args:
        plan: The plan, whose pipelines are the workers.
        actor_of: The actor of each device, by the device's name.
        steps: Number of global batches whose samples are trained.
        duration_s: Time from which no step starts, seconds from the start of the run.
        enter: Called with a step, actors that may begin it, and the present time.
        leave: Called with a number of actors that begin no further step.
    """

    def __init__(
        self,
        plan: Plan,
        actor_of: dict[str, int],
        steps: int,
        duration_s: float,
        enter: Callable[[int, list[int], float], None],
        leave: Callable[[int], None],
    ) -> None:
        self._duration_s, self._enter, self._leave = duration_s, enter, leave
        self._left = steps * plan.global_batch
        self._workers = [
            _Progress(pipeline.samples, frozenset(actor_of[r.device] for s in pipeline.stages for r in s.replicas))
            for pipeline in plan.pipelines
        ]
        self._worker_of = {actor: number for number, worker in enumerate(self._workers) for actor in worker.actors}
        for _ in range(LEAD_STEPS):
            for worker in self._workers:
                self._grant(worker, 0.0)

    @property
    def have_ended(self) -> bool:
        """Whether no worker finishes any further step."""
        return all(worker.has_ended for worker in self._workers)

    def worker_of(self, actor: int) -> int:
        """Return the index of the worker that the actor's device is part of."""
        return self._worker_of[actor]

    def finished(self, worker: int) -> int:
        """Return the number of steps that all devices of a worker have finished."""
        return self._workers[worker].finished

    def goes_on(self, worker: int, step: int) -> bool:
        """Return whether a worker begins ``step``, or may begin it later."""
        return step < self._workers[worker].granted or not self._workers[worker].is_over

    def admit(self, step: int, actors: Iterable[int], now_s: Callable[[int], float]) -> list[int]:
        """Return those of the actors that may begin a step; others wait, or leave. ``now_s`` is an actor's clock."""
        admitted = []
        for actor in actors:
            worker = self._workers[self._worker_of[actor]]
            if worker.begun <= step < worker.granted and now_s(actor) >= self._duration_s:
                self._end(worker, step)
            if step < worker.granted:
                worker.begun = max(worker.begun, step + 1)
                admitted.append(actor)
            elif worker.is_over:
                self._leave(1)
            else:
                worker.waiting.append(actor)
        return admitted

    def finish(self, step: int, actor: int, now_s: float) -> bool:
        """Note that an actor has finished a step; return whether it is the last one of its worker to do so."""
        worker = self._workers[self._worker_of[actor]]
        worker.by_actors[step] += 1
        if worker.by_actors[step] < len(worker.actors):
            return False
        del worker.by_actors[step]
        worker.finished = step + 1
        self._grant(worker, now_s)
        return True

    def lose(self, worker: int) -> bool:
        """Note that a worker never returns, and leave its samples to the others; return False if it had ended.

        Raises:
            RunError: No other worker is left.
        """
        lost = self._workers[worker]
        if lost.has_ended:
            return False
        lost.is_gone = True
        if all(each.is_gone for each in self._workers):
            raise RunError("all workers are lost, and none returns")
        self._left += (lost.granted - lost.finished) * lost.samples
        self._leave(len(lost.actors))
        return True

    def _grant(self, worker: _Progress, now_s: float) -> None:
        """Let a worker take one step more, if there are samples left for it."""
        if worker.is_over or worker.is_gone:
            return
        if self._left < worker.samples or now_s >= self._duration_s:
            self._end(worker, worker.granted)
            return
        self._left -= worker.samples
        worker.granted += 1
        waiting, worker.waiting = worker.waiting, []
        if waiting:
            self._enter(worker.granted - 1, waiting, now_s)

    def _end(self, worker: _Progress, granted: int) -> None:
        worker.is_over, worker.granted = True, granted
        self._leave(len(worker.waiting))
        worker.waiting = []
