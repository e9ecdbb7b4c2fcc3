"""Receives that are posted ahead of time: all of a step, and the next updates from other pipelines."""

import struct
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from executor.core.failures import PeerLostError
from executor.core.step_program import StepProgram, Transfer
from executor.runtime.action_order import ActionOrder
from executor.transport.receive import RecvHandle
from executor.transport.transport import Transport
from executor.transport.wire_format import sync_tag, transfer_tag
from planner.cost.synchronisation import UpdateEdge
from planner.scenario.training import FLOAT32_BYTES

# Header of an update: the number of the receiver's steps whose updates the sender had applied when it began the first
# step of the update.
HEADER = struct.Struct("q")

# Number of receives posted ahead: while one update arrives, gloo's notice of the next receive travels to the sender.
_POSTED_UPDATES = 2


class PostedStep:
    """All receives of one step, posted at once before the step begins.

    Attributes:
        order: The order of the step's actions, which is informed of arrivals.
        transfers: The receive of each transfer.
        exchanges: The receives of gradient sums, by `GradientSync.key` and round.
    """

    def __init__(self, current: StepProgram, order: ActionOrder, transport: Transport) -> None:
        self.order = order
        self.transfers: dict[Transfer, RecvHandle] = {}
        self.exchanges: dict[tuple[int, int], RecvHandle] = {}
        step, program = current.step, current.program
        for work in program.work:
            for transfer in work.receives:
                tag = transfer_tag(step, transfer)
                self.transfers[transfer] = transport.post(
                    transfer.source, tag, transfer.size_bytes, order.arrival(work)
                )
        for sync in program.synchronisations:
            for exchange in sync.exchanges(program.device):
                if exchange.receive_from is not None:
                    key = (sync.key, exchange.round)
                    size_bytes = exchange.receive_elements * FLOAT32_BYTES
                    source = sync.devices[exchange.receive_from]
                    self.exchanges[key] = transport.post(source, sync_tag(step, *key), size_bytes)


@dataclass(frozen=True, slots=True)
class Update:
    """Gradients or parameters that another pipeline has sent.

    Attributes:
        edge: The sender, the receiver and the layers.
        exchange: Number of the exchange between the pipelines, from 0.
        known: The number in the `HEADER`.
        values: A one-dimensional float32 tensor of the layers' gradients or parameters.
    """

    edge: UpdateEdge
    exchange: int
    known: int
    values: torch.Tensor
    arrived_s: float


@dataclass(eq=False)
class IncomingUpdates:
    """The updates from one rank of another pipeline, received in order by background threads.

    The threads that receive also post the next receives, so that a fast sender need not wait for a slow receiver.
    Methods raise `PeerLostError` if the sender is lost.

    Args:
        edge: The sender, the receiver (this rank) and the layers.
        post_round: Posts the receive of an update by its number; calls the given function on arrival.
    """

    edge: UpdateEdge
    _post_round: Callable[[int, Callable[[RecvHandle], None]], RecvHandle]

    def __post_init__(self) -> None:
        self._expected = 0
        self._next = 0
        self._posted: deque[RecvHandle] = deque()
        self._ready: deque[RecvHandle] = deque()
        self._arrived_s: list[float] = []
        self._taken = 0
        self._lost: PeerLostError | None = None
        self._changed = threading.Condition()

    def expect(self, count: int) -> None:
        """Post the receives of the first ``count`` updates, which are certain to come, `_POSTED_UPDATES` at a time."""
        with self._changed:
            self._expected = max(self._expected, count)
            self._post()

    @property
    def arrived(self) -> int:
        """Number of updates that have arrived."""
        return len(self._arrived_s)

    def wait_for(self, count: int) -> float:
        """Wait for the first ``count`` updates; return the run second at which the last of them arrived."""
        with self._changed:
            while self.arrived < count:
                if self._lost is not None:
                    raise self._lost
                self._changed.wait()
            return self._arrived_s[count - 1] if count else float("-inf")

    def take(self, stop: int | None) -> list[Update]:
        """Remove and return the arrived updates with numbers below ``stop``, or all of them if it is None."""
        updates = []
        with self._changed:
            while self._ready and (stop is None or self._taken < stop):
                handle = self._ready.popleft()
                payload = handle.wait()
                (known,) = HEADER.unpack(payload[: HEADER.size].numpy().tobytes())
                values = payload[HEADER.size :].clone().view(torch.float32)
                updates.append(Update(self.edge, self._taken, known, values, handle.arrived_s))
                self._taken += 1
        return updates

    def _post(self) -> None:
        while self._next < self._expected and len(self._posted) < _POSTED_UPDATES:
            self._posted.append(self._post_round(self._next, self._on_arrival))
            self._next += 1

    def _on_arrival(self, _: RecvHandle) -> None:
        """Accept updates in the order of their numbers, in which the receiving threads need not wake up."""
        with self._changed:
            try:
                while self._posted and self._posted[0].is_complete:
                    handle = self._posted.popleft()
                    self._ready.append(handle)
                    self._arrived_s.append(handle.arrived_s)
                    self._post()
            except PeerLostError as error:
                self._lost = error
            self._changed.notify_all()
