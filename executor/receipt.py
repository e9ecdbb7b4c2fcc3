"""A receive that was posted, and what stands of it."""

import threading
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from executor.clock import RunClock
from executor.peers import PeerLostError, blaming


class Receipt:
    """Bytes that will arrive.

    A thread of its own waits for them, since gloo says that something has arrived only to who waits for it.

    Args:
        buffer: Where they go: uint8, one-dimensional.
        works: The receives of its stripes, each on a connection of its own.
        source: Who sends them.
        arrived: Called once with the receipt, in the thread that waited; also if the sender is gone.
    """

    def __init__(
        self,
        buffer: torch.Tensor,
        works: Sequence[dist.Work],
        source: str,
        arrived: "Callable[[Receipt], None] | None" = None,
    ) -> None:
        self._buffer = buffer
        self._works = works
        self._source = source
        self._arrived = arrived
        self._settled = threading.Event()
        self._lost: PeerLostError | None = None
        self.arrived_s = float("inf")

    @property
    def settled(self) -> bool:
        """Whether `wait` would not wait."""
        return self._settled.is_set()

    @property
    def size_bytes(self) -> int:
        """Bytes to receive."""
        return self._buffer.numel()

    def settle(self, clock: RunClock) -> None:
        """Wait for the bytes, and tell who waits for this; called once, in a thread."""
        try:
            with blaming(self._source):
                for work in self._works:
                    work.wait()
        except PeerLostError as error:
            self._lost = error
        self.arrived_s = clock.now_s()
        self._settled.set()
        if self._arrived is not None:
            self._arrived(self)

    def wait(self) -> torch.Tensor:
        """Return the bytes once they are there: uint8, one-dimensional.

        Raises:
            PeerLostError: The sender is gone.
        """
        self._settled.wait()
        if self._lost is not None:
            raise self._lost
        return self._buffer
