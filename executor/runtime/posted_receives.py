"""The receives of one step: all of them posted at once, before the step begins."""

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
from planner.cost.synchronisation import GradientSync, UpdateEdge


class PostedStep:
    """A step whose receives are posted.

    Args:
        current: The step.
        order: Who may want to hear of arrivals.
        transport: Takes the receives.
        element_bytes: Of one number of a gradient.
    """

    def __init__(self, current: StepProgram, order: ActionOrder, transport: Transport, element_bytes: int) -> None:
        self.order = order
        self._transfers: dict[Transfer, RecvHandle] = {}
        self._exchanges: dict[tuple[int, int], RecvHandle] = {}
        step, program = current.step, current.program
        for work in program.work:
            for transfer in work.receives:
                tag = transfer_tag(step, transfer)
                self._transfers[transfer] = transport.post(
                    transfer.source, tag, transfer.size_bytes, order.arrival(work)
                )
        for sync in program.synchronisations:
            for exchange in sync.exchanges(program.device):
                if exchange.receive_from is not None:
                    key = (sync.first_layer, exchange.round)
                    size_bytes = exchange.receive_elements * element_bytes
                    source = sync.devices[exchange.receive_from]
                    self._exchanges[key] = transport.post(source, sync_tag(step, *key), size_bytes)

    def transfer(self, transfer: Transfer) -> RecvHandle:
        """Return the receipt of a transfer, which is then forgotten."""
        return self._transfers.pop(transfer)

    def exchange(self, sync: GradientSync, number: int) -> RecvHandle:
        """Return the receipt of a round of a sum of gradients, which is then forgotten."""
        return self._exchanges.pop((sync.first_layer, number))


# Before the numbers: of how many of the receiver's steps the sender knew when it began the first step it sums.
HEADER = struct.Struct("q")

# Receives posted ahead: one that is arriving, and one whose ready notice is under way meanwhile.
_POSTED = 2


@dataclass(frozen=True, slots=True)
class Update:
    """Gradients or parameters of another pipeline.

    Attributes:
        edge: Who sent what.
        exchange: Number of the round, from 0.
        known: Steps of the receiver that the sender knew of.
        row: The numbers: float32, one-dimensional.
        arrived_s: Run seconds.
    """

    edge: UpdateEdge
    exchange: int
    known: int
    row: torch.Tensor
    arrived_s: float


class IncomingUpdates:
    """One edge that ends at this rank.

    Receives are posted anew by the threads in which bytes arrive: a quick sender need not wait for a slow receiver.

    Args:
        edge: Who sends what.
        exchanges: How many rounds there are.
        post: Posts the receive of a round, and tells of its arrival.
    """

    def __init__(
        self, edge: UpdateEdge, exchanges: int, post: Callable[[int, Callable[[RecvHandle], None]], RecvHandle]
    ) -> None:
        self.edge = edge
        self._exchanges = exchanges
        self._post_round = post
        self._next = 0
        self._posted: deque[RecvHandle] = deque()
        self._there: deque[RecvHandle] = deque()
        self._arrived_s: list[float] = []
        self._taken = 0
        self._lost: PeerLostError | None = None
        self._changed = threading.Condition()
        with self._changed:
            self._post()

    @property
    def arrived(self) -> int:
        """Updates that have arrived so far."""
        return len(self._arrived_s)

    def wait_for(self, exchanges: int) -> float:
        """Wait until the first so many updates have arrived; return when the last of them did, run seconds.

        Raises:
            PeerLostError: The sender is gone.
        """
        with self._changed:
            while self.arrived < exchanges:
                if self._lost is not None:
                    raise self._lost
                self._changed.wait()
            return self._arrived_s[exchanges - 1] if exchanges else float("-inf")

    def wait_for_all(self) -> None:
        """Wait until nothing is to come any more."""
        self.wait_for(self._exchanges)

    def take(self, end: int | None) -> list[Update]:
        """Return what has arrived and was not taken before, of the rounds before ``end`` if that is given.

        Raises:
            PeerLostError: The sender is gone.
        """
        updates = []
        with self._changed:
            while self._there and (end is None or self._taken < end):
                updates.append(self._update(self._there.popleft()))
                self._taken += 1
        return updates

    def _update(self, receipt: RecvHandle) -> Update:
        payload = receipt.wait()
        (known,) = HEADER.unpack(payload[: HEADER.size].numpy().tobytes())
        row = payload[HEADER.size :].clone().view(torch.float32)
        return Update(self.edge, self._taken, known, row, receipt.arrived_s)

    def _post(self) -> None:
        while self._next < self._exchanges and len(self._posted) < _POSTED:
            self._posted.append(self._post_round(self._next, self._note))
            self._next += 1

    def _note(self, _: RecvHandle) -> None:
        """Several threads wait for bytes, and need not wake up in the order in which these came."""
        with self._changed:
            try:
                while self._posted and self._posted[0].settled:
                    receipt = self._posted.popleft()
                    self._there.append(receipt)
                    self._arrived_s.append(receipt.arrived_s)
                    self._post()
            except PeerLostError as error:
                self._lost = error
            self._changed.notify_all()
