"""A posted receive: a handle on bytes that may not have arrived yet."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from executor.core.clock import RunClock
from executor.core.failures import PeerLostError, blaming
from executor.core.timeouts import timeouts

# The longest wait for a message: long, since a link may be down for minutes.
RECV_TIMEOUT = timedelta(seconds=timeouts().recv_s)


@dataclass(eq=False)
class RecvHandle:
    """A posted receive: a handle on bytes that may not have arrived yet.

    gloo reports an arrival only to a thread that waits for it. If the time of the arrival matters before any thread
    needs the bytes, a background thread waits for them.

    Args:
        buffer: A one-dimensional uint8 tensor for the bytes.
        size_bytes: Bytes that the message has on the links: those of the buffer, unless this is for a stub.
        works: The receives of the message's stripes, each on a connection of its own.
        source: Name of the sending device.
        arrived: Called once with the handle when it is complete, also if the sender is lost.
        fetch: Returns the message whose notice has come in the buffer, if that is how it is sent.

    Attributes:
        arrived_s: Run second at which the bytes arrived or the sender was found to be lost; infinite before.
    """

    _buffer: torch.Tensor
    size_bytes: int
    _works: Sequence[dist.Work]
    _source: str
    _clock: RunClock
    _arrived: "Callable[[RecvHandle], None] | None" = None
    _fetch: Callable[[], torch.Tensor] | None = None

    def __post_init__(self) -> None:
        self._in_background = False
        self._completed = threading.Event()
        self._completing = threading.Lock()
        self._lost: PeerLostError | None = None
        self.arrived_s = float("inf")

    @property
    def is_complete(self) -> bool:
        """Whether the bytes have arrived, or the sender is lost, as far as this process knows."""
        return self._completed.is_set()

    @property
    def lost(self) -> bool:
        """Whether the sender is known to be lost."""
        return self._lost is not None

    def wait_in_background(self, threads: Executor, failed: Callable[[Exception], None]) -> None:
        """Have a thread wait for the bytes; it calls ``failed`` with any error except the loss of the sender."""

        def report(waiting: Future[None]) -> None:
            error = waiting.exception()
            if isinstance(error, Exception):
                failed(error)

        self._in_background = True
        threads.submit(self._receive).add_done_callback(report)

    def wait(self) -> torch.Tensor:
        """Wait for the bytes; return them as a one-dimensional uint8 tensor, or raise `PeerLostError`."""
        if self._in_background:
            self._completed.wait()
        elif not self.is_complete:
            self._receive()
        if self._lost is not None:
            raise self._lost
        return self._buffer

    def abort(self) -> None:
        """Complete the handle as lost unless its bytes have arrived; call this after the connection was closed.

        gloo ends the wait for a message itself if nothing of the message has arrived, but not if a part has arrived.
        """
        self._complete(PeerLostError(f"lost the connection to device '{self._source}': it was closed"))

    def _receive(self) -> None:
        lost = None
        try:
            with blaming(self._source):
                for work in self._works:
                    work.wait(RECV_TIMEOUT)
                if self._fetch is not None:
                    self._buffer = self._fetch()
        except PeerLostError as error:
            lost = error
        self._complete(lost)

    def _complete(self, lost: PeerLostError | None) -> None:
        with self._completing:
            if self._completed.is_set():
                return
            self._lost = lost
            self.arrived_s = self._clock.now_s()
            self._completed.set()
        if self._arrived is not None:
            self._arrived(self)
