"""One rank's training in a session: a set of ranks connected until one is lost, others join, or the run ends."""

import json
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch.distributed as dist

from executor.core.control_channel import read_key
from executor.core.events import ROWS_AT_ONCE, EventRecorder, PartnerRows, StepPublisher
from executor.core.failures import PeerLostError, blaming
from executor.core.messages import NewPlan, Reconfiguration, SessionSpec
from executor.core.step_program import StepProgram
from executor.core.timeouts import timeouts
from executor.rank.context import RankConfig, RankContext
from executor.rank.control_client import ENDED, ControlClient, ControlStore, SessionEndedError
from executor.rank.session_updates import SessionUpdates
from executor.recovery.checkpoint_file import LayerTensors
from executor.recovery.finite import check_loss
from executor.recovery.layer_messages import LayerMessages
from executor.recovery.migration import LayerMoves
from executor.runtime.decoupled.updates import DecoupledUpdates
from executor.runtime.interpreter import Interpreter, Updates
from executor.runtime.link_probes import LinkProbes
from executor.runtime.outer.updates import OuterUpdates
from executor.transport.rendezvous import ProcessGroups
from executor.transport.staging import Staging
from executor.transport.timed_path import Emulation
from executor.transport.transport import Transport
from planner.adapt.copies import layers_of
from planner.adapt.worker_moves import workers_anew
from planner.plan.plan import Plan


@dataclass(eq=False)
class Session:
    """Trains on one rank during one session.

    Args:
        connect: Connects the ranks of the session with each other; all of them call this function together.
        start: Agrees with the other ranks on second 0 of the run; called after ``connect`` in the first session.
        give_up: Called with an error that must end this process.
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
        self._updates: Updates | None = None
        self._outer = self._context.outer
        self._closing = threading.Lock()
        backups = self._context.backups
        kept = (lambda: None) if backups is None else (lambda: backups.kept)
        publisher = StepPublisher(self._publish, self._spec.first_step, kept)
        self._publisher = publisher if self._config.run.is_steered else None
        how = self._spec.plans[0].plan.synchronisation
        waits = how.method == "allreduce" or how.has_common_outer_step
        # Otherwise the checkpoint of a pipeline ahead may be complete before this rank comes to its step.
        at_once = ROWS_AT_ONCE if waits or self._context.checkpoints is None else 1
        self._rows = EventRecorder(self._context.file, self._publisher, at_once)
        self._staging = Staging(self._context.copies, self._fail)
        self._link_probes: LinkProbes | None = None
        self._client.call_at_end(self._abort)

    def run(self, conclude: Callable[[], None]) -> None:
        """Run all remaining steps, and call ``conclude`` at the end of the run.

        Raises:
            SessionEndedError: A rank or a connection is lost, or ranks join, and another session follows.
            PeerLostError: A rank or a connection is lost, and the run ends.
        """
        config, context = self._config, self._context
        try:
            with blaming():
                groups = self._connect()
                if self._spec.origin_s is None:
                    self._start()
            if config.run.measures_links:
                try:
                    self._link_probes = self._open_link_probes()
                except OSError as error:
                    # The run does not need them.
                    print(f"links that the plan does not use are not measured: {error}", file=sys.stderr)
            transport = self._open(groups)
            self._restore(transport)
            self._train(transport, groups)
            if context.checkpoints is not None:
                context.checkpoints.copy_last(config.run.steps, self._outer_states)
                context.checkpoints.finish()
            self._staging.close()
            transport.close()
            self._close_link_probes()
            self._rows.flush()
            conclude()
            if not config.run.replaces:
                self._client.settle()
            else:
                # Keep the copies until all ranks are done: after a loss, another session would need them.
                rows = self._publisher.unpublished() if config.run.decoupled and self._publisher else None
                self._client.send("done", session=self._spec.number, rows=rows)
                if self._client.outcome() == ENDED:
                    raise SessionEndedError
            self._transport = None
        except PeerLostError:
            if config.run.decoupled:
                # The head ends this process: with the other ranks of the worker, or with the run if a syncer is lost.
                self._client.outcome(timeouts().session_end_s)
            if not config.recovers:
                raise
            self._client.send("trouble", session=self._spec.number)
            # If the head does not end the session, the lost connection ends this process.
            if self._client.outcome(timeouts().session_end_s) != ENDED:
                raise
            raise SessionEndedError from None

    def leave(self) -> None:
        """Close all connections, so that waits on them raise an error, and report this rank's copies to the head."""
        backups, publisher = self._context.backups, self._publisher
        assert backups is not None
        assert publisher is not None
        self._staging.close(wait=False)
        self._close_link_probes()
        if self._transport is not None:
            self._transport.abandon()
        # Drop the connections before their process group is destroyed.
        self._transport = None
        self._rows.flush()
        if dist.is_initialized():
            dist.destroy_process_group()
        now_s = self._context.clock.now_s() if self._context.clock.has_started else 0.0
        self._client.report(self._spec.number, backups.copies(), now_s, publisher.unpublished())

    def _open(self, groups: ProcessGroups) -> Transport:
        config, context = self._config, self._context
        ranks = {config.devices[rank]: place for place, rank in enumerate(self._spec.ranks)}
        transport = Transport(
            config.device,
            ranks,
            config.scenario,
            groups,
            context.clock,
            context.shaper,
            config.run.compute == "paced",
            config.run.sees_arrivals(config.plan),
            self._fail,
            context.gpu,
            config.uses_nccl,
        )
        with self._closing:
            self._transport = transport
            if self._client.is_ending:
                raise PeerLostError("a rank was lost before all ranks were connected")
        with blaming():
            transport.connect_devices(self._spec.plans[0].plan)
        return transport

    def _open_link_probes(self) -> LinkProbes:
        config, shaper = self._config, self._context.shaper

        def emulate(target: str) -> Emulation | None:
            return None if shaper is None else shaper.between(config.device, target)

        return LinkProbes(
            config.device,
            [config.devices[rank] for rank in self._spec.ranks],
            config.scenario,
            self._client.own_address,
            read_key(config.folder.key),
            self._spec.store_prefix,
            ControlStore(self._client),
            self._context.clock,
            self._rows,
            emulate,
        )

    def _close_link_probes(self) -> None:
        if self._link_probes is not None:
            self._link_probes.close()

    def _restore(self, transport: Transport) -> None:
        """Restore the layers of this rank to the state before the session's first step, from all ranks' copies."""
        if self._spec.number == 0 or self._config.run.decoupled:
            # No rank has trained yet, or the common parameters come from elsewhere. In a later session ranks may have
            # trained even if the head does not know the run's second 0, which the lost rank was to tell.
            return
        backups, compute = self._context.backups, self._context.compute
        assert backups is not None
        first, new = self._spec.first_step, self._spec.plans[0]
        now_s = self._context.clock.now_s()
        compute.wait_until(now_s)
        messages = LayerMessages(self._config.scenario, compute)
        moves = self._moves(Reconfiguration(first, new, now_s), transport, messages)
        moves.expect()
        moves.send(
            lambda move: messages.pack(
                move, backups.state(first, move), partial(backups.outer_states, first, move.layers)
            )
        )
        compute.set_plan(new.plan, self._config.program(new.plan))
        backups.restore(first, new.plan)
        backups.assign(new.plan)
        own = layers_of(new.plan, self._config.device)
        self._outer = {**backups.outer_states(first, own), **moves.take()}
        backups.begin_session(first, self._spec.durable)

    # --- the training loop ---

    def _train(self, transport: Transport, groups: ProcessGroups) -> None:
        """Run all steps, epoch by epoch: an epoch ends when a new plan moves layers to other devices."""
        if self._config.run.decoupled:
            self._run_worker(transport, self._spec.plans[0].plan)
            return
        # In later epochs updates that other pipelines have sent meanwhile stay; a device that joins their stages later
        # must know which exchanges there were.
        first = self._spec.plans[0]
        self._updates = self._session_updates(transport).of_plan(first.plan, self._outer)
        if isinstance(self._updates, OuterUpdates) and self._spec.number:
            self._updates.regroup(self._spec.first_step, workers_anew(first.plan, first.moves or ()))
        change = self._run_epoch(transport, self._spec.first_step, first.plan)
        while change is not None:
            if self._updates is not None:
                self._updates.set_plan(change.step, change.to.plan)
            if change.to.joins:
                self._let_others_join(change.step)
            self._reconfigure(transport, groups, change)
            change = self._run_epoch(transport, change.step, change.to.plan)

    def _run_worker(self, transport: Transport, plan: Plan) -> None:
        """Run steps at this worker's own speed, until the head says which is the last."""
        step, client = self._spec.first_step, self._client
        self._updates = self._session_updates(transport).of_worker(plan)
        interpreter = self._interpreter(transport, plan, step)

        def known(step: int) -> StepProgram | None:
            new = client.known(step)
            return None if new is None else self._program(step, new)

        clock = self._context.clock
        clock.sleep_until(0.0)
        is_late = True
        while (new := client.wait_unless_last(step)) is not None:
            interpreter.run(self._program(step, new), known, clock.now_s() if is_late else float("-inf"))
            step += 1
            is_late = client.known(step) is None
        interpreter.close()
        if self._context.checkpoints is not None:
            last = self._program(step, NewPlan(plan, step * plan.global_batch))
            self._context.checkpoints.copy_marked(last, self._config.run.steps, self._outer_states)

    def _copy_marked(self, step: StepProgram) -> None:
        """Copy the state before a step of a worker at its own speed, if it belongs to a checkpoint."""
        mark = self._client.mark(step.step)
        if mark is not None and self._context.checkpoints is not None:
            assert isinstance(self._updates, DecoupledUpdates)
            self._context.checkpoints.copy_marked(step, mark.checkpoint, self._outer_states)
            self._updates.mark(mark)

    def _run_epoch(self, transport: Transport, first: int, plan: Plan) -> Reconfiguration | None:
        """Run an epoch that begins at step ``first`` with ``plan``.

        Returns:
            The new plan that ends the epoch; None at the end of the run.
        """
        run, clock = self._config.run, self._context.clock
        if self._config.device not in plan.devices:
            return self._follow_epoch(first)
        interpreter = self._interpreter(transport, plan, first)

        def known(step: int) -> StepProgram | None:
            """Return the program of a step; None if its plan is not known yet, or if the step is not in this epoch."""
            new = self._spec.plans[0].after(step - first) if run.has_fixed_plan else self._client.known(step)
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
        interpreter.close(None if change is None else change.step)
        return change

    def _follow_epoch(self, first: int) -> Reconfiguration | None:
        assert self._publisher is not None, "without a policy every rank has a part in the plan"
        backups = self._context.backups
        # Before second 0 of the run the links are not as they will be.
        self._context.clock.sleep_until(0.0)
        for step in range(first, self._config.run.steps):
            new = self._client.wait(step)
            if _begins_another(new, step, first):
                return Reconfiguration(step, new, self._context.clock.now_s())
            if self._link_probes is not None:
                self._link_probes.send(step, new.plan)
            if backups is not None:
                backups.rest(step, new.plan, self._client.durable(step), anew=step == first)
            self._publisher.finish(step)
            self._rows.end_step()
        return None

    def _program(self, step: int, new: NewPlan) -> StepProgram:
        program = self._config.program(new.plan)
        assert program is not None, "within an epoch the same devices have a part in every plan"
        return StepProgram(step, new.plan, program, new.samples_before)

    def _let_others_join(self, step: int) -> NoReturn:
        """Copy the state of the layers before ``step``, with which the next session begins, and end this session."""
        assert self._context.backups is not None, "without copies all devices are in the one session"
        self._context.backups.copy(step, self._outer_states)
        self._client.send("copied", session=self._spec.number)
        self._client.outcome()
        raise SessionEndedError

    def _reconfigure(self, transport: Transport, groups: ProcessGroups, change: Reconfiguration) -> None:
        """Send and receive the layers that change devices; there is no barrier with other ranks."""
        plan, context = change.to.plan, self._context
        context.compute.wait_until(change.ready_s)
        with blaming():
            groups.use(plan.connections)
            transport.connect_devices(plan)
        messages = LayerMessages(self._config.scenario, context.compute)
        moves = self._moves(change, transport, messages)
        moves.expect()
        outer = partial(self._outer_states, change.step)
        moves.send(lambda move: messages.pack(move, context.compute.layer_state(move), outer))
        context.compute.set_plan(plan, self._config.program(plan))
        if context.backups is not None:
            context.backups.assign(plan)
        received = moves.take()
        if isinstance(self._updates, OuterUpdates):
            self._updates.take_over(received)
            self._updates.begin_anew(change.step, workers_anew(plan, change.to.moves or ()))

    def _moves(self, change: Reconfiguration, transport: Transport, messages: LayerMessages) -> LayerMoves:
        return LayerMoves(self._config.device, change, transport, self._context.compute, messages, self._rows)

    def _interpreter(self, transport: Transport, plan: Plan, first: int) -> Interpreter:
        config, context, publisher = self._config, self._context, self._publisher

        def begin(step: StepProgram) -> None:
            if self._link_probes is not None:
                self._link_probes.send(step.step, step.plan)
            if config.run.decoupled:
                self._copy_marked(step)
            elif context.checkpoints is not None and context.checkpoints.begin_step(step, self._outer_states):
                # The rows of the steps before must outlive this process, as the checkpoint does.
                self._rows.flush()
            if context.backups is not None:
                anew, durable = step.step == first, self._client.durable(step.step)
                context.backups.begin_step(
                    step.step,
                    step.plan,
                    durable,
                    anew=anew,
                    transport=transport,
                    rows=self._rows,
                    outer=self._outer_states,
                )

        def end(step: int) -> None:
            if publisher is not None:
                if (norms := context.norms_of(step)) is not None:
                    publisher.note_norms(norms)
                publisher.finish(step)
            self._rows.end_step()
            context.samples.write(step, context.clock.now_s())

        def note_loss(step: int, loss: float) -> None:
            if not config.run.allows_nan:
                check_loss(loss, step, config.run.steps, plan, config.device)
            if publisher is not None:
                publisher.note_loss(step, loss)
            context.losses.write(f"{json.dumps([step, loss])}\n")

        def end_run() -> None:
            # A resumed run takes the outer steps that are still to come at their own time.
            if context.checkpoints is not None and isinstance(self._updates, OuterUpdates):
                context.checkpoints.copy_last(config.run.steps, self._outer_states)

        return Interpreter(
            config.scenario,
            transport,
            context.compute,
            context.clock,
            config.wire,
            self._rows if config.leads(plan) else PartnerRows(context.file, publisher),
            self._updates,
            note_loss,
            self._staging,
            context.group,
            config.run.adapts and config.leads(plan),
            begin,
            end,
            end_run,
        )

    def _session_updates(self, transport: Transport) -> SessionUpdates:
        return SessionUpdates(self._config, self._context, self._spec, transport, self._rows, self._fail)

    def _outer_states(self, step: int) -> Mapping[int, LayerTensors]:
        return self._updates.state(step) if isinstance(self._updates, OuterUpdates | DecoupledUpdates) else {}

    def _publish(self, step: int, part: dict[str, Any]) -> None:
        self._client.publish(self._spec.number, step, part, keeps=not self._config.run.replaces)

    # --- how a session ends ---

    def _fail(self, error: Exception) -> None:
        """Handle an error of a sending or receiving thread."""
        if self._config.run.decoupled and isinstance(error, PeerLostError):
            return
        if not (self._config.recovers and isinstance(error, PeerLostError)):
            self._give_up(error)
        self._client.send("trouble", session=self._spec.number)

    def _abort(self) -> None:
        with self._closing:
            if self._transport is not None:
                self._transport.abort()


def _begins_another(new: NewPlan, step: int, first: int) -> bool:
    """Return whether a new plan ends the epoch that began with step ``first``, since layers move before ``step``."""
    return new.moves is not None and step > first
