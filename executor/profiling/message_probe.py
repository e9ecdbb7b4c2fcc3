"""How long messages take between ranks of two hosts: one of the two processes that find out.

They are sent and awaited as a rank does it. The sender computes before and after: its messages are handed to a thread
that has to come in between, on a core that has other work. The receiver waits: others cost no time.

Started as ``python -m executor.profiling.message_probe PARENT_PID RANK OWN_ADDRESS STORE_ADDRESS STORE_PORT``. Rank 0
measures. It holds the store, prints the port of it (any, where STORE_PORT is 0), reads a `ProbeConfig` as JSON from
its input, and prints a `MessageTimes`.
"""

import json
import os
import struct
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from executor.core.clock import RunClock
from executor.core.control_channel import listen
from executor.core.failures import first_line
from executor.core.subprocesses import die_with_parent
from executor.transport.receive import RecvHandle
from executor.transport.transport import Connection, Message
from traces.common.errors import RopebridgeError
from traces.probe.interval import ROUNDS

# For the two to meet; who has started them waits for messages no longer than it likes.
CONNECT_S = 60.0

# What a message may be whose sender is another host.
MOST_BYTES = 1 << 28
MOST_MESSAGES = 10_000

_READY, _PAYLOAD, _TRIGGER, _ANSWER = range(1, 5)
_READING = struct.Struct("d")

# Of them the quickest tells how far the clocks are apart.
_CLOCK_TRIPS = 8

# How long the sender computes before, and the side of the matrices that it multiplies: some tens of microseconds each.
_COMPUTED_S = 0.001
_COMPUTED = 128
_ORDERS = "orders"
_OTHER = "the other end"


@dataclass(frozen=True, slots=True)
class ProbeConfig:
    """What is measured.

    Attributes:
        sizes_bytes: Of messages, rising.
        repeats: Of each size in each round.
    """

    sizes_bytes: tuple[int, ...]
    repeats: tuple[int, ...]

    @property
    def of_sizes(self) -> list[tuple[int, int]]:
        """Each size with its repeats."""
        return list(zip(self.sizes_bytes, self.repeats, strict=True))


@dataclass(frozen=True, slots=True)
class MessageTimes:
    """Seconds from the sending of a message until it is there; each in the order in which it was taken.

    Attributes:
        posted_s: Of each size, where the receive had been posted before.
        late_s: Of the smallest size, where the receiver posted its receive when the message could have been there.
    """

    posted_s: tuple[tuple[float, ...], ...]
    late_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _RoundTrip:
    """Readings of clocks, seconds: when this process sends and has the answer, and between them the other's."""

    start_s: float
    there_s: float
    end_s: float

    @property
    def offset_s(self) -> float:
        """How far the other clock is ahead, if both ways take equally long."""
        return self.there_s - (self.start_s + self.end_s) / 2


def _open_store(address: tuple[str, int], patience: timedelta) -> TCPStore:
    """Return a new store that this process holds, reached at an address and nowhere else; port 0 is any."""
    # Left to itself the store would listen on every interface of the machine.
    with listen(address) as listening:
        host, port, *_ = listening.getsockname()
        descriptor = listening.detach()
    return TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=patience, master_listen_fd=descriptor)


class _Direct(Connection):
    """A connection of a process group that is none of torch's: those choose their interface by themselves."""

    def __init__(self, other: int, group: ProcessGroupGloo, clock: RunClock) -> None:
        self._direct = group
        # It is this class alone that asks it for anything.
        super().__init__(_OTHER, other, cast(dist.ProcessGroup, group), clock, None, _give_up)

    def _start(self, message: Message) -> dist.Work:
        sent: dist.Work = self._direct.send([message.payload], self._rank, message.tag)  # type: ignore[attr-defined]
        return sent


class _Ends:
    """The connections of both processes; every message is one of bytes."""

    def __init__(self, store: TCPStore, rank: int, address: str) -> None:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=CONNECT_S)
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        self._group = ProcessGroupGloo(store, rank, 2, options)
        self._other = 1 - rank
        self._clock = RunClock(0.0)
        self._connection = _Direct(self._other, self._group, self._clock)
        self._threads = ThreadPoolExecutor(1)

    def send(self, payload: torch.Tensor, tag: int) -> threading.Event:
        """Hand a message over; return what is set when gloo has sent it."""
        sent = threading.Event()
        self._connection.send(Message(payload, tag, 0.0, lambda _: sent.set()))
        return sent

    def post(self, size_bytes: int, tag: int) -> RecvHandle:
        buffer = torch.empty(size_bytes, dtype=torch.uint8)
        posted = self._group.recv([buffer], self._other, tag)  # type: ignore[attr-defined]
        return RecvHandle(buffer, [posted], _OTHER, self._clock)

    def watch(self, receipt: RecvHandle) -> None:
        """Have another thread wait for it."""
        receipt.watch(self._threads, _give_up)

    def close(self) -> None:
        self._threads.shutdown()
        self._connection.close()


def _give_up(error: Exception) -> None:
    """End this process from a thread that could not go on."""
    print(json.dumps({"failed": first_line(error)}), flush=True)
    os._exit(1)


def _ask(ends: _Ends, orders: ProbeConfig) -> MessageTimes:
    """Send and time everything; `_serve` is the other end."""
    posted_s = [_ask_often(ends, size_bytes, repeats, late=False) for size_bytes, repeats in orders.of_sizes]
    return MessageTimes(tuple(posted_s), _ask_often(ends, *orders.of_sizes[0], late=True))


def _serve(ends: _Ends, orders: ProbeConfig) -> None:
    for size_bytes, repeats in orders.of_sizes:
        _serve_often(ends, size_bytes, repeats, late=False)
    _serve_often(ends, *orders.of_sizes[0], late=True)


def _ask_often(ends: _Ends, size_bytes: int, repeats: int, *, late: bool) -> tuple[float, ...]:
    """The times of messages of one size, seconds."""
    # Clocks drift apart, by milliseconds in some minutes.
    quick = [_ask_once(ends, 1, late=False, computes=False) for _ in range(_CLOCK_TRIPS)]
    offset_s = min(quick, key=lambda trip: trip.end_s - trip.start_s).offset_s
    trips = [_ask_once(ends, size_bytes, late=late, computes=True) for _ in range(1 + ROUNDS * repeats)]
    # The first opens windows.
    return tuple(trip.there_s - offset_s - trip.start_s for trip in trips[1:])


def _serve_often(ends: _Ends, size_bytes: int, repeats: int, *, late: bool) -> None:
    for _ in range(_CLOCK_TRIPS):
        _serve_once(ends, 1, late=False)
    for _ in range(1 + ROUNDS * repeats):
        _serve_once(ends, size_bytes, late=late)


def _ask_once(ends: _Ends, size_bytes: int, *, late: bool, computes: bool) -> _RoundTrip:
    payload = torch.randint(0, 256, (size_bytes,), dtype=torch.uint8)
    answer = ends.post(_READING.size, _ANSWER)
    # Follows the notice of the receive that is posted ahead, on the same connection.
    ends.post(1, _READY).wait()
    if computes:
        ends.watch(answer)
        begin_s = time.monotonic() + _COMPUTED_S
        _compute_until(lambda: time.monotonic() >= begin_s)
    start_s = time.monotonic()
    trigger = ends.send(torch.zeros(1, dtype=torch.uint8), _TRIGGER) if late else None
    sent = ends.send(payload, _PAYLOAD)
    if computes:
        _compute_until(lambda: answer.settled)
    (there_s,) = _READING.unpack(bytes(answer.wait().tolist()))
    end_s = time.monotonic()
    for handed_over in (trigger, sent):
        if handed_over is not None:
            handed_over.wait()
    return _RoundTrip(start_s, there_s, end_s)


def _compute_until(over: Callable[[], bool]) -> None:
    numbers = torch.ones(_COMPUTED, _COMPUTED)
    while not over():
        numbers @ numbers


def _serve_once(ends: _Ends, size_bytes: int, *, late: bool) -> None:
    nothing = torch.zeros(1, dtype=torch.uint8)
    expected = ends.post(1, _TRIGGER) if late else ends.post(size_bytes, _PAYLOAD)
    ends.send(nothing, _READY).wait()
    expected.wait()
    if late:
        ends.post(size_bytes, _PAYLOAD).wait()
    reading = bytearray(_READING.pack(time.monotonic()))
    ends.send(torch.frombuffer(reading, dtype=torch.uint8), _ANSWER).wait()


def _orders(text: str | bytes) -> ProbeConfig:
    """Read orders that may come from another host."""
    read = json.loads(text)
    sizes, repeats = tuple(read["sizes_bytes"]), tuple(read["repeats"])
    numbers = all(type(each) is int and each > 0 for each in (*sizes, *repeats))
    most = numbers and len(sizes) == len(repeats) and sizes and max(sizes) <= MOST_BYTES
    if not most or ROUNDS * sum(repeats) > MOST_MESSAGES:
        raise ValueError("orders that are too large, or make no sense")
    return ProbeConfig(sizes, repeats)


def main(parent: str, rank: str, address: str, store_address: str, store_port: str) -> None:
    """Measure, or answer who does."""
    die_with_parent(int(parent))
    torch.set_num_threads(1)
    asks, patience = rank == "0", timedelta(seconds=CONNECT_S)
    try:
        if asks:
            store = _open_store((store_address, int(store_port)), patience)
            print(json.dumps({"port": store.port}), flush=True)
            orders = _orders(sys.stdin.readline())
            store.set(_ORDERS, json.dumps(asdict(orders)))
            with closing(_Ends(store, 0, address)) as ends:
                times = _ask(ends, orders)
            print(json.dumps({"times": asdict(times)}), flush=True)
        else:
            store = TCPStore(store_address, int(store_port), 2, is_master=False, timeout=patience)
            orders = _orders(store.get(_ORDERS))
            with closing(_Ends(store, 1, address)) as ends:
                _serve(ends, orders)
            print(json.dumps({"served": True}), flush=True)
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, RopebridgeError) as error:
        print(json.dumps({"failed": first_line(error)}), flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
