"""A connection to one other rank: messages leave in order; shaped, they arrive when the emulated link says so."""

import queue
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
from executor.transport.link_shaper import LinkShaper
from planner.scenario.cluster import Link

# A link may be out for minutes; whoever waits longer than this for a peer gives up.
RECV_TIMEOUT = timedelta(seconds=timeouts().recv_s)


@dataclass(frozen=True, slots=True)
class Message:
    """Bytes for the peer.

    Attributes:
        payload: One-dimensional uint8 tensor; never changed once it is handed over, since over emulated links it still
            lies here when it counts as departed.
        tag: Which receive of the peer it is for.
        ready_s: When it could depart, run seconds.
        departed: Called with the run seconds at which the last byte departed: when the emulated links have taken it,
            which is before it goes to the peer; without them when gloo has sent it.
    """

    payload: torch.Tensor
    tag: int
    ready_s: float
    departed: Callable[[float], None]


@dataclass(frozen=True, slots=True)
class EmulatedPath:
    """The emulated links to the peer."""

    shaper: LinkShaper
    path: tuple[Link, ...]


class Connection:
    """Sends to one device from threads of its own, so that compute never waits for the network.

    On the network as it is several sends are under way at once: gloo holds each back until the peer has posted its
    receive, and those that come after it need not wait for that. Over emulated links messages are handed to gloo one by
    one, when they would have arrived: one that the peer does not expect yet holds back those behind it, not their times
    on the links.

    Args:
        device: The peer.
        rank: Its rank.
        group: Of the process groups that stand for connections, the one to use.
        clock: Of the run.
        emulated: Links that this process emulates itself; None leaves the network as it is.
        failed: Called from a thread that could not go on.
    """

    def __init__(
        self,
        device: str,
        rank: int,
        group: dist.ProcessGroup,
        clock: RunClock,
        emulated: EmulatedPath | None,
        failed: Callable[[Exception], None],
    ) -> None:
        self._device = device
        self._rank = rank
        self._group = group
        self._clock = clock
        self._failed = failed
        self._outbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._in_the_air: queue.SimpleQueue[tuple[float, Message] | None] = queue.SimpleQueue()
        self._handed_over: queue.SimpleQueue[tuple[dist.Work, Message] | None] = queue.SimpleQueue()
        loops = [self._hand_over, self._complete]
        if emulated is not None:
            loops = [lambda: self._emulate(emulated), self._deliver]
        self._threads = [threading.Thread(target=self._guarded, args=(loop,), daemon=True) for loop in loops]
        for thread in self._threads:
            thread.start()

    def send(self, message: Message) -> None:
        """Hand a message over; returns at once."""
        self._outbox.put(message)

    def close(self) -> None:
        """Wait until everything handed over has been sent, and end the threads."""
        self._outbox.put(None)
        for thread in self._threads:
            thread.join()

    def _hand_over(self) -> None:
        try:
            while (message := self._outbox.get()) is not None:
                with blaming(self._device):
                    self._handed_over.put((self._start(message), message))
        finally:
            # Also where a message could not go: the other thread must not wait for ever.
            self._handed_over.put(None)

    def _complete(self) -> None:
        while (sent := self._handed_over.get()) is not None:
            work, message = sent
            with blaming(self._device):
                work.wait(RECV_TIMEOUT)
            message.departed(self._clock.now_s())

    def _emulate(self, emulated: EmulatedPath) -> None:
        try:
            while (message := self._outbox.get()) is not None:
                departed_s = emulated.shaper.transmit(emulated.path, 8 * message.payload.numel(), message.ready_s)
                self._in_the_air.put((emulated.shaper.delivery_s(emulated.path, departed_s), message))
                message.departed(departed_s)
        finally:
            self._in_the_air.put(None)

    def _deliver(self) -> None:
        while (flight := self._in_the_air.get()) is not None:
            delivery_s, message = flight
            self._clock.sleep_until(delivery_s)
            with blaming(self._device):
                self._start(message).wait(RECV_TIMEOUT)

    def _start(self, message: Message) -> dist.Work:
        work = dist.isend(message.payload, self._rank, group=self._group, tag=message.tag)
        assert work is not None
        return work

    def _guarded(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except Exception as error:
            self._failed(error)


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
