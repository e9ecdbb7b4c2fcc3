"""A receive that was posted ahead: a handle on bytes that may not have arrived yet."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from datetime import timedelta

import torch
import torch.distributed as dist

from executor.core.clock import RunClock
from executor.core.failures import PeerLostError, blaming
from executor.core.timeouts import timeouts

# A link may be out for minutes; whoever waits longer than this for a peer gives up.
RECV_TIMEOUT = timedelta(seconds=timeouts().recv_s)


class RecvHandle:
    """Bytes that will arrive.

    gloo says that something has arrived only to who waits for it. Where it matters when bytes arrive that nobody is
    waiting for yet, a thread of its own `settle`s the receipt.

    Args:
        buffer: Where they go: uint8, one-dimensional.
        works: The receives of its stripes, each on a connection of its own.
        source: Who sends them.
        clock: Of the run.
        arrived: Called once with the receipt when it is settled, also if the sender is gone.
    """

    def __init__(
        self,
        buffer: torch.Tensor,
        works: Sequence[dist.Work],
        source: str,
        clock: RunClock,
        arrived: "Callable[[RecvHandle], None] | None" = None,
    ) -> None:
        self._buffer = buffer
        self._works = works
        self._source = source
        self._clock = clock
        self._arrived = arrived
        self._watched = False
        self._settled = threading.Event()
        self._concluding = threading.Lock()
        self._lost: PeerLostError | None = None
        self.arrived_s = float("inf")

    @property
    def settled(self) -> bool:
        """Whether it is known that the bytes are there; never before `wait` unless a thread settles it."""
        return self._settled.is_set()

    @property
    def lost(self) -> bool:
        """Whether it is known that the sender is gone."""
        return self._lost is not None

    @property
    def size_bytes(self) -> int:
        """Bytes to receive."""
        return self._buffer.numel()

    def watch(self, threads: Executor, failed: Callable[[Exception], None]) -> None:
        """Have a thread settle the receipt; ``failed`` is told there of anything but the loss of the sender.

        Nobody else would hear of that, and who waits for the bytes, or for what follows from them, would for ever.
        """

        def look(settling: Future[None]) -> None:
            error = settling.exception()
            if isinstance(error, Exception):
                failed(error)

        self._watched = True
        threads.submit(self._settle).add_done_callback(look)

    def wait(self) -> torch.Tensor:
        """Return the bytes once they are there: uint8, one-dimensional.

        Raises:
            PeerLostError: The sender is gone.
        """
        if self._watched:
            self._settled.wait()
        elif not self.settled:
            self._settle()
        if self._lost is not None:
            raise self._lost
        return self._buffer

    def lose(self) -> None:
        """Give up what has not arrived; its connection is closed.

        gloo ends the wait for a message that has not begun to arrive, but not for one that was cut off in the middle.
        """
        self._conclude(PeerLostError(f"lost {self._source}: the connection was closed"))

    def _settle(self) -> None:
        lost = None
        try:
            with blaming(self._source):
                for work in self._works:
                    work.wait(RECV_TIMEOUT)
        except PeerLostError as error:
            lost = error
        self._conclude(lost)

    def _conclude(self, lost: PeerLostError | None) -> None:
        with self._concluding:
            if self._settled.is_set():
                return
            self._lost = lost
            self.arrived_s = self._clock.now_s()
            self._settled.set()
        if self._arrived is not None:
            self._arrived(self)
