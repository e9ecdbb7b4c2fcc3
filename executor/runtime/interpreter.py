"""Runs the programs of one rank step by step: receives inputs, computes actions, sends outputs, and records events."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import torch

from executor.core.clock import RunClock
from executor.core.events import EventRecorder
from executor.core.step_program import StepProgram, Transfer, Work
from executor.runtime.action_order import action_order
from executor.runtime.allreduce import GradientExchange, OverlappedAllReduce
from executor.runtime.grad_norm import NormChain
from executor.runtime.path_probes import PathProbes
from executor.runtime.posted_receives import PostedStep
from executor.training.real_compute import Compute
from executor.training.tensor_parallel import TensorGroup
from executor.transport.staging import Copies, Staging
from executor.transport.transport import Transport
from executor.transport.wire_format import Wire, transfer_tag
from planner.events.event import Event, EventKind
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario


class Updates(Protocol):
    """What pipelines exchange instead of sums of gradients; `PipelineUpdates` has the details."""

    def set_plan(self, step: int, plan: Plan) -> None:
        """Replace the plan from a step on."""

    def begin(self, step: int) -> float:
        """Do what precedes a step; return the run second of the last arrival that it waited for."""

    def add(self, step: int) -> None:
        """Add what has arrived to the gradients of a step, before replicas sum them."""

    def accumulate(self) -> None:
        """Note the gradients of a step, after replicas have summed them."""

    def finish(self, step: int, now_s: float) -> None:
        """Do what follows a step, which was applied at run second ``now_s``."""

    def settles(self, step: int) -> bool:
        """Return whether pipelines wait for all updates before a step."""

    def settle(self, step: int) -> bool:
        """Wait for them; return whether the optimizer must apply them."""

    def drain(self) -> bool:
        """Do what follows the last step; return whether the optimizer must apply what has arrived."""


@dataclass(eq=False)
class Interpreter:
    """Runs one step after the other; the receives of a step are posted while the previous step runs.

    Args:
        updates: Asynchronous updates between pipelines, or their outer steps; None if gradients are synchronised by
            all-reduce.
        finished: Called after the update of a step, with the step and this rank's part of the loss, if it computes one.
        group: The tensor-parallel group of this rank; None if the rank computes alone.
        is_observed: Whether a policy observes the run, so that the delays of the paths are measured.
        begun: Called before each step, after the updates of all earlier steps.
        ended: Called with each step after its update. All messages of the step are being sent, so that no event of the
            step begins later.
        staging: The copy engines of this rank.
        ending: Called at the end of the run, before the updates are applied that other pipelines still send.
    """

    _scenario: Scenario
    _transport: Transport
    _compute: Compute
    _clock: RunClock
    _wire: Callable[[Plan], Wire]
    _recorder: EventRecorder
    _updates: Updates | None
    _finished: Callable[[int, float], None]
    _staging: Staging = field(default_factory=lambda: Staging(Copies(), lambda error: None))
    _group: TensorGroup | None = None
    _is_observed: bool = False
    _begun: Callable[[StepProgram], None] = lambda step: None
    _ended: Callable[[int], None] = lambda step: None
    _ending: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self._posted: dict[int, PostedStep] = {}
        self._probes = PathProbes(self._transport, self._clock, self._recorder) if self._is_observed else None
        self._exchange = GradientExchange(self._transport, self._compute, self._clock, self._recorder, self._probes)
        self._norms = NormChain(self._transport, self._scenario.training.clip_norm is not None)
        self._unfinished: StepProgram | None = None
        self._last: StepProgram | None = None

    def post(self, current: StepProgram) -> None:
        """Post all receives of a step, unless they are posted already."""
        if current.step in self._posted:
            return
        order = action_order(current, self._scenario, self._clock, self._group)
        self._posted[current.step] = PostedStep(current, order, self._transport, self._staging)
        if self._probes is not None:
            self._probes.post(current)
        self._norms.post(current)

    def run(self, current: StepProgram, following: Callable[[int], StepProgram | None], ready_s: float) -> None:
        """Run a step. If gradients are clipped, the optimizer's update is done at the start of the next step.

        Args:
            current: The step to run.
            following: Returns the program of a later step, to post its receives; None if its plan is not known.
            ready_s: The earliest start in run seconds.
        """
        self.post(current)
        self.update()
        self._settle(current.step)
        self._begun(current)
        posted = self._posted[current.step]
        if self._updates is not None:
            ready_s = max(ready_s, self._updates.begin(current.step))
        self._compute.start_step(current)
        overlapped = None
        complete: Callable[[int], None] = lambda sync: None  # noqa: E731
        if current.program.overlaps:
            overlapped = OverlappedAllReduce(self._exchange, self._clock, current, posted)
            complete = overlapped.complete
        with self._compute.passes():
            while (upcoming := posted.order.next()) is not None:
                work, idle_since_s = upcoming
                self._post_ahead(current.step + 1, following)
                inputs, arrived_s = self._take_inputs(current, work, posted, idle_since_s)
                done = self._compute.run(work, inputs, ready_s=max(ready_s, arrived_s), complete=complete)
                # Send before all else, since another device may wait for the message.
                for transfer, payload in zip(work.sends, done.outputs, strict=True):
                    self._send(current, transfer, payload, done.end_s)
                posted.order.finish(work)
                late_s = self._compute.late_s
                self._log(
                    current, current.program.compute_event(current.step, work.action, done.start_s, done.end_s, late_s)
                )
        self._post_ahead(current.step + 1, following)
        if overlapped is not None:
            self._compute.wait_until(overlapped.finish())
        else:
            self._synchronise(current, posted)
        del self._posted[current.step]
        self._norms.contribute(current, self._compute.squared_norm)
        self._unfinished = current
        if not self._norms.wanted:
            self.update()

    def _log(self, current: StepProgram, event: Event) -> None:
        """Log a compute event of this device and of its tensor-parallel partners, which take part in it."""
        self._recorder.log(event)
        for partner in current.program.partners:
            self._recorder.log(replace(event, device=partner))

    def close(self, before: int | None = None) -> None:
        """Finish the last step; at the end of the run, apply the updates that other pipelines still send.

        ``before`` is the next step, which other devices may run; None at the end of the run.
        """
        self.update()
        if before is not None:
            self._settle(before)
            return
        self._ending()
        if self._updates is not None and self._updates.drain() and self._last is not None:
            self._update_once_more(self._last, self._last.step + 1)

    def _settle(self, step: int) -> None:
        """Apply all updates of earlier steps if pipelines settle before ``step``, unless this was done in `close`."""
        if self._updates is None or self._last is None or not self._updates.settles(step):
            return
        if self._updates.settle(step):
            # The norm's messages have the tags of a step that no rank has begun.
            self._update_once_more(self._last, step + 2)

    def update(self) -> None:
        """Do the optimizer's update of the last step, unless it is done already."""
        if self._unfinished is None:
            return
        current, self._unfinished, self._last = self._unfinished, None, self._unfinished
        squared_norm = self._squared_norm(current)
        start_s = self._compute.free_s()
        loss = self._compute.finish_step(current.step, squared_norm)
        if current.program.update_s:
            end_s, late_s = self._compute.free_s(), self._compute.late_s
            self._log(current, current.program.update_event(current.step, start_s, end_s, late_s))
        if loss is not None:
            self._finished(current.step, loss)
        if self._updates is not None:
            self._updates.finish(current.step, self._compute.free_s())
        self._ended(current.step)

    def _update_once_more(self, last: StepProgram, tagged: int) -> None:
        """Update the parameters from the present gradients, at the learning rate of the last step.

        ``tagged`` is the number of a step, for the tags of the norm's messages.
        """
        after = replace(last, step=tagged)
        self._norms.post(after)
        self._norms.contribute(after, self._compute.squared_norm)
        self._compute.finish_step(last.step, self._squared_norm(after))

    def _squared_norm(self, current: StepProgram) -> float | None:
        """Wait for the squared norm of all gradients, if these are clipped; the device does not compute meanwhile."""
        squared_norm = self._norms.total(current)
        if squared_norm is not None:
            self._compute.wait_until(self._clock.now_s())
        return squared_norm

    def _synchronise(self, current: StepProgram, posted: PostedStep) -> None:
        if self._updates is not None:
            self._updates.add(current.step)
        for sync in current.program.synchronisations:
            self._exchange.synchronise(current, sync, posted)
            self._compute.wait_until(self._clock.now_s())
        if self._updates is not None:
            self._updates.accumulate()

    def _post_ahead(self, step: int, following: Callable[[int], StepProgram | None]) -> None:
        if step not in self._posted and (upcoming := following(step)) is not None:
            self.post(upcoming)

    def _take_inputs(
        self, current: StepProgram, work: Work, posted: PostedStep, idle_since_s: float
    ) -> tuple[list[torch.Tensor], float]:
        """Wait for the inputs of an action; return their payloads, and the run second at which all were ready."""
        wire = self._wire(current.plan)
        inputs, arrived_s = [], float("-inf")
        for transfer in work.receives:
            handle, take = posted.transfers.pop(transfer)
            payload, ready_s = take()
            inputs.append(wire.unpack(transfer, self._staging.copies.adopt(payload)))
            event = partial(current.program.transfer_event, EventKind.RECEIVE, current.step, transfer)
            self._recorder.arrived(event, idle_since_s, handle.arrived_s)
            arrived_s = max(arrived_s, ready_s)
        return inputs, arrived_s

    def _send(self, current: StepProgram, transfer: Transfer, payload: torch.Tensor, start_s: float) -> None:
        event = partial(current.program.transfer_event, EventKind.SEND, current.step, transfer)
        packed = self._wire(current.plan).pack(transfer, payload)
        assert packed.numel() == transfer.size_bytes, (transfer, packed.numel())
        release = self._recorder.hold(current.step)

        def send(ready: torch.Tensor, ready_s: float) -> None:
            if self._probes is not None:
                self._probes.precede(current, transfer.target)
            departed = self._recorder.sending(current.step, event, ready_s)
            release()
            self._transport.send(transfer.target, transfer_tag(current.step, transfer), ready, ready_s, departed)

        self._staging.send(current.plan, transfer, packed, start_s, send)
