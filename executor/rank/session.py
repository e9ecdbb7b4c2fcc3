"""One rank in a session: ranks that are connected from a step on, until the run ends, one is lost or others join."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import torch.distributed as dist

from executor.core.events import EventRecorder, PartnerRows
from executor.core.failures import PeerLostError, blaming
from executor.core.messages import NewPlan, Reconfiguration, SessionSpec
from executor.core.step_program import StepProgram
from executor.core.timeouts import timeouts
from executor.rank.context import RankConfig, RankContext
from executor.rank.control_client import ENDED, ControlClient, SessionEndedError
from executor.rank.telemetry import StepPublisher, sample_resources
from executor.recovery.migration import LayerMoves
from executor.runtime.async_updates import PipelineUpdates
from executor.runtime.interpreter import Interpreter
from executor.transport.rendezvous import ProcessGroups
from executor.transport.transport import Transport
from planner.cost.synchronisation import update_edges
from planner.plan.plan import Plan


@dataclass(eq=False)
class Session:
    """One rank in one session.

    Args:
        connect: Connects this rank with the others, all together.
        start: Agrees with the others on the start of the run, once all are connected; called where that is open.
    """

    _config: RankConfig
    _context: RankContext
    _client: ControlClient
    _spec: SessionSpec
    _connect: Callable[[], ProcessGroups]
    _start: Callable[[], None]
    _give_up: Callable[[Exception], None]

    def __post_init__(self) -> None:
        self._transport: Transport | None = None
        self._closing = threading.Lock()
        backups = self._context.backups
        kept = (lambda: None) if backups is None else (lambda: backups.kept)
        publisher = StepPublisher(self._client, self._spec.number, self._spec.first_step, self._config.run.steps, kept)
        self._publisher = publisher if self._config.run.is_steered else None
        self._rows = EventRecorder(self._context.file, self._publisher)
        self._client.call_at_end(self._abort)

    def run(self, conclude: Callable[[], None]) -> None:
        """Carry out all steps that are left, then ``conclude``.

        Raises:
            SessionEndedError: A rank is lost, or a connection, or others join, and another session begins.
            PeerLostError: The same where the run ends with that.
        """
        config, context = self._config, self._context
        try:
            with blaming("one of the others"):
                groups = self._connect()
            if self._spec.origin_s is None:
                self._start()
            transport = self._open(groups)
            self._restore(transport)
            self._train(transport, groups)
            if context.checkpoints is not None:
                context.checkpoints.finish(config.run.steps)
            transport.close()
            self._rows.flush()
            conclude()
            if config.recovers:
                # Until all have come to the end, this rank's part may be asked for.
                self._client.send("done", session=self._spec.number)
                if self._client.outcome() == ENDED:
                    raise SessionEndedError
            self._transport = None
        except PeerLostError:
            if not config.recovers:
                raise
            self._client.send("trouble", session=self._spec.number)
            # Whether a lost connection is the end of the session, or of this rank's run.
            if self._client.outcome(timeouts().session_end_s) != ENDED:
                raise
            raise SessionEndedError from None

    def leave(self) -> None:
        """Close all connections, of which what waits for them hears, and tell the head what this rank has."""
        backups, publisher = self._context.backups, self._publisher
        assert backups is not None
        assert publisher is not None
        if self._transport is not None:
            self._transport.abandon()
        # Connections must not outlive their process group.
        self._transport = None
        self._rows.flush()
        if dist.is_initialized():
            dist.destroy_process_group()
        now_s = self._context.clock.now_s() if self._context.clock.has_started else 0.0
        self._client.report(self._spec.number, backups.copies(), now_s, publisher.unpublished())

    def _open(self, groups: ProcessGroups) -> Transport:
        config, context = self._config, self._context
        ranks = {config.devices[rank]: place for place, rank in enumerate(self._spec.ranks)}
        cluster = config.scenario.cluster
        transport = Transport(
            config.device, ranks, cluster, groups, context.clock, context.shaper, config.watches, self._fail
        )
        with self._closing:
            self._transport = transport
            if self._client.is_ending:
                raise PeerLostError("a rank was lost before all were connected")
        return transport

    def _restore(self, transport: Transport) -> None:
        """Have the layers as they were before the first step: from this rank's own copies and those of others."""
        if self._spec.number == 0 or self._spec.origin_s is None:
            # Nobody has trained yet.
            return
        backups, compute = self._context.backups, self._context.compute
        assert backups is not None
        first, new = self._spec.first_step, self._spec.plans[0]
        now_s = self._context.clock.now_s()
        compute.wait_until(now_s)
        moves = LayerMoves(self._config.device, Reconfiguration(first, new, now_s), transport, compute, self._rows)
        moves.expect()
        moves.send(lambda move: backups.state(first, move))
        compute.set_plan(new.plan, self._config.program(new.plan))
        backups.restore(first, new.plan)
        backups.assign(new.plan)
        moves.take()
        backups.begin_session(first, self._spec.durable)

    # --- the training loop ---

    def _train(self, transport: Transport, groups: ProcessGroups) -> None:
        """Carry out all steps, epoch by epoch: between two of them layers change devices."""
        change = self._run_epoch(transport, self._spec.first_step, self._spec.plans[0].plan)
        while change is not None:
            if change.to.joins:
                self._let_others_join(change.step)
            self._reconfigure(transport, groups, change)
            change = self._run_epoch(transport, change.step, change.to.plan)

    def _run_epoch(self, transport: Transport, first: int, plan: Plan) -> Reconfiguration | None:
        """Carry out the steps from ``first`` on, which runs ``plan``; return why that ends, None if the run does."""
        run, clock = self._config.run, self._context.clock
        if self._config.device not in plan.devices:
            return self._follow_epoch(first)
        interpreter = self._interpreter(transport, plan, first)

        def known(step: int) -> StepProgram | None:
            """Return a step if its plan is known already; None after the last one of this epoch."""
            new = self._client.known(step) if run.is_steered else NewPlan(plan)
            if step >= run.steps or new is None or _begins_another(new, step, first):
                return None
            return self._program(step, new)

        change = None
        for step in range(first, run.steps):
            current, ready_s = known(step), float("-inf")
            if current is None:
                late = self._client.known(step) is None
                new = self._client.wait(step)
                ready_s = clock.now_s() if late else ready_s
                if _begins_another(new, step, first):
                    change = Reconfiguration(step, new, ready_s)
                    break
                current = self._program(step, new)
            if step == run.first_step:
                interpreter.post(current)
                clock.sleep_until(0.0)
                ready_s = clock.now_s()
            interpreter.run(current, known, ready_s)
        interpreter.close()
        return change

    def _follow_epoch(self, first: int) -> Reconfiguration | None:
        assert self._publisher is not None, "without a policy every rank has a part in the plan"
        if self._context.backups is not None:
            self._context.backups.rest()
        for step in range(first, self._config.run.steps):
            plan = self._client.wait(step)
            if _begins_another(plan, step, first):
                return Reconfiguration(step, plan, self._context.clock.now_s())
            self._publisher.finish(step)
        return None

    def _program(self, step: int, new: NewPlan) -> StepProgram:
        program = self._config.program(new.plan)
        assert program is not None, "within an epoch the same devices have a part in every plan"
        return StepProgram(step, new.plan, program)

    def _let_others_join(self, step: int) -> NoReturn:
        """Keep the layers as they are before a step, with which a session begins that has others too."""
        assert self._context.backups is not None, "without copies all devices are in the one session"
        self._context.backups.copy(step)
        self._client.outcome()
        raise SessionEndedError

    def _reconfigure(self, transport: Transport, groups: ProcessGroups, change: Reconfiguration) -> None:
        """Send and take the layers that change devices; this rank waits for nothing else."""
        plan, context = change.to.plan, self._context
        context.compute.wait_until(change.ready_s)
        with blaming("one of the others"):
            groups.use(plan.connections)
        moves = LayerMoves(self._config.device, change, transport, context.compute, self._rows)
        moves.expect()
        moves.send(context.compute.layer_state)
        context.compute.set_plan(plan, self._config.program(plan))
        if context.backups is not None:
            context.backups.assign(plan)
        moves.take()

    def _interpreter(self, transport: Transport, plan: Plan, first: int) -> Interpreter:
        config, context, publisher = self._config, self._context, self._publisher

        def begin(step: StepProgram) -> None:
            if context.checkpoints is not None:
                context.checkpoints.begin_step(step.step, step.plan)
            if context.backups is not None:
                anew, durable = step.step == first, self._client.durable(step.step)
                context.backups.begin_step(step.step, step.plan, durable, anew=anew, transport=transport)

        def end(step: int) -> None:
            if publisher is not None:
                publisher.finish(step)
            self._rows.end_step()
            context.samples.append(sample_resources(step, context.clock.now_s()))

        def note_loss(step: int, loss: float) -> None:
            if publisher is not None:
                publisher.note_loss(step, loss)
            context.loss_steps.append(step)
            context.losses.append(loss)

        updates = None
        if edges := update_edges(config.plan, config.scenario):
            updates = PipelineUpdates(
                config.plan,
                edges,
                config.device,
                config.run.steps,
                transport,
                context.compute,
                config.scenario.model,
                context.clock,
                self._rows,
            )
        return Interpreter(
            config.scenario,
            transport,
            context.compute,
            context.clock,
            config.wire(plan),
            self._rows if config.leads(plan) else PartnerRows(context.file, publisher),
            updates,
            note_loss,
            context.group,
            begin,
            end,
        )

    # --- how a session ends ---

    def _fail(self, error: Exception) -> None:
        """Take an error of a thread that moves bytes and could not go on."""
        if not (self._config.recovers and isinstance(error, PeerLostError)):
            self._give_up(error)
        self._client.send("trouble", session=self._spec.number)

    def _abort(self) -> None:
        with self._closing:
            if self._transport is not None:
                self._transport.abort()


def _begins_another(new: NewPlan, step: int, first: int) -> bool:
    """Return whether a step begins another epoch than the one that began with ``first``: layers change devices."""
    return new.moves is not None and step > first
