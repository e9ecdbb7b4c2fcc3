"""The coordinator of a job whose pipelines take steps at their own speed (diloco-decoupled).

A worker is a pipeline, and has a session of its own: its ranks are connected with each other, and to the syncers. If
one of them is lost, the others of this worker are ended too, and all are replaced; no other worker notices. The new
processes go on with the first step that the worker has not finished, from the present common parameters.

The head gives out the samples of the run, step by step, as the simulator does (sim/updates/decoupled.py). When all are
given out and all workers have taken their last step, the syncers take the last outer steps.
"""

import math
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from executor.control.control_server import Peer
from executor.control.coordinator import Coordinator
from executor.control.sessions import random_token
from executor.core.clock import announce_origin
from executor.core.control_channel import Message
from executor.core.messages import AwayWorker, CheckpointMark, NewPlan, SessionSpec
from executor.core.timeouts import timeouts
from planner.plan.decoupled import LEAD_STEPS
from planner.runs.record import Progress
from traces.common.errors import InputError, RunError

# From the start of all workers to second 0 pass this many times the longest link latency.
_HEAD_START_LATENCIES = 8


@dataclass(eq=False, slots=True)
class _Worker:
    """The state of a worker.

    Attributes:
        ranks: The ranks of its devices.
        leaders: Devices that are connected to the syncers.
        samples: Samples of a step.
        granted: Number of its steps that may begin.
        finished: Number of its steps that all of its ranks have published.
        is_over: Whether no further steps may begin.
        is_running: Whether it is in a session.
        is_gone: Whether one of its devices never returns.
        mark: The checkpoint that the state before the next step which it gets belongs to; None if none.
        sessions: Number of sessions that it has begun; if it was away when the run's checkpoint began, one more.
        begun: Number of its steps that were finished before the session.
        incarnations: Number of the process of each rank in the session, by rank.
        parts: What ranks have published of steps that not all have published, by step and rank.
        last: How many syncers have received everything from each of its devices.
        done: Ranks that have written their results.
    """

    ranks: tuple[int, ...]
    leaders: tuple[str, ...]
    samples: int
    granted: int = 0
    finished: int = 0
    is_over: bool = False
    is_running: bool = False
    is_gone: bool = False
    mark: CheckpointMark | None = None
    sessions: int = 0
    begun: int = 0
    incarnations: dict[int, int] = field(default_factory=dict)
    parts: dict[int, dict[int, dict[str, Any]]] = field(default_factory=dict)
    last: Counter[str] = field(default_factory=Counter)
    done: set[int] = field(default_factory=set)

    @property
    def has_trained(self) -> bool:
        """Whether it has taken all of its steps, or never will."""
        return self.is_gone or (self.is_over and self.finished >= self.granted)


class WorkersCoordinator(Coordinator):
    """Runs one job with workers and syncers, from the start of its processes to their end."""

    def __post_init__(self) -> None:
        super().__post_init__()
        plan, run = self._plan, self._config
        rank_of = {device: rank for rank, device in enumerate(self._devices)}
        self._workers = [
            _Worker(
                tuple(sorted({rank_of[name] for s in pipeline.stages for r in s.replicas for name in r.devices})),
                tuple(leaders),
                pipeline.samples,
            )
            for pipeline, leaders in zip(plan.pipelines, plan.leaders, strict=True)
        ]
        self._worker_of = {rank: worker for worker in self._workers for rank in worker.ranks}
        self._syncers = tuple(rank_of[name] for name in plan.synchronisation.outer.syncers)
        self._addresses: dict[str, tuple[str, int]] = {}
        self._concluded: set[int] = set()
        # The step of its own with which each rank goes on from a checkpoint.
        self._own_steps: dict[int, int] = {}
        # Ranks of workers that were away when that checkpoint began.
        self._were_away: set[int] = set()
        self._left = 0
        self._marked = run.first_step
        # Finished steps: their ends in run seconds, samples, and parts of the loss.
        self._steps: list[tuple[float, int, float | None]] = []
        # Samples of these steps; global batches that were shown, and the number of steps and the second then.
        self._trained = self._shown = self._shown_steps = 0
        self._shown_s = 0.0

    def run(self) -> None:
        """Run the job to its end.

        Raises:
            InputError: A rank reported wrong input.
            RunError: A rank failed, or a syncer is lost.
        """
        assert self._driver is not None
        self._await_hosts()
        self._processes.start_all()
        self._await_start(range(len(self._devices)))
        self._start()
        self._wait(self._have_all_sent)
        mark = CheckpointMark(self._config.steps, self._away())
        self._server.send(self._processes.peers(self._syncers), "conclude", **mark.to_data())
        self._wait(self._are_all_done)
        self._driver.losses = dict(enumerate(batch_losses(self._steps, self._plan.global_batch), self._first_step))
        self._finish([*self._syncers, *(rank for worker in self._workers for rank in worker.done)])

    @property
    def _first_step(self) -> int:
        return self._config.first_step

    def _start(self) -> None:
        latency_s = max((link.latency_s for link in self._scenario.cluster.links), default=0.0)
        origin_s = time.monotonic() + timeouts().head_start_s + _HEAD_START_LATENCIES * latency_s
        self._start_run(origin_s)
        announce_origin(self._job.origin, origin_s)
        self._processes.lost.clear()
        for rank in self._syncers:
            spec = SessionSpec(0, (rank,), self._first_step, 0, (), random_token(), origin_s)
            self._server.send(self._processes.peers([rank]), "begin", **spec.to_data())
        self._left = self._config.steps * self._plan.global_batch
        for worker in self._workers:
            worker.granted = worker.finished = self._own_steps[worker.ranks[0]]
            # After its first session a worker begins with the common parameters.
            worker.sessions = int(worker.ranks[0] in self._were_away)
            self._left -= worker.finished * worker.samples
        next_samples = sum(worker.samples for worker in self._workers) - self._left
        for _ in range(LEAD_STEPS):
            for worker in self._workers:
                self._grant(worker)
        if any(worker.granted == worker.finished for worker in self._workers):
            # Workers may be ahead of the checkpoint: there are fewer steps than before.
            most = self._config.steps + math.ceil(next_samples / self._plan.global_batch)
            raise InputError(
                f"in the checkpoint workers have begun their shares of the steps up to {most}",
                where="--steps",
                valid=f"give {most} or more",
            )
        for worker in self._workers:
            self._begin_worker(worker)

    # --- steps ---

    def _grant(self, worker: _Worker) -> None:
        """Let a worker take one step more, if there are samples left for it."""
        if worker.is_over or worker.is_gone:
            return
        if self._left < worker.samples:
            worker.is_over = True
            self._tell(worker, "last", step=worker.granted)
            return
        self._left -= worker.samples
        mark = None if worker.mark is None else worker.mark.to_data()
        self._tell(worker, "plan", step=worker.granted, new=None, durable=0, mark=mark)
        worker.mark = None
        worker.granted += 1

    def _finish_step(self, worker: _Worker, step: int) -> None:
        assert self._driver is not None
        parts = worker.parts.pop(step)
        events = self._driver.collect(parts[rank] for rank in worker.ranks)
        losses = [part["loss"] for part in parts.values() if part["loss"] is not None]
        end_s = max((event.end_s for event in events), default=self._shown_s)
        self._steps.append((end_s, worker.samples, sum(losses) if losses else None))
        self._driver.absences.see(events, [self._devices[rank] for rank in self._processes.lost])
        worker.finished = step + 1
        self._trained += worker.samples
        self._mark()
        self._grant(worker)
        self._show(end_s)

    def _mark(self) -> None:
        """Let every worker copy its state before the next step that it gets, if a checkpoint is due.

        A worker that is away has no state any more, and is left out. While one has returned and finished no step yet,
        the checkpoint is put off. It stays incomplete if one that is there gets no further step or is lost before.
        """
        every, batch = self._config.checkpoint_every, self._plan.global_batch
        trained = sum(worker.finished * worker.samples for worker in self._workers) // batch
        is_due = every > 0 and trained // every > self._marked // every
        if is_due and all(
            not each.is_running or each.sessions == 1 or each.finished > each.begun for each in self._workers
        ):
            self._marked = trained // every * every
            mark = CheckpointMark(self._marked, self._away())
            for worker in self._workers:
                worker.mark = mark if worker.is_running else None

    def _away(self) -> tuple[AwayWorker, ...]:
        """Return the workers without which a checkpoint is complete; none if all are away, since nobody has a state."""
        away = [AwayWorker(n, own.finished, own.sessions) for n, own in enumerate(self._workers) if not own.is_running]
        return tuple(away) if len(away) < len(self._workers) else ()

    def _show(self, end_s: float) -> None:
        """Show the progress when the samples of another global batch are trained."""
        assert self._driver is not None
        batch = self._plan.global_batch
        if self._trained < (self._shown + 1) * batch:
            return
        recent = [(samples, loss) for _, samples, loss in self._steps[self._shown_steps :] if loss is not None]
        loss = sum(loss for _, loss in recent) * batch / sum(samples for samples, _ in recent) if recent else None
        step, took_s = self._first_step + self._shown, end_s - self._shown_s
        away = tuple(sorted(self._devices[rank] for rank in self._processes.lost))
        self._driver.show(Progress(step, self._config.steps, end_s, took_s, batch, loss, "", away))
        self._shown, self._shown_steps, self._shown_s = self._shown + 1, len(self._steps), end_s

    # --- messages ---

    def _hear_rank(self, peer: Peer, message: Message) -> None:
        if message["kind"] == "ready":
            self._own_steps[peer.rank] = int(message.get("own_step") or 0)
            if message.get("was_away"):
                self._were_away.add(peer.rank)
        super()._hear_rank(peer, message)

    def _hear_session(self, rank: int, message: Message) -> None:
        assert self._driver is not None
        kind = message["kind"]
        if kind == "serves":
            host, port = message["address"]
            self._addresses[self._devices[rank]] = (str(host), int(port))
        elif kind == "rows":
            self._driver.collect([message["part"]])
        elif kind == "last":
            device = str(message["device"])
            for worker in self._workers:
                if device in worker.leaders:
                    worker.last[device] += 1
        elif rank in self._syncers:
            if kind == "done":
                self._concluded.add(rank)
        else:
            self._hear_worker(self._worker_of[rank], rank, message)

    def _hear_worker(self, worker: _Worker, rank: int, message: Message) -> None:
        if not worker.is_running or message.get("session") != worker.sessions - 1:
            return
        if message["kind"] == "step":
            step = int(message["step"])
            worker.parts.setdefault(step, {})[rank] = message["part"]
            while len(worker.parts.get(worker.finished, {})) == len(worker.ranks):
                self._finish_step(worker, worker.finished)
        elif message["kind"] == "done":
            assert self._driver is not None
            self._driver.collect([message["rows"]])
            worker.done.add(rank)

    def _handle_next(self, until_s: float) -> None:
        super()._handle_next(until_s)
        if self._processes.origin_s is not None and not self._processes.is_finished:
            self._tend()

    # --- losses ---

    def _tend(self) -> None:
        """End the sessions of workers that have lost a rank, and begin new ones for those that are complete again."""
        for rank in self._syncers:
            if rank in self._processes.lost and rank not in self._concluded:
                raise RunError(
                    f"{self._processes.name(rank)}, which takes the outer steps, was lost; a run with '--checkpoint' "
                    "can be resumed"
                )
        for worker in self._workers:
            lost = [rank for rank in worker.ranks if rank in self._processes.lost]
            if lost and worker.is_running:
                self._end_worker(worker, lost)
            if not worker.is_running and not worker.has_trained:
                if any(map(self._processes.is_gone, worker.ranks)):
                    worker.is_gone = True
                    if all(each.is_gone for each in self._workers):
                        raise RunError(
                            "all workers are lost, and none returns; a run with '--checkpoint' can be resumed"
                        )
                    self._left += (worker.granted - worker.finished) * worker.samples
                elif all(map(self._is_new, worker.ranks)):
                    self._begin_worker(worker)

    def _is_new(self, rank: int) -> bool:
        """Return whether the process of a rank is ready, and is not that of the session that has ended."""
        before = self._worker_of[rank].incarnations.get(rank, -1)
        return self._processes.has_returned(rank) and self._processes.ranks[rank].incarnation > before

    def _end_worker(self, worker: _Worker, lost: Sequence[int]) -> None:
        assert self._driver is not None
        assert self._processes.origin_s is not None
        worker.is_running, worker.mark = False, None
        worker.parts.clear()
        worker.last.clear()
        self._driver.lose_worker([self._devices[rank] for rank in lost], time.monotonic() - self._processes.origin_s)
        ended = {"session": worker.sessions - 1, "devices": worker.leaders}
        self._server.send(self._processes.peers(self._syncers), "lost", **ended)
        for rank in worker.ranks:
            if rank not in lost:
                self._processes.signal(rank, signal.SIGKILL)

    def _begin_worker(self, worker: _Worker) -> None:
        """Begin a session of a worker with the first step that it has not finished."""
        first = NewPlan(self._plan, 0)
        plans = tuple(first.after(step) for step in range(worker.finished, worker.granted))
        where = (worker.ranks, worker.finished, 0, plans, random_token(), self._processes.origin_s, 0.0)
        spec = SessionSpec(worker.sessions, *where, self._addresses)
        self._processes.lost -= set(worker.ranks)
        worker.incarnations = {rank: self._processes.ranks[rank].incarnation for rank in worker.ranks}
        worker.is_running, worker.begun = True, worker.finished
        worker.sessions += 1
        worker.last.clear()
        self._server.send(self._processes.peers(worker.ranks), "begin", **spec.to_data())
        if worker.is_over:
            self._tell(worker, "last", step=worker.granted)

    def _tell(self, worker: _Worker, kind: str, **fields: Any) -> None:
        if worker.is_running:
            self._push(worker.ranks, kind, **fields)

    # --- the end ---

    def _have_all_sent(self) -> bool:
        """Return whether no pseudo-gradient can come any more."""
        return all(worker.has_trained and self._has_sent(worker) for worker in self._workers)

    def _has_sent(self, worker: _Worker) -> bool:
        everywhere = all(worker.last[device] == len(self._syncers) for device in worker.leaders)
        return not worker.is_running or everywhere

    def _are_all_done(self) -> bool:
        workers = all(not worker.is_running or worker.done >= set(worker.ranks) for worker in self._workers)
        return workers and self._concluded >= set(self._syncers)


def batch_losses(steps: Collection[tuple[float, int, float | None]], global_batch: int) -> list[float]:
    """Return the mean loss of each global batch of samples, in the order in which they were trained; empty without any.

    Args:
        steps: Of each finished step of a worker its end in run seconds, its samples, and its part of the loss: the mean
            over its samples, times their share of the global batch.
        global_batch: Samples of a batch.
    """
    trained, losses, counts = 0, defaultdict[int, float](float), Counter[int]()
    for _, samples, loss in sorted(steps, key=lambda each: each[:2]):
        trained += samples
        if loss is not None:
            # A step belongs to the batch that its last sample completes or begins.
            batch = (trained - 1) // global_batch
            losses[batch] += loss * global_batch
            counts[batch] += samples
    return [losses[batch] / counts[batch] for batch in range(trained // global_batch) if counts[batch]]
