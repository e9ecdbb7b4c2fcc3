"""A process on each of two hosts, which together measure how long gloo's messages between ranks take.

The two processes send and receive messages as ranks do. The sender computes before and during a send, so that its
sending thread competes for a busy core as in training; the receiver only waits.

A process is started as ``python -m executor.profiling.message_probe PARENT_PID RANK OWN_ADDRESS STORE_ADDRESS
STORE_PORT``. Rank 0 measures, and has torch's store, by which the processes connect; with STORE_PORT 0 it chooses a
free port. It prints the port, reads the sizes of messages from its standard input (a JSON list of pairs: bytes, and
repeats in each round), and prints a `MessageTimes`. Rank 1 answers rank 0's messages. All output is JSON lines.
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
from executor.transport.connection import Connection, Message
from executor.transport.receive import RecvHandle
from executor.transport.rendezvous import deaf_afterwards
from traces.common.errors import RopebridgeError
from traces.statistics import ROUNDS

# Time limit for the two processes to connect; their parent processes limit the whole measurement.
CONNECT_S = 60.0

# Limits on sizes and repeats, which may come from another host.
MOST_BYTES = 1 << 28
MOST_MESSAGES = 10_000

# Tags of messages. An answer contains the receiver's clock reading at the arrival of a payload.
_READY, _PAYLOAD, _TRIGGER, _ANSWER = range(1, 5)
_READING = struct.Struct("d")

# Number of round trips to compare the clocks of the two hosts; the fastest one is used.
_CLOCK_TRIPS = 8

# The sender computes for this time before a send: products of square matrices of this size, each some ten microseconds.
_COMPUTE_S = 0.001
_MATRIX_SIDE = 128

# Key of the sizes in the store.
_SIZES = "sizes"
_OTHER = "the other end"

# Pairs: the bytes of a message, and how many such messages are sent in each round.
Sizes = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class MessageTimes:
    """Times in seconds from the send of each message to its arrival.

    Attributes:
        posted_s: For each size, the times of messages whose receives were posted before the send.
        late_s: Times of messages of the first size whose receives were posted one latency after the send.
    """

    posted_s: tuple[tuple[float, ...], ...]
    late_s: tuple[float, ...]


# Clock readings in seconds: here at the send, at the other end on arrival, and here when the answer has arrived.
_RoundTrip = tuple[float, float, float]


def _open_store(address: tuple[str, int], timeout: timedelta) -> TCPStore:
    """Return a new store that listens at an address of this host only; port 0 chooses a free port."""
    # Given only a host name, the store would listen on every interface of the machine.
    with listen(address) as listening:
        host, port, *_ = listening.getsockname()
        descriptor = listening.detach()
    return TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=descriptor)


class _DirectConnection(Connection):
    """A connection over a process group that is not registered with torch, so that it can use a chosen address."""

    def __init__(self, other: int, group: ProcessGroupGloo, clock: RunClock) -> None:
        self._direct = group
        # Only this class uses the group.
        super().__init__(_OTHER, clock, _give_up, other, cast(dist.ProcessGroup, group))

    def _start(self, message: Message) -> dist.Work:
        sent: dist.Work = self._direct.send([message.payload], self._rank, message.tag)  # type: ignore[attr-defined]
        return sent


class _Channel:
    """One process's end of the connection between the two processes; messages are one-dimensional uint8 tensors."""

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
        return RecvHandle(buffer, size_bytes, [posted], _OTHER, self._clock)

    def wait_in_background(self, handle: RecvHandle) -> None:
        handle.wait_in_background(self._threads, _give_up)

    def close(self) -> None:
        self._threads.shutdown()
        self._connection.close()


def _give_up(error: Exception) -> None:
    """Report the error of a thread on the standard output, and end this process."""
    print(json.dumps({"failed": first_line(error)}), flush=True)
    os._exit(1)


def _measure(channel: _Channel, sizes: Sizes) -> MessageTimes:
    """Send all messages, and return their times; the other process must run `_serve`."""
    posted_s = [_measure_size(channel, *size, late=False) for size in sizes]
    return MessageTimes(tuple(posted_s), _measure_size(channel, *sizes[0], late=True))


def _serve(channel: _Channel, sizes: Sizes) -> None:
    for size in sizes:
        _serve_size(channel, *size, late=False)
    _serve_size(channel, *sizes[0], late=True)


def _measure_size(channel: _Channel, size_bytes: int, repeats: int, *, late: bool) -> tuple[float, ...]:
    # Compare the clocks before each size, since they drift apart by milliseconds in some minutes.
    quick = [_measure_once(channel, 1, late=False, computes=False) for _ in range(_CLOCK_TRIPS)]
    start_s, there_s, end_s = min(quick, key=lambda trip: trip[2] - trip[0])
    # The other clock's lead, under the assumption that both directions take equally long.
    offset_s = there_s - (start_s + end_s) / 2
    trips = [_measure_once(channel, size_bytes, late=late, computes=True) for _ in range(1 + ROUNDS * repeats)]
    # Without the first message, which opens TCP's window.
    return tuple(there_s - offset_s - start_s for start_s, there_s, _ in trips[1:])


def _serve_size(channel: _Channel, size_bytes: int, repeats: int, *, late: bool) -> None:
    for _ in range(_CLOCK_TRIPS):
        _serve_once(channel, 1, late=False)
    for _ in range(1 + ROUNDS * repeats):
        _serve_once(channel, size_bytes, late=late)


def _measure_once(channel: _Channel, size_bytes: int, *, late: bool, computes: bool) -> _RoundTrip:
    payload = torch.randint(0, 256, (size_bytes,), dtype=torch.uint8)
    answer = channel.post(_READING.size, _ANSWER)
    # This message follows, on the same connection, gloo's notice that the other process has posted its receive.
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
    """Return the sizes and repeats in a JSON text from another host; raise `ValueError` if they exceed the limits."""
    sizes = [(size_bytes, repeats) for size_bytes, repeats in json.loads(text)]
    allowed = sizes and all(type(each) is int and each > 0 for size in sizes for each in size)
    if not allowed or max(sizes)[0] > MOST_BYTES or ROUNDS * sum(repeats for _, repeats in sizes) > MOST_MESSAGES:
        raise ValueError(
            f"the sizes of messages must be pairs of whole numbers: 1 to {MOST_BYTES} bytes, and repeats, of which "
            f"{ROUNDS} rounds have at most {MOST_MESSAGES}"
        )
    return sizes


def main(parent: str, rank: str, address: str, store_address: str, store_port: str) -> None:
    """Measure as rank 0, or answer rank 0's messages as rank 1; the arguments are those of the command line."""
    die_with_parent(int(parent))
    torch.set_num_threads(1)
    timeout = timedelta(seconds=CONNECT_S)
    try:
        if rank == "0":
            with deaf_afterwards():
                store = _open_store((store_address, int(store_port)), timeout)
                print(json.dumps({"port": store.port}), flush=True)
                sizes = _read_sizes(sys.stdin.readline())
                store.set(_SIZES, json.dumps(sizes))
                channel = _Channel(store, 0, address)
            with closing(channel):
                times = _measure(channel, sizes)
            print(json.dumps({"times": asdict(times)}), flush=True)
        else:
            store = TCPStore(store_address, int(store_port), 2, is_master=False, timeout=timeout)
            sizes = _read_sizes(store.get(_SIZES))
            with deaf_afterwards():
                channel = _Channel(store, 1, address)
            with closing(channel):
                _serve(channel, sizes)
            print(json.dumps({"served": True}), flush=True)
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, RopebridgeError) as error:
        print(json.dumps({"failed": first_line(error)}), flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
