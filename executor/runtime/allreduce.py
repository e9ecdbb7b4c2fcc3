"""Sums gradients in a thread of its own while its rank computes: each sum as soon as its gradients are complete."""

import threading
from functools import partial

import torch

from executor.core.clock import RunClock
from executor.core.events import EventRecorder
from executor.core.step_program import StepProgram
from executor.runtime.posted_receives import PostedStep
from executor.training.compute import Compute
from executor.transport.transport import Transport
from executor.transport.wire_format import sync_tag
from planner.cost.synchronisation import GradientSync
from planner.events.event import EventKind


class GradientExchange:
    """Carries out sums of gradients."""

    def __init__(self, transport: Transport, compute: Compute, clock: RunClock, rows: EventRecorder) -> None:
        self._transport = transport
        self._compute = compute
        self._clock = clock
        self._rows = rows

    def synchronise(self, current: StepProgram, sync: GradientSync, posted: PostedStep) -> None:
        """Sum the gradients of some layers; they are the compute's again when this returns."""
        start_s = self._clock.now_s()
        row = self._compute.gradient(sync)
        sent_bytes = 0
        for exchange in sync.exchanges(current.program.device):
            if exchange.send_to is not None:
                # A copy: a later round may change this part of the row while the message is still on its way.
                payload = row[slice(*exchange.send)].clone().view(torch.uint8)
                self._send(current, sync, exchange.round, sync.devices[exchange.send_to], payload)
                sent_bytes += payload.numel()
            if exchange.receive_from is not None:
                receipt = posted.exchange(sync, exchange.round)
                arrived = receipt.wait().view(row.dtype)
                self._log_arrival(current, sync.devices[exchange.receive_from], receipt.size_bytes, receipt.arrived_s)
                if exchange.adds:
                    row[slice(*exchange.receive)] += arrived
                else:
                    row[slice(*exchange.receive)] = arrived
        self._compute.put_gradient(sync, row)
        self._rows.log(current.program.sync_event(current.step, sent_bytes, start_s, self._clock.now_s()))

    def _send(self, current: StepProgram, sync: GradientSync, number: int, target: str, payload: torch.Tensor) -> None:
        start_s = self._clock.now_s()
        row = partial(current.program.exchange_event, EventKind.SEND, current.step, target, payload.numel())
        departed = self._rows.sending(current.step, row, start_s)
        self._transport.send(target, sync_tag(current.step, sync.first_layer, number), payload, start_s, departed)

    def _log_arrival(self, current: StepProgram, source: str, size_bytes: int, arrived_s: float) -> None:
        """A row without length: the time of waiting is in the row of the whole sum."""
        row = current.program.exchange_event(EventKind.RECEIVE, current.step, source, size_bytes, arrived_s, arrived_s)
        self._rows.log(row)


class OverlappedAllReduce:
    """The sums of one step, one after the other.

    Args:
        exchange: Carries them out.
        clock: Of the run.
        current: The step.
        posted: Its receives.
    """

    def __init__(self, exchange: GradientExchange, clock: RunClock, current: StepProgram, posted: PostedStep) -> None:
        self._exchange = exchange
        self._clock = clock
        self._current = current
        self._posted = posted
        program = current.program
        during = {each.sync for work in program.work for each in work.completes}
        self._complete = [threading.Event() for _ in program.synchronisations]
        for sync, complete in enumerate(self._complete):
            if sync not in during:
                complete.set()
        self._error: Exception | None = None
        self._done_s = float("-inf")
        # If its rank fails, nobody will tell it that anything is complete.
        self._thread = threading.Thread(target=self._run, name="sums", daemon=True)
        self._thread.start()

    def complete(self, sync: int) -> None:
        """Let a sum begin."""
        self._complete[sync].set()

    def finish(self) -> float:
        """Wait for all sums; return the run second at which they were done.

        Raises:
            PeerLostError: One of the others is gone.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._done_s

    def _run(self) -> None:
        try:
            for sync, complete in zip(self._current.program.synchronisations, self._complete, strict=True):
                complete.wait()
                self._exchange.synchronise(self._current, sync, self._posted)
            self._done_s = self._clock.now_s()
        except Exception as error:
            self._error = error
