"""The congestion window of a TCP sender whose acknowledgements wait for nothing, in closed form."""

import math
from collections import deque

from planner.step.shared_links.flow_state import MOST_HALVINGS, PARTS, ROUNDING, SETTLED_PARTS


def halved_bytes(window_bytes: float, initial_bytes: float, idle_s: float, timeout_s: float) -> float:
    """Return the window of a sender that has been idle: halved at every retransmission timeout (RFC 2861), bytes."""
    if idle_s < timeout_s:
        return window_bytes
    halvings = math.floor(min(idle_s / timeout_s, MOST_HALVINGS))
    return max(initial_bytes, math.ldexp(window_bytes, -halvings))


def grown_bytes(window_bytes: float, acknowledged_bytes: float, most_in_flight_bytes: float) -> float:
    """Return the window after an acknowledgement: each byte adds one, up to twice the bytes in flight, as in Linux."""
    return max(window_bytes, min(window_bytes + acknowledged_bytes, 2 * most_in_flight_bytes))


class SendWindow:
    """The congestion window of a TCP sender: the sum over all parallel connections of one direction.

    At most a window of bytes is unacknowledged; bytes are acknowledged one round trip after they left. In slow start
    each acknowledged byte increases the window by one byte (RFC 5681), as long as the sender fills the window. While
    the sender is idle, the window halves at every retransmission timeout (RFC 2861, as Linux implements it).

    Args:
        initial_bytes: Initial window, bytes.
        most_bytes: Largest window, given by the size of the connections' buffers, bytes.
        timeout_s: Smallest retransmission timeout, excluding the round trip, seconds.
    """

    def __init__(self, initial_bytes: float, most_bytes: float, timeout_s: float) -> None:
        self._initial_bytes = initial_bytes
        self._most_bytes = most_bytes
        self._timeout_s = timeout_s
        self._window_bytes = initial_bytes
        self._idle_since_s = 0.0
        # For each part: time of the acknowledgement in seconds, size in bytes.
        self._unacknowledged: deque[tuple[float, float]] = deque()
        self._in_flight_bytes = 0.0
        # Most bytes in flight since the latest message began, with those that wait before the path.
        self._most_in_flight_bytes = 0.0

    @property
    def size_bytes(self) -> float:
        """Size of the window, bytes."""
        return min(self._window_bytes, self._most_bytes)

    def waiting_s(self, now_s: float, size_bytes: float, rate_bps: float, round_trip_s: float) -> float:
        """Send a message; return the delay that the window adds to the transmission time on the path, seconds.

        Args:
            now_s: Earliest start of the message, not before the start of the previous message, seconds.
            size_bytes: Size of the message, bytes.
            rate_bps: Payload rate of the path, bits per second.
            round_trip_s: Latency there and back, seconds.
        """
        if not size_bytes or not round_trip_s or not rate_bps:
            return 0.0
        self._acknowledge(now_s)
        idle_s = now_s - self._idle_since_s
        self._window_bytes = halved_bytes(
            self._window_bytes, self._initial_bytes, idle_s, self._timeout_s + round_trip_s
        )
        clock_s, left_bytes, self._most_in_flight_bytes = now_s, float(size_bytes), 0.0
        equal_parts = 0
        while left_bytes > 0:
            self._acknowledge(clock_s)
            open_bytes = self.size_bytes
            if equal_parts >= SETTLED_PARTS and left_bytes >= open_bytes:
                windows = left_bytes // open_bytes
                window_s = 8 * open_bytes / rate_bps
                clock_s += self._skip(windows, max(window_s, round_trip_s + window_s / PARTS / 2))
                left_bytes -= windows * open_bytes
                continue
            self._most_in_flight_bytes = max(
                self._most_in_flight_bytes, min(open_bytes, self._in_flight_bytes + left_bytes)
            )
            part_bytes = min(left_bytes, open_bytes / PARTS)
            if open_bytes - self._in_flight_bytes < part_bytes * (1 - ROUNDING) and self._unacknowledged:
                clock_s = max(clock_s, self._unacknowledged[0][0])
                continue
            part_s = 8 * part_bytes / rate_bps
            clock_s += part_s
            # Bytes are acknowledged one by one; the part counts as acknowledged halfway through its bytes.
            self._in_flight_bytes += part_bytes
            self._unacknowledged.append((clock_s - part_s / 2 + round_trip_s, part_bytes))
            left_bytes -= part_bytes
            equal_parts = equal_parts + 1 if part_bytes == self._most_bytes / PARTS else 0
        self._idle_since_s = clock_s
        return max(0.0, clock_s - now_s - 8 * size_bytes / rate_bps)

    def _skip(self, windows: float, each_s: float) -> float:
        """Send whole windows, each of which takes as long as the last one; return the time that they take, seconds."""
        later_s = windows * each_s
        self._unacknowledged = deque((acknowledged_s + later_s, size) for acknowledged_s, size in self._unacknowledged)
        self._window_bytes = grown_bytes(self._window_bytes, windows * self._most_bytes, self._most_in_flight_bytes)
        return later_s

    def _acknowledge(self, now_s: float) -> None:
        while self._unacknowledged and self._unacknowledged[0][0] <= now_s:
            _, part_bytes = self._unacknowledged.popleft()
            self._window_bytes = grown_bytes(self._window_bytes, part_bytes, self._most_in_flight_bytes)
            self._in_flight_bytes -= part_bytes
        if not self._unacknowledged:
            self._in_flight_bytes = 0.0
