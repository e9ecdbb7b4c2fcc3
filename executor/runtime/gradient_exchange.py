"""Sums gradients with the other devices that hold the same layers, exchange by exchange."""

from functools import partial

import torch

from executor.core.clock import RunClock
from executor.core.row_log import EventRecorder
from executor.core.step_program import StepProgram
from executor.runtime.posted_receives import PostedStep
from executor.training.compute import Compute
from executor.transport.tags import sync_tag
from executor.transport.transport import Transport
from planner.cost.allreduce import GradientSync
from planner.events.events import EventKind


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
