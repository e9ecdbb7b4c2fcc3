"""Moves bytes between ranks: receives are posted ahead, sends never block, every message has its tag."""

import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from weakref import WeakSet

import torch
import torch.distributed as dist

from executor.core.clock import RunClock
from executor.core.failures import blaming
from executor.transport.link_shaper import LinkShaper
from executor.transport.receive import RECV_TIMEOUT, RecvHandle
from executor.transport.rendezvous import ProcessGroups
from executor.transport.wire_format import NO_MESSAGE
from planner.scenario.cluster import Cluster, Link


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


# A smaller message is not worth a second round of headers.
LEAST_STRIPE_BYTES = 64 * 1024


def stripes(size_bytes: int, connections: int) -> list[tuple[int, int]]:
    """Return the (first, end) bytes that each connection carries, at most one stripe each.

    Both ends know the size, and come to the same answer.
    """
    count = max(1, min(connections, size_bytes // LEAST_STRIPE_BYTES))
    bounds = [size_bytes * part // count for part in range(count + 1)]
    return list(pairwise(bounds))


# Threads that wait for receives, one for each that is posted; there are as many as that asks for.
_MOST_WAITING = 1 << 14

_AT_ONCE = timedelta(milliseconds=1)


def _nobody_asks(departed_s: float) -> None:
    """What is no part of a step has no row."""


class Transport:
    """One rank's connections.

    Args:
        device: This rank's device.
        ranks: Device to rank.
        cluster: Says what crosses regions, and what an emulated link does.
        groups: The connections between every two ranks, over which messages between regions are spread.
        clock: Of the run.
        shaper: Emulates the links; None leaves the network as it is.
        watches: Whether it matters when every message arrives, not only those that somebody waits for.
        failed: Called from a sending or a receiving thread that could not go on.
    """

    def __init__(
        self,
        device: str,
        ranks: Mapping[str, int],
        cluster: Cluster,
        groups: ProcessGroups,
        clock: RunClock,
        shaper: LinkShaper | None,
        watches: bool,
        failed: Callable[[Exception], None],
    ) -> None:
        self._device = device
        self._ranks = ranks
        self._cluster = cluster
        self._groups = groups
        self._clock = clock
        self._shaper = shaper
        self._watches = watches
        self._failed = failed
        self._connections: dict[tuple[str, int], Connection] = {}
        self._connecting = threading.Lock()
        self._waiting = ThreadPoolExecutor(_MOST_WAITING, "receive")
        self._posted: WeakSet[RecvHandle] = WeakSet()
        self._posting = threading.Lock()

    def post(
        self, source: str, tag: int, size_bytes: int, arrived: Callable[[RecvHandle], None] | None = None
    ) -> RecvHandle:
        """Post a receive: gloo moves nothing before the receiver has said that it is ready.

        ``arrived`` is told of the arrival at once, in another thread.
        """
        buffer = torch.empty(size_bytes, dtype=torch.uint8)
        works = []
        with blaming(source):
            for index, (first, end) in enumerate(self._stripes(source, size_bytes)):
                work = dist.irecv(buffer[first:end], self._ranks[source], group=self._groups[index], tag=tag)
                assert work is not None
                works.append(work)
        receipt = RecvHandle(buffer, works, source, self._clock, arrived)
        with self._posting:
            self._posted.add(receipt)
        if self._watches or arrived is not None:
            receipt.watch(self._waiting, self._failed)
        return receipt

    def send(
        self,
        target: str,
        tag: int,
        payload: torch.Tensor,
        ready_s: float,
        departed: Callable[[float], None] = _nobody_asks,
    ) -> None:
        """Hand over ``payload`` (uint8, one-dimensional), which was ready at run second ``ready_s``.

        ``departed`` is told the run second at which its last byte has departed.
        """
        parts = self._stripes(target, payload.numel())
        told = _when_all_have(len(parts), departed)
        for index, (first, end) in enumerate(parts):
            self._connection(target, index).send(Message(payload[first:end], tag, ready_s, told))

    def close(self) -> None:
        """Wait until everything has been sent, and end all connections."""
        for connection in self._connections.values():
            connection.close()
        self._waiting.shutdown()

    def abort(self) -> None:
        """Close all connections: who waits for something on one of them, here or at its other end, hears of it.

        A wait that is over before anything came is the one way to make gloo close a connection. It does not tell who
        waits for a message that was cut off in the middle.
        """
        for peer in self._ranks.values():
            for index in range(self._groups.count) if peer != self._ranks[self._device] else ():
                with suppress(RuntimeError):
                    nothing = torch.empty(1, dtype=torch.uint8)
                    work = dist.irecv(nothing, peer, group=self._groups[index], tag=NO_MESSAGE)
                    assert work is not None
                    work.wait(_AT_ONCE)
        with self._posting:
            cut_off = list(self._posted)
        for receipt in cut_off:
            receipt.lose()

    def abandon(self) -> None:
        """End all threads, after `abort`; those of messages that were cut off end when their patience does."""
        for connection in self._connections.values():
            connection.close()
        self._waiting.shutdown(wait=False)

    def _stripes(self, peer: str, size_bytes: int) -> list[tuple[int, int]]:
        apart = self._cluster.crosses_regions(self._device, peer)
        return stripes(size_bytes, self._groups.count if apart else 1)

    def _connection(self, target: str, index: int) -> Connection:
        key = (target, index)
        # Sums of gradients may be sent from another thread.
        with self._connecting:
            if key not in self._connections:
                emulated = None
                if self._shaper is not None:
                    emulated = EmulatedPath(self._shaper, self._cluster.path(self._device, target))
                self._connections[key] = Connection(
                    target, self._ranks[target], self._groups[index], self._clock, emulated, self._failed
                )
            return self._connections[key]


def _when_all_have(parts: int, departed: Callable[[float], None]) -> Callable[[float], None]:
    """What each stripe's departure is told to: the last one's is the message's."""
    if parts == 1:
        return departed
    lock, times_s = threading.Lock(), list[float]()

    def told(departed_s: float) -> None:
        with lock:
            times_s.append(departed_s)
            complete = len(times_s) == parts
        if complete:
            departed(max(times_s))

    return told
