"""Bursts: bytes sent as fast as TCP allows over several connections at once, and timed where they arrive."""

import os
import selectors
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from traces.common.errors import InputError
from traces.probe.arrivals import Arrivals

# Limits on a burst, since a responder serves every host that can reach it.
MOST_BYTES = 20_000_000_000
MOST_SECONDS = 60.0
MOST_CONNECTIONS = 32

Direction = Literal["there", "back"]


@dataclass(frozen=True, slots=True)
class BurstRequest:
    """A burst that a peer asks for.

    Attributes:
        direction: ``there`` from the peer to the responder, ``back`` the other way.
        size_bytes: Largest size over all connections, bytes.
        seconds: Longest duration from the first byte on, seconds.

    Raises:
        InputError: A value is not positive, or is larger than a responder allows.
    """

    direction: Direction
    size_bytes: int
    seconds: float
    connections: int

    def __post_init__(self) -> None:
        if self.direction not in ("there", "back"):
            raise InputError(f"direction {self.direction!r} is unknown", valid="give 'there' or 'back'")
        for name, value, most in (
            ("bytes", self.size_bytes, MOST_BYTES),
            ("seconds", self.seconds, MOST_SECONDS),
            ("connections", self.connections, MOST_CONNECTIONS),
        ):
            if not 0 < value <= most:
                raise InputError(
                    f"a burst of {value:g} {name} is not allowed", valid=f"give more than 0 and at most {most:g} {name}"
                )

    def as_message(self) -> dict[str, Any]:
        """Return the message that asks for the burst."""
        return {
            "do": "burst",
            "direction": self.direction,
            "bytes": self.size_bytes,
            "seconds": self.seconds,
            "connections": self.connections,
        }


def parse_request(message: dict[str, Any]) -> BurstRequest:
    """Return the burst that a message from another host asks for.

    Raises:
        InputError: A value is missing or of another type, or is larger than a responder allows.
    """
    size_bytes, seconds, connections = (message.get(key) for key in ("bytes", "seconds", "connections"))
    whole = type(size_bytes) is int and type(connections) is int
    if not whole or type(seconds) not in (int, float):
        raise InputError("a burst lacks its number of bytes, seconds or connections", valid="give all three")
    return BurstRequest(message.get("direction"), size_bytes, float(seconds), connections)  # type: ignore[arg-type]


# Offsets in struct tcp_info (linux/tcp.h, since Linux 5.4) of the sender's segment size, the congestion window in
# segments, and the window that the receiver offers.
_NUMBER = struct.Struct("=I")
_SEGMENT, _CONGESTION, _OFFERED = 16, 80, 228

# A send buffer limits a connection whose congestion window is at least this share of the buffer. Linux lets a buffer
# grow to twice the segments of the window, bookkeeping included; until then the window is below a third of the buffer.
_LIMITED_SHARE = 0.5


def full_window_bytes(connections: Sequence[socket.socket]) -> float | None:
    """Return the smallest buffer or receive window that limits connections, bytes.

    Returns None if congestion control, and so the path, limits one of the connections, or if the system does not report
    these sizes.
    """
    found = [_full_window_bytes(connection) for connection in connections]
    full = [each for each in found if each is not None]
    return min(full) if full and len(full) == len(found) else None


def _full_window_bytes(connection: socket.socket) -> float | None:
    option = getattr(socket, "TCP_INFO", None)
    if option is None:
        return None
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, option, _OFFERED + _NUMBER.size)
        buffer_bytes = connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    except OSError:
        return None
    if len(info) < _OFFERED + _NUMBER.size:
        return None
    segment_bytes, segments, offered_bytes = (
        _NUMBER.unpack_from(info, at)[0] for at in (_SEGMENT, _CONGESTION, _OFFERED)
    )
    most_bytes = segment_bytes * segments
    if offered_bytes and most_bytes >= offered_bytes:
        return float(min(offered_bytes, buffer_bytes))
    return float(buffer_bytes) if most_bytes >= _LIMITED_SHARE * buffer_bytes else None


_CHUNK_BYTES = 1 << 18
_BUFFER_BYTES = 1 << 20

# Initial interval between recorded arrivals, seconds. When there are more than `_MOST_NOTES` arrivals, every other one
# is dropped and the interval doubles.
_RESOLUTION_S = 1e-4
_MOST_NOTES = 4000

# Seconds that a sender waits, after the duration of a burst, for the receiver to end the burst.
_GRACE_S = 3.0

# SO_LINGER, on with a timeout of 0: close at once, and drop what is unsent or unread.
_LINGER_NONE = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True)
class SentBurst:
    """Result of a burst at its sender.

    Attributes:
        size_bytes: Bytes given to TCP.
        window_bytes: Buffer or window that limited the burst, bytes; None if the path did, or if that is unknown.
    """

    size_bytes: int
    window_bytes: float | None


def send_burst(connections: Sequence[socket.socket], request: BurstRequest) -> SentBurst:
    """Send a burst until all its bytes are sent, its time is over, or the receiver closes the connections.

    The bytes are random, so that nothing on the path can compress them.
    """
    noise = memoryview(os.urandom(_CHUNK_BYTES))
    left = request.size_bytes
    # Normally the receiver ends the burst: only the receiver knows when the first byte arrived.
    deadline_s = time.monotonic() + request.seconds + _GRACE_S
    with selectors.DefaultSelector() as selector, suppress(OSError):
        for connection in connections:
            connection.setblocking(False)
            selector.register(connection, selectors.EVENT_WRITE)
        while left > 0 and time.monotonic() < deadline_s:
            for key, _ in selector.select(deadline_s - time.monotonic()):
                assert isinstance(key.fileobj, socket.socket)
                with suppress(BlockingIOError):
                    left -= key.fileobj.send(noise[: max(0, left)])
    for connection in connections:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
    return SentBurst(request.size_bytes - left, full_window_bytes(connections))


def receive_burst(connections: Sequence[socket.socket], request: BurstRequest) -> Arrivals:
    """Receive a burst until all connections are closed or its time is over, and close them."""
    start_s = time.monotonic()
    log = _ArrivalLog()
    buffer = bytearray(_BUFFER_BYTES)
    deadline_s = start_s + request.seconds
    cut_off = False
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            connection.setblocking(False)
            selector.register(connection, selectors.EVENT_READ)
        while selector.get_map() and (now_s := time.monotonic()) < deadline_s:
            for key, _ in selector.select(deadline_s - now_s):
                assert isinstance(key.fileobj, socket.socket)
                try:
                    count = key.fileobj.recv_into(buffer)
                except BlockingIOError:
                    continue
                except OSError:
                    count, cut_off = 0, True
                if not count:
                    selector.unregister(key.fileobj)
                    continue
                now_s = time.monotonic()
                if not log.total_bytes:
                    deadline_s = now_s + request.seconds
                log.note(now_s - start_s, count)
        complete = not selector.get_map() and not cut_off
    end_s = time.monotonic() - start_s
    for connection in connections:
        close_at_once(connection)
    return log.arrivals(end_s, complete)


def close_at_once(connection: socket.socket) -> None:
    """Close a connection at once, and drop what is unsent or unread."""
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NONE)
    connection.close()


class _ArrivalLog:
    """Arrivals over time, at most `_MOST_NOTES` of them."""

    def __init__(self) -> None:
        self.total_bytes = 0
        self._resolution_s = _RESOLUTION_S
        self._notes: list[tuple[float, int]] = []
        self._latest_s = 0.0

    def note(self, time_s: float, count: int) -> None:
        self.total_bytes += count
        self._latest_s = time_s
        if self._notes and time_s - self._notes[-1][0] < self._resolution_s:
            return
        self._notes.append((time_s, self.total_bytes))
        if len(self._notes) > _MOST_NOTES:
            self._notes = self._notes[::2]
            self._resolution_s *= 2

    def arrivals(self, end_s: float, complete: bool) -> Arrivals:
        if self._notes and self._notes[-1][1] < self.total_bytes:
            self._notes.append((self._latest_s, self.total_bytes))
        times_s = tuple(time_s for time_s, _ in self._notes)
        return Arrivals(times_s, tuple(total for _, total in self._notes), end_s, complete)
