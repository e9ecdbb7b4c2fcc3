"""One of the two processes that measure how long messages between ranks of two hosts take.

Messages are sent and awaited as ranks do it. The sender computes before and during a send: the thread that sends must
get a core that has other work. The receiver only waits.

Started as ``python -m executor.profiling.message_probe PARENT_PID RANK OWN_ADDRESS STORE_ADDRESS STORE_PORT``. Rank 0
measures. It holds the store, prints its port (any, if STORE_PORT is 0), reads the sizes of messages from
its input, a JSON list of pairs of bytes and repeats in each round, and prints a `MessageTimes`.
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
from traces.statistics import ROUNDS

# How long the two processes wait for each other; their parents bound the wait for messages.
CONNECT_S = 60.0

# Limits on sizes and repeats, which may come from another host.
MOST_BYTES = 1 << 28
MOST_MESSAGES = 10_000

_READY, _PAYLOAD, _TRIGGER, _ANSWER = range(1, 5)
_READING = struct.Struct("d")

# Round trips to compare the clocks, of which the fastest counts.
_CLOCK_TRIPS = 8

# How long the sender computes before a send, and the side of the matrices that it multiplies in some ten microseconds.
_COMPUTE_S = 0.001
_MATRIX_SIDE = 128

# Key of the sizes in the store.
_SIZES = "sizes"
_OTHER = "the other end"

# Bytes of a message, and how many are sent in each round.
Sizes = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class MessageTimes:
    """Times from sending a message until it has arrived, in the order of the messages.

    Attributes:
        posted_s: Times of the messages of each size, whose receives were posted before, seconds.
        late_s: Times of messages of the smallest size whose receives were posted when they could have arrived, seconds.
    """

    posted_s: tuple[tuple[float, ...], ...]
    late_s: tuple[float, ...]


# Clock readings in seconds: here at the send, at the other end, and here at the answer.
_RoundTrip = tuple[float, float, float]


def _open_store(address: tuple[str, int], timeout: timedelta) -> TCPStore:
    """Return a new store of this process at an address, where port 0 is any port."""
    # By default the store would listen on every interface of the machine.
    with listen(address) as listening:
        host, port, *_ = listening.getsockname()
        descriptor = listening.detach()
    return TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=descriptor)


class _DirectConnection(Connection):
    """A connection over a process group that torch does not know, since its own groups choose their interface."""

    def __init__(self, other: int, group: ProcessGroupGloo, clock: RunClock) -> None:
        self._direct = group
        # Only this class uses the group.
        super().__init__(_OTHER, other, cast(dist.ProcessGroup, group), clock, _give_up)

    def _start(self, message: Message) -> dist.Work:
        sent: dist.Work = self._direct.send([message.payload], self._rank, message.tag)  # type: ignore[attr-defined]
        return sent


class _Channel:
    """The connection between the two processes, as one of them sees it; messages are uint8."""

    def __init__(self, store: TCPStore, rank: int, address: str) -> None:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=CONNECT_S)
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        self._group = ProcessGroupGloo(store, rank, 2, options)
        self._other = 1 - rank
        self._clock = RunClock(0.0)
        self._connection = _DirectConnection(self._other, self._group, self._clock)
        self._threads = ThreadPoolExecutor(1)

    def send(self, payload: torch.Tensor, tag: int) -> threading.Event:
        """Queue a message; return an event that is set when gloo has sent it."""
        sent = threading.Event()
        self._connection.send(Message(payload, tag, 0.0, lambda _: sent.set()))
        return sent

    def post(self, size_bytes: int, tag: int) -> RecvHandle:
        buffer = torch.empty(size_bytes, dtype=torch.uint8)
        posted = self._group.recv([buffer], self._other, tag)  # type: ignore[attr-defined]
        return RecvHandle(buffer, [posted], _OTHER, self._clock)

    def wait_in_background(self, handle: RecvHandle) -> None:
        handle.wait_in_background(self._threads, _give_up)

    def close(self) -> None:
        self._threads.shutdown()
        self._connection.close()


def _give_up(error: Exception) -> None:
    """End this process from a thread that could not go on."""
    print(json.dumps({"failed": first_line(error)}), flush=True)
    os._exit(1)


def _measure(channel: _Channel, sizes: Sizes) -> MessageTimes:
    """Send and time all messages; `_serve` is the other end."""
    posted_s = [_measure_size(channel, *size, late=False) for size in sizes]
    return MessageTimes(tuple(posted_s), _measure_size(channel, *sizes[0], late=True))


def _serve(channel: _Channel, sizes: Sizes) -> None:
    for size in sizes:
        _serve_size(channel, *size, late=False)
    _serve_size(channel, *sizes[0], late=True)


def _measure_size(channel: _Channel, size_bytes: int, repeats: int, *, late: bool) -> tuple[float, ...]:
    # For each size anew: clocks drift apart by milliseconds in some minutes.
    quick = [_measure_once(channel, 1, late=False, computes=False) for _ in range(_CLOCK_TRIPS)]
    start_s, there_s, end_s = min(quick, key=lambda trip: trip[2] - trip[0])
    # How far the other clock is ahead, if both directions take equally long.
    offset_s = there_s - (start_s + end_s) / 2
    trips = [_measure_once(channel, size_bytes, late=late, computes=True) for _ in range(1 + ROUNDS * repeats)]
    # The first message opens TCP's window.
    return tuple(there_s - offset_s - start_s for start_s, there_s, _ in trips[1:])


def _serve_size(channel: _Channel, size_bytes: int, repeats: int, *, late: bool) -> None:
    for _ in range(_CLOCK_TRIPS):
        _serve_once(channel, 1, late=False)
    for _ in range(1 + ROUNDS * repeats):
        _serve_once(channel, size_bytes, late=late)


def _measure_once(channel: _Channel, size_bytes: int, *, late: bool, computes: bool) -> _RoundTrip:
    payload = torch.randint(0, 256, (size_bytes,), dtype=torch.uint8)
    answer = channel.post(_READING.size, _ANSWER)
    # On the same connection it follows the notice of the receive that the other end has posted.
    channel.post(1, _READY).wait()
    if computes:
        channel.wait_in_background(answer)
        begin_s = time.monotonic() + _COMPUTE_S
        _compute_until(lambda: time.monotonic() >= begin_s)
    start_s = time.monotonic()
    sent = [channel.send(torch.zeros(1, dtype=torch.uint8), _TRIGGER)] if late else []
    sent.append(channel.send(payload, _PAYLOAD))
    if computes:
        _compute_until(lambda: answer.is_complete)
    (there_s,) = _READING.unpack(bytes(answer.wait().tolist()))
    end_s = time.monotonic()
    for each in sent:
        each.wait()
    return start_s, there_s, end_s


def _compute_until(is_over: Callable[[], bool]) -> None:
    numbers = torch.ones(_MATRIX_SIDE, _MATRIX_SIDE)
    while not is_over():
        numbers @ numbers


def _serve_once(channel: _Channel, size_bytes: int, *, late: bool) -> None:
    expected = channel.post(1, _TRIGGER) if late else channel.post(size_bytes, _PAYLOAD)
    channel.send(torch.zeros(1, dtype=torch.uint8), _READY).wait()
    expected.wait()
    if late:
        channel.post(size_bytes, _PAYLOAD).wait()
    reading = bytearray(_READING.pack(time.monotonic()))
    channel.send(torch.frombuffer(reading, dtype=torch.uint8), _ANSWER).wait()


def _read_sizes(text: str | bytes) -> Sizes:
    """Return sizes and repeats, which may come from another host, if they are within the limits."""
    sizes = [(size_bytes, repeats) for size_bytes, repeats in json.loads(text)]
    allowed = sizes and all(type(each) is int and each > 0 for size in sizes for each in size)
    if not allowed or max(sizes)[0] > MOST_BYTES or ROUNDS * sum(repeats for _, repeats in sizes) > MOST_MESSAGES:
        raise ValueError("the sizes or repeats of messages are too large or invalid")
    return sizes


def main(parent: str, rank: str, address: str, store_address: str, store_port: str) -> None:
    """Measure as rank 0, or serve the process that does."""
    die_with_parent(int(parent))
    torch.set_num_threads(1)
    timeout = timedelta(seconds=CONNECT_S)
    try:
        if rank == "0":
            store = _open_store((store_address, int(store_port)), timeout)
            print(json.dumps({"port": store.port}), flush=True)
            sizes = _read_sizes(sys.stdin.readline())
            store.set(_SIZES, json.dumps(sizes))
            with closing(_Channel(store, 0, address)) as channel:
                times = _measure(channel, sizes)
            print(json.dumps({"times": asdict(times)}), flush=True)
        else:
            store = TCPStore(store_address, int(store_port), 2, is_master=False, timeout=timeout)
            sizes = _read_sizes(store.get(_SIZES))
            with closing(_Channel(store, 1, address)) as channel:
                _serve(channel, sizes)
            print(json.dumps({"served": True}), flush=True)
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, RopebridgeError) as error:
        print(json.dumps({"failed": first_line(error)}), flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
