"""Ranks that are connected with each other, from a step on, until the run is over, one is lost or others join."""

import threading
from collections.abc import Callable
from functools import partial

import torch.distributed as dist

from executor.core.control_store import store_address
from executor.core.events import EventRecorder, PartnerRows
from executor.core.failures import PeerLostError, blaming
from executor.core.messages import ENDED, Reconfiguration, SessionSpec
from executor.core.step_program import StepProgram
from executor.rank.context import RankConfig, RankContext
from executor.rank.control_client import GenerationEndedError, PlanFeed
from executor.rank.resources import sample_resources
from executor.rank.train_loop import TrainLoop
from executor.recovery.migration import LayerMoves
from executor.runtime.async_updates import PipelineUpdates
from executor.runtime.interpreter import Interpreter
from executor.transport.rendezvous import ProcessGroups
from executor.transport.transport import Transport
from planner.cost.async_updates import update_edges
from planner.plan.plan import Plan

# Who has lost a connection hears this soon why, or that all connect anew; else the cause is none that can be mended.
_VERDICT_S = 60.0


class Session:
    """One rank in one generation.

    Args:
        part: This rank's in the job.
        held: By its process.
        beginning: Says who belongs to it, and where they begin.
        connect: Connects this rank with the others, all together.
        give_up: Ends this process.
    """

    def __init__(
        self,
        part: RankConfig,
        held: RankContext,
        beginning: SessionSpec,
        connect: Callable[[], ProcessGroups],
        give_up: Callable[[Exception], None],
    ) -> None:
        self._part = part
        self._held = held
        self._beginning = beginning
        self._connect = connect
        self._give_up = give_up
        self._transport: Transport | None = None
        self._closing = threading.Lock()
        self._feed = self._listen() if part.orders.is_steered else None
        self._rows = EventRecorder(held.file, self._feed)

    def _listen(self) -> PlanFeed:
        part, kept = self._part, self._held.safekeeping
        return PlanFeed(
            store_address(),
            part.rank,
            self._beginning,
            part.orders.steps,
            self._give_up,
            self._end,
            lambda: kept.kept if kept is not None else None,
        )

    def run(self, conclude: Callable[[], None]) -> None:
        """Carry out all steps that are left, then ``conclude``.

        Raises:
            GenerationEndedError: A rank is lost, or a connection, and all begin anew.
            PeerLostError: The same where the run ends with that.
        """
        try:
            transport, course = self._set_out()
            self._restore(transport)
            course.run(self._beginning.first, self._beginning.plans[0].plan)
            if self._held.checkpointing is not None:
                self._held.checkpointing.finish(self._part.orders.steps)
            transport.close()
            self._rows.flush()
            conclude()
            if self._part.recovers:
                self._await_others()
            self._let_go()
        except PeerLostError:
            if not self._part.recovers or not self._is_ended():
                raise
            raise GenerationEndedError from None

    def leave(self) -> None:
        """Let go of all connections; what waits for them ends."""
        if self._transport is not None:
            self._transport.abandon()
        self._let_go()
        self._rows.flush()
        if dist.is_initialized():
            dist.destroy_process_group()

    def next_beginning(self) -> SessionSpec:
        """Say what this rank has, and return with what all begin anew."""
        assert self._feed is not None
        assert self._held.safekeeping is not None
        return self._feed.report(self._held.safekeeping.copies(), self._held.clock.now_s())

    def _let_go(self) -> None:
        """End the last thread, and hold no connections: they must not outlive their process group."""
        if self._feed is not None:
            self._feed.close()
        self._transport = None

    def _set_out(self) -> tuple[Transport, TrainLoop]:
        part, held = self._part, self._held
        ranks = {part.devices[rank]: place for place, rank in enumerate(self._beginning.ranks)}
        with blaming("one of the others"):
            groups = self._connect()
        cluster = part.scenario.cluster
        transport = Transport(part.device, ranks, cluster, groups, held.clock, held.shaper, part.watches, self._failed)
        with self._closing:
            self._transport = transport
            if self._feed is not None and self._feed.outcome(0.0) == ENDED:
                raise PeerLostError("a rank was lost before all were connected")
        interpreter_of = partial(self._interpreter, transport)
        return transport, TrainLoop(part, held, self._feed, interpreter_of, transport, groups, self._rows)

    def _restore(self, transport: Transport) -> None:
        """Have the layers as they were before the first step: from this rank's own copies and those of others."""
        if self._beginning.generation == 0:
            return
        keeping, compute = self._held.safekeeping, self._held.compute
        assert keeping is not None
        first, new = self._beginning.first, self._beginning.plans[0]
        now_s = self._held.clock.now_s()
        compute.wait_until(now_s)
        moves = LayerMoves(self._part.device, Reconfiguration(first, new, now_s), transport, compute, self._rows)
        moves.expect()
        moves.send(lambda move: keeping.state(first, move))
        compute.hold(new.plan, self._part.program(new.plan))
        keeping.restore(first, new.plan)
        keeping.take_up(new.plan)
        moves.take()
        keeping.begin_generation(first, self._beginning.durable)

    def _interpreter(self, transport: Transport, plan: Plan, first: int) -> Interpreter:
        part, held, feed = self._part, self._held, self._feed

        def begin(step: StepProgram) -> None:
            if held.checkpointing is not None:
                held.checkpointing.begin_step(step.step, step.plan)
            if held.safekeeping is not None and feed is not None:
                anew = step.step == first
                durable = feed.durable(step.step)
                held.safekeeping.begin_step(step.step, step.plan, durable, anew=anew, transport=transport)

        def end(step: int) -> None:
            if feed is not None:
                feed.finish(step)
            self._rows.end_step()
            held.samples.append(sample_resources(step, held.clock.now_s()))

        def note_loss(step: int, loss: float) -> None:
            if feed is not None:
                feed.note_loss(step, loss)
            held.note_loss(step, loss)

        return Interpreter(
            part.scenario,
            transport,
            held.compute,
            held.clock,
            part.wire(plan),
            self._rows if part.leads(plan) else PartnerRows(held.file, feed),
            self._updates(transport),
            note_loss,
            held.group,
            begin,
            end,
        )

    def _updates(self, transport: Transport) -> PipelineUpdates | None:
        part, held = self._part, self._held
        edges = update_edges(part.plan, part.scenario)
        if not edges:
            return None
        return PipelineUpdates(
            part.plan,
            edges,
            part.device,
            part.orders.steps,
            transport,
            held.compute,
            part.scenario.model,
            held.clock,
            self._rows,
        )

    def _await_others(self) -> None:
        """Wait until all have come to the end: until then this rank's part may be asked for."""
        assert self._feed is not None
        self._feed.say_done()
        if self._feed.outcome() == ENDED:
            raise GenerationEndedError

    def _failed(self, error: Exception) -> None:
        """A thread that moves bytes could not go on."""
        if not (self._part.recovers and isinstance(error, PeerLostError)):
            self._give_up(error)
        assert self._feed is not None
        self._feed.say_trouble()

    def _is_ended(self) -> bool:
        """Whether a lost connection is the end of the generation, or of this rank's run."""
        assert self._feed is not None
        self._feed.say_trouble()
        return self._feed.outcome(_VERDICT_S) == ENDED

    def _end(self) -> None:
        with self._closing:
            if self._transport is not None:
                self._transport.abort()
