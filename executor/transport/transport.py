"""Sends and receives bytes between ranks, by gloo or NCCL: receives are posted ahead, and sends never block."""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import pairwise
from weakref import WeakSet

import torch
import torch.distributed as dist

from executor.core.clock import RunClock
from executor.core.failures import PeerLostError, blaming
from executor.transport.connection import Connection, Message
from executor.transport.device_pairs import NOTICE_BYTES, DevicePair
from executor.transport.link_shaper import LinkShaper
from executor.transport.receive import RecvHandle
from executor.transport.rendezvous import ProcessGroups, form_pair
from executor.transport.timed_path import STUB_BYTES, Emulation, TimedPath, stub
from executor.transport.wire_format import NO_MESSAGE, is_of_training
from planner.check.paths import nccl_boundaries
from planner.cost.network import nominal_path, own_link
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario

# The smallest stripe: a part of a message that is sent over a connection of its own.
LEAST_STRIPE_BYTES = 64 * 1024

# The largest number of threads, each of which waits for one posted receive; the pool starts only those it needs.
_MOST_WAITING = 1 << 14

_AT_ONCE = timedelta(milliseconds=1)


def stripes(size_bytes: int, connections: int) -> list[tuple[int, int]]:
    """Return the range of bytes (start, stop) of each stripe of a message: at most one stripe per connection.

    Sender and receiver know the size of the message, and so compute the same stripes.
    """
    count = max(1, min(connections, size_bytes // LEAST_STRIPE_BYTES))
    return list(pairwise(size_bytes * stripe // count for stripe in range(count + 1)))


@dataclass(eq=False)
class Transport:
    """The connections of one rank to all others.

    In a paced run, messages of training over links of `own_link` are timed by the declared link, and carry nothing.

    Args:
        ranks: The rank in the session of each device, by name.
        groups: Parallel connections between every two ranks, over which messages between regions are striped.
        shaper: Emulates the links; None leaves the network as it is.
        is_paced: Whether the content of messages of training does not matter.
        records_arrivals: Whether a background thread waits for every message, to record its time of arrival.
        failed: Called with an error that ends a sending or receiving thread, in that thread.
        gpu: The CUDA device on which this rank computes, if it does.
        uses_nccl: Whether messages between stages go through NCCL where `planner.cost.device_transport` says so;
            otherwise all go through gloo.
    """

    _device: str
    _ranks: Mapping[str, int]
    _scenario: Scenario
    _groups: ProcessGroups
    _clock: RunClock
    _shaper: LinkShaper | None
    _is_paced: bool
    _records_arrivals: bool
    _failed: Callable[[Exception], None]
    _gpu: torch.device | None = None
    _uses_nccl: bool = False

    def __post_init__(self) -> None:
        self._pairs: dict[str, DevicePair] = {}
        self._formed = set[frozenset[int]]()
        self._occupied = threading.Lock()
        self._connections: dict[tuple[str, int, bool], Connection] = {}
        self._connecting = threading.Lock()
        self._waiting = ThreadPoolExecutor(_MOST_WAITING, "receive")
        self._posted: WeakSet[RecvHandle] = WeakSet()
        self._posting = threading.Lock()
        self._beginning, self._is_abandoned = threading.Lock(), False

    def connect_devices(self, plan: Plan) -> None:
        """Form the pairs of devices between which NCCL carries the messages of a plan; all ranks call this together."""
        pairs = nccl_boundaries(plan, self._scenario) if self._uses_nccl else []
        ends = {frozenset(self._ranks[device] for device in pair) for pair in pairs}
        names = {rank: device for device, rank in self._ranks.items()}
        own = self._ranks[self._device]
        # In the same order on all ranks: of any two ranks, both form the same pair first.
        for one, other in sorted(tuple(sorted(pair)) for pair in ends - self._formed):
            self._formed.add(frozenset((one, other)))
            if (group := form_pair(one, other)) is not None:
                assert self._gpu is not None, "NCCL is for devices of CUDA, which this rank has found"
                peer = other if own == one else one
                common = (group, self._groups[0], self._occupied, self._gpu, self._clock, self._failed)
                self._pairs[names[peer]] = DevicePair(names[peer], own, peer, *common)

    def post(
        self,
        source: str,
        tag: int,
        size_bytes: int,
        arrived: Callable[[RecvHandle], None] | None = None,
        *,
        between_stages: bool = False,
    ) -> RecvHandle:
        """Post a receive, before which gloo sends no bytes of the message; return its handle.

        Args:
            source: Name of the sending device.
            tag: As of the `Message`.
            size_bytes: Size of the message.
            arrived: Called with the handle on arrival, in another thread.
            between_stages: Whether the message is one between stages, which may come through NCCL, and otherwise comes
                into page-locked memory, from which a GPU copies it.
        """
        if between_stages and source in self._pairs:
            return self._post_notice(source, tag, size_bytes, arrived)
        carried_bytes = min(size_bytes, STUB_BYTES) if self._is_timed(source, self._device, tag) else size_bytes
        buffer = torch.empty(carried_bytes, dtype=torch.uint8, pin_memory=between_stages and self._gpu is not None)
        stripes = enumerate(self._stripes(source, carried_bytes))
        works = [self._receive(buffer[start:stop], source, tag, index) for index, (start, stop) in stripes]
        handle = RecvHandle(buffer, size_bytes, works, source, self._clock, arrived)
        with self._posting:
            self._posted.add(handle)
        if self._records_arrivals or arrived is not None:
            handle.wait_in_background(self._waiting, self._failed)
        return handle

    def _post_notice(
        self, source: str, tag: int, size_bytes: int, arrived: Callable[[RecvHandle], None] | None
    ) -> RecvHandle:
        """Post the receive of the notice of a message that NCCL carries; a thread then takes the message at once."""
        notice = torch.empty(NOTICE_BYTES, dtype=torch.uint8)
        work = self._receive(notice, source, tag, 0)
        fetch = partial(self._pairs[source].receive, tag, size_bytes)
        handle = RecvHandle(notice, size_bytes, [work], source, self._clock, arrived, fetch)
        handle.wait_in_background(self._waiting, self._failed)
        return handle

    def _receive(self, buffer: torch.Tensor, source: str, tag: int, index: int) -> dist.Work:
        """Begin to receive into a buffer through one of the groups; raise `PeerLostError` after `abandon`."""
        with self._beginning, blaming(source):
            if self._is_abandoned:
                # A thread that has received a message posts the next one. The groups do not exist any more.
                raise PeerLostError(f"lost the connection to device '{source}': it was closed")
            work = dist.irecv(buffer, self._ranks[source], group=self._groups[index], tag=tag)
        assert work is not None
        return work

    def send(
        self,
        target: str,
        tag: int,
        payload: torch.Tensor,
        ready_s: float,
        departed: Callable[[float], None] = lambda departed_s: None,
        *,
        flows: int = 1,
    ) -> None:
        """Queue a payload for sending; the arguments are those of a `Message`. NCCL carries payloads on a GPU."""
        if payload.is_cuda:
            self._pairs[target].send(tag, payload, departed)
            return
        if self._is_timed(self._device, target, tag):
            message = Message(stub(payload), tag, ready_s, departed, payload.numel(), flows)
            self._connection(target, 0, is_timed=True).send(message)
            return
        ranges = self._stripes(target, payload.numel())
        stripe_departed = _when_all_have(len(ranges), departed)
        for index, (start, stop) in enumerate(ranges):
            message = Message(payload[start:stop].contiguous(), tag, ready_s, stripe_departed)
            self._connection(target, index).send(message)

    def close(self) -> None:
        """Wait until everything has been sent, and close all connections."""
        for connection in self._connections.values():
            connection.close()
        for pair in self._pairs.values():
            pair.close()
        self._waiting.shutdown()

    def abort(self) -> None:
        """Close all connections, so that every wait for a message on them, at either end, raises an error.

        gloo closes a connection only when a receive times out of whose message nothing has arrived. This does not end
        receives of messages of which a part has arrived, so their handles are aborted.
        """
        for peer in self._ranks.values():
            for index in range(self._groups.count) if peer != self._ranks[self._device] else ():
                with suppress(RuntimeError):
                    nothing = torch.empty(1, dtype=torch.uint8)
                    work = dist.irecv(nothing, peer, group=self._groups[index], tag=NO_MESSAGE)
                    assert work is not None
                    work.wait(_AT_ONCE)
        with self._posting:
            pending = list(self._posted)
        for handle in pending:
            handle.abort()
        with self._connecting:
            connections = list(self._connections.values())
        for connection in connections:
            connection.abandon()

    def abandon(self) -> None:
        """End all threads after `abort`; threads that wait for the rest of a message end at their timeout."""
        with self._beginning:
            self._is_abandoned = True
        for connection in self._connections.values():
            connection.close()
        for pair in self._pairs.values():
            pair.close(wait=False)
        self._waiting.shutdown(wait=False)

    def _is_timed(self, source: str, target: str, tag: int) -> bool:
        return self._is_paced and is_of_training(tag) and own_link(self._scenario, source, target) is not None

    def _stripes(self, peer: str, size_bytes: int) -> list[tuple[int, int]]:
        apart = self._scenario.cluster.crosses_regions(self._device, peer)
        return stripes(size_bytes, self._groups.count if apart else 1)

    def _connection(self, target: str, index: int, *, is_timed: bool = False) -> Connection:
        key = (target, index, is_timed)
        # The thread that sums gradients sends too.
        with self._connecting:
            if key not in self._connections:
                rank, group = self._ranks[target], self._groups[index]
                emulation = self._emulation(target, is_timed=is_timed)
                self._connections[key] = Connection(
                    target, self._clock, self._failed, rank, group, _emulation=emulation
                )
            return self._connections[key]

    def _emulation(self, target: str, *, is_timed: bool) -> Emulation | None:
        if is_timed:
            latency_s = sum(link.latency_s for link in self._scenario.cluster.path(self._device, target))
            return TimedPath(nominal_path(self._scenario, self._device, target), latency_s, self._clock)
        return None if self._shaper is None else self._shaper.between(self._device, target)


def _when_all_have(count: int, departed: Callable[[float], None]) -> Callable[[float], None]:
    """Return a callback for ``count`` stripes, which calls ``departed`` with the time of the last departure."""
    lock, times_s = threading.Lock(), list[float]()

    def stripe_departed(departed_s: float) -> None:
        with lock:
            times_s.append(departed_s)
            complete = len(times_s) == count
        if complete:
            departed(max(times_s))

    return stripe_departed
