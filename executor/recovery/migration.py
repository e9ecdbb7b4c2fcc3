"""Sends the state of layers between ranks when layers change devices between two steps: a migration.

There is no barrier: a rank queues the state that other ranks need as soon as its own last step is over, and begins the
next step when the state that it needs has arrived. Other ranks may be in that step already.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from executor.core.events import EventRecorder
from executor.core.messages import Reconfiguration
from executor.recovery.checkpoint_file import LayerTensors
from executor.recovery.layer_messages import LayerMessages
from executor.training.real_compute import Compute
from executor.transport.receive import RecvHandle
from executor.transport.transport import Transport
from executor.transport.wire_format import move_tag
from planner.adapt.migration import LayerTransfer
from planner.events.event import MIGRATE_ACTION, Event, EventKind


@dataclass(eq=False)
class LayerMoves:
    """Sends and receives the state of layers on one rank, before the first step of a plan that moves layers."""

    _device: str
    _change: Reconfiguration
    _transport: Transport
    _compute: Compute
    _messages: LayerMessages
    _rows: EventRecorder
    _awaited: list[tuple[LayerTransfer, RecvHandle]] = field(default_factory=list)

    def expect(self) -> None:
        """Post the receives of the state that this rank needs."""
        for number, move in self._own(lambda move: move.target):
            tag, size_bytes = move_tag(self._change.step, number), self._messages.size_bytes(move)
            self._awaited.append((move, self._transport.post(move.source, tag, size_bytes)))

    def send(self, state_of: Callable[[LayerTransfer], torch.Tensor]) -> None:
        """Queue the state for other ranks without waiting; ``state_of`` returns a copy of it as a flat uint8 tensor."""
        start_s = self._compute.free_s()
        for number, move in self._own(lambda move: move.source):
            state = state_of(move)
            departed = self._rows.sending(self._change.step, self._row(move, state), start_s)
            self._transport.send(move.target, move_tag(self._change.step, number), state, start_s, departed)

    def take(self) -> dict[int, LayerTensors]:
        """Wait for the state of this rank's new layers, and load it; `Compute.set_plan` must have added the layers.

        Returns:
            The outer state of these layers, if they have one; by layer.
        """
        outer: dict[int, LayerTensors] = {}
        for move, handle in self._awaited:
            outer |= self._messages.load(move, handle.wait())
            self._rows.log(self._arrival(move, handle))
            self._compute.wait_until(handle.arrived_s)
        self._awaited.clear()
        return outer

    def _own(self, end: Callable[[LayerTransfer], str]) -> Iterator[tuple[int, LayerTransfer]]:
        moves = self._change.to.moves or ()
        return ((number, move) for number, move in enumerate(moves) if end(move) == self._device)

    def _row(self, move: LayerTransfer, state: torch.Tensor) -> Callable[[float, float], Event]:
        place = (move.source, move.target, -1, -1, -1, self._change.step, MIGRATE_ACTION)
        size_bytes = state.numel()
        return lambda start_s, end_s: Event(EventKind.MIGRATE, *place, start_s, end_s, size_bytes)

    def _arrival(self, move: LayerTransfer, handle: RecvHandle) -> Event:
        """Return a row of zero length, which tells the arrival for the row of the sender."""
        place = (move.target, move.source, -1, -1, -1, self._change.step, MIGRATE_ACTION)
        return Event(EventKind.RECEIVE, *place, handle.arrived_s, handle.arrived_s, handle.size_bytes)
