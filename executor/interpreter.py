"""Carries out one rank's programs over the transport, and logs what happens."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from executor.clock import RunClock
from executor.compute import Compute
from executor.transport import Receipt, Transport, sync_tag, transfer_tag
from planner.events import Event, EventKind
from planner.gradient_sync import GradientSync
from planner.plan import Plan
from planner.program import DeviceProgram, Transfer

# A shorter wait is the time it takes to ask; the device did not stand idle.
NOTICEABLE_WAIT_S = 0.0005


@dataclass(frozen=True, slots=True)
class StepProgram:
    """What this rank does in a step: its program under the step's plan."""

    step: int
    plan: Plan
    program: DeviceProgram


@dataclass(slots=True)
class _Posted:
    """Receives of one step that were posted."""

    transfers: dict[Transfer, Receipt] = field(default_factory=dict)
    exchanges: dict[tuple[int, int], Receipt] = field(default_factory=dict)


class Interpreter:
    """Runs step after step; the receives of a step may be posted before it starts."""

    def __init__(
        self,
        device: str,
        transport: Transport,
        compute: Compute,
        clock: RunClock,
        element_bytes: int,
        log: Callable[[Event], None],
        sending: Callable[[int], None],
    ) -> None:
        self._device = device
        self._transport = transport
        self._compute = compute
        self._clock = clock
        self._element_bytes = element_bytes
        self._log = log
        self._sending = sending
        self._posted: dict[int, _Posted] = {}

    def post(self, current: StepProgram) -> None:
        """Post all receives of a step, unless that was done."""
        if current.step in self._posted:
            return
        posted = self._posted[current.step] = _Posted()
        for work in current.program.work:
            for transfer in work.receives:
                tag = transfer_tag(current.step, transfer)
                posted.transfers[transfer] = self._transport.post(transfer.source, tag, transfer.size_bytes)
        for sync in current.program.synchronisations:
            for exchange in sync.exchanges(self._device):
                if exchange.receive_from is not None:
                    key = (sync.first_layer, exchange.round)
                    source, tag = sync.devices[exchange.receive_from], sync_tag(current.step, *key)
                    size_bytes = exchange.receive_elements * self._element_bytes
                    posted.exchanges[key] = self._transport.post(source, tag, size_bytes)

    def run(
        self, current: StepProgram, following: Callable[[int], StepProgram | None], *, waited: bool
    ) -> float | None:
        """Carry out a step; return this rank's part of its loss.

        Args:
            current: The step.
            following: Gives a coming step if its plan is known, so that its receives are posted in time.
            waited: Whether the device stood idle before the step.
        """
        self.post(current)
        posted = self._posted[current.step]
        self._compute.start_step(current.step, current.plan, current.program)
        for index, work in enumerate(current.program.work):
            if index == len(current.program.work) - 1 and (upcoming := following(current.step + 1)) is not None:
                self.post(upcoming)
            inputs = []
            for transfer in work.receives:
                payload, idle = self._receive(current, transfer, posted.transfers.pop(transfer))
                inputs.append(payload)
                waited = waited or idle
            done = self._compute.run(work, inputs, waited=waited)
            waited = False
            self._log(current.program.compute_event(current.step, work.action, done.start_s, done.end_s))
            for transfer, payload in zip(work.sends, done.outputs, strict=True):
                self._send(current, transfer, payload, done.end_s)
        for sync in current.program.synchronisations:
            self._synchronise(current, sync, posted)
        del self._posted[current.step]
        return self._compute.finish_step()

    def _receive(self, current: StepProgram, transfer: Transfer, receipt: Receipt) -> tuple[torch.Tensor, bool]:
        start_s = self._clock.now_s()
        payload = receipt.wait()
        now_s = self._clock.now_s()
        idle = now_s - start_s > NOTICEABLE_WAIT_S
        if idle:
            self._log(current.program.transfer_event(EventKind.RECEIVE, current.step, transfer, start_s, now_s))
        return payload, idle

    def _send(self, current: StepProgram, transfer: Transfer, payload: torch.Tensor, start_s: float) -> None:
        assert payload.numel() == transfer.size_bytes, (transfer, payload.numel())
        row = partial(current.program.transfer_event, EventKind.SEND, current.step, transfer)
        self._transmit(current.step, transfer.target, transfer_tag(current.step, transfer), payload, start_s, row)

    def _transmit(
        self,
        step: int,
        target: str,
        tag: int,
        payload: torch.Tensor,
        start_s: float,
        row: Callable[[float, float], Event],
    ) -> None:
        """Hand bytes over that were ready at ``start_s``; when the last one has departed, log the row."""
        self._sending(step)
        self._transport.send(target, tag, payload, start_s, lambda end_s: self._log(row(start_s, end_s)))

    def _synchronise(self, current: StepProgram, sync: GradientSync, posted: _Posted) -> None:
        """Sum gradients with the other devices, exchange by exchange."""
        start_s = self._clock.now_s()
        row = self._compute.gradient(sync)
        sent_bytes = 0
        for exchange in sync.exchanges(self._device):
            key = (sync.first_layer, exchange.round)
            if exchange.send_to is not None:
                target = sync.devices[exchange.send_to]
                # A copy: a later round may change this part of the row while the message is still on its way.
                payload = row[slice(*exchange.send)].clone().view(torch.uint8)
                event = partial(current.program.exchange_event, current.step, target, payload.numel())
                tag = sync_tag(current.step, *key)
                self._transmit(current.step, target, tag, payload, self._clock.now_s(), event)
                sent_bytes += payload.numel()
            if exchange.receive_from is not None:
                arrived = posted.exchanges.pop(key).wait().view(row.dtype)
                if exchange.adds:
                    row[slice(*exchange.receive)] += arrived
                else:
                    row[slice(*exchange.receive)] = arrived
        self._compute.put_gradient(sync, row)
        self._log(current.program.sync_event(current.step, sent_bytes, start_s, self._clock.now_s()))
