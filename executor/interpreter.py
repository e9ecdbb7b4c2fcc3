"""Carries out one rank's programs over the transport, and logs what happens."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from executor.clock import RunClock
from executor.compute import Compute
from executor.transport import Receipt, Transport, sync_tag, transfer_tag
from planner.events import SYNC_ACTION, Event, EventKind
from planner.plan import Plan
from planner.program import DeviceProgram, GradientSync, Transfer
from planner.ring import Exchange, ring_exchanges

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
            previous = sync.devices[sync.devices.index(self._device) - 1]
            for turn, exchange in enumerate(self._exchanges(sync)):
                tag = sync_tag(current.step, sync.first_layer, turn)
                size_bytes = self._bytes(exchange.receive)
                posted.exchanges[sync.first_layer, turn] = self._transport.post(previous, tag, size_bytes)

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
            start_s = self._clock.now_s()
            outputs = self._compute.run(work, inputs, waited=waited)
            waited = False
            action = work.action
            self._record(EventKind.COMPUTE, current, start_s, action=str(action.kind), microbatch=action.microbatch)
            for transfer, payload in zip(work.sends, outputs, strict=True):
                self._send(current, transfer, payload)
        for sync in current.program.synchronisations:
            self._synchronise(current, sync, posted)
        del self._posted[current.step]
        return self._compute.finish_step()

    def _receive(self, current: StepProgram, transfer: Transfer, receipt: Receipt) -> tuple[torch.Tensor, bool]:
        start_s = self._clock.now_s()
        payload = receipt.wait()
        idle = self._clock.now_s() - start_s > NOTICEABLE_WAIT_S
        if idle:
            self._record(
                EventKind.RECEIVE,
                current,
                start_s,
                peer=transfer.source,
                action=str(transfer.kind),
                microbatch=transfer.microbatch,
                size_bytes=transfer.size_bytes,
            )
        return payload, idle

    def _send(self, current: StepProgram, transfer: Transfer, payload: torch.Tensor) -> None:
        assert payload.numel() == transfer.size_bytes, (transfer, payload.numel())
        tag = transfer_tag(current.step, transfer)
        self._transmit(current, transfer.target, tag, payload, str(transfer.kind), transfer.microbatch)

    def _transmit(
        self, current: StepProgram, target: str, tag: int, payload: torch.Tensor, action: str, microbatch: int
    ) -> None:
        start_s = self._clock.now_s()

        def left(end_s: float) -> None:
            self._record(
                EventKind.SEND,
                current,
                start_s,
                end_s=end_s,
                peer=target,
                action=action,
                microbatch=microbatch,
                size_bytes=payload.numel(),
            )

        self._sending(current.step)
        self._transport.send(target, tag, payload, left)

    def _synchronise(self, current: StepProgram, sync: GradientSync, posted: _Posted) -> None:
        """Sum gradients over the ring, exchange by exchange."""
        start_s = self._clock.now_s()
        row = self._compute.gradient(sync)
        following = sync.devices[(sync.devices.index(self._device) + 1) % len(sync.devices)]
        sent_bytes = 0
        for turn, exchange in enumerate(self._exchanges(sync)):
            tag = sync_tag(current.step, sync.first_layer, turn)
            # A copy: the ring comes back to this part of the row while the message may still be leaving.
            payload = row[slice(*exchange.send)].clone().view(torch.uint8)
            self._transmit(current, following, tag, payload, SYNC_ACTION, -1)
            sent_bytes += payload.numel()
            arrived = posted.exchanges.pop((sync.first_layer, turn)).wait().view(row.dtype)
            if exchange.adds:
                row[slice(*exchange.receive)] += arrived
            else:
                row[slice(*exchange.receive)] = arrived
        self._compute.put_gradient(sync, row)
        self._record(EventKind.SYNC, current, start_s, action=SYNC_ACTION, size_bytes=sent_bytes)

    def _exchanges(self, sync: GradientSync) -> tuple[Exchange, ...]:
        return ring_exchanges(sync.elements, len(sync.devices), sync.devices.index(self._device))

    def _bytes(self, interval: tuple[int, int]) -> int:
        return (interval[1] - interval[0]) * self._element_bytes

    def _record(
        self,
        kind: EventKind,
        current: StepProgram,
        start_s: float,
        *,
        action: str,
        end_s: float | None = None,
        peer: str = "",
        microbatch: int = -1,
        size_bytes: int = 0,
    ) -> None:
        end_s = self._clock.now_s() if end_s is None else end_s
        program = current.program
        self._log(
            Event(
                kind,
                self._device,
                peer,
                program.pipeline,
                program.stage,
                microbatch,
                current.step,
                action,
                start_s,
                end_s,
                size_bytes,
            )
        )
