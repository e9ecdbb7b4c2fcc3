"""The congestion window of a TCP sender."""

import math
from collections import deque
from collections.abc import Callable

# Number of parts of a window that are acknowledged one by one, since acknowledgements arrive while a window is sent.
_PARTS = 16

# Halvings after which every window has its initial size.
_MOST_HALVINGS = 64


def _at_once(joined_s: float) -> float:
    return joined_s


class SendWindow:
    """The congestion window of a TCP sender: the sum over all parallel connections of one direction.

    At most a window of bytes is unacknowledged. An acknowledgement leaves when a byte arrives, and waits behind the
    bytes of the other direction. In slow start each acknowledged byte increases the window by one byte (RFC 5681), as
    long as the sender fills the window. While the sender is idle, the window halves at every retransmission timeout
    (RFC 2861, as Linux implements it).

    Args:
        initial_bytes: Initial window, bytes.
        most_bytes: Largest window, given by the size of the connections' buffers, bytes.
        round_trip_s: Latency there and back, seconds.
        timeout_s: Smallest retransmission timeout, excluding the round trip, seconds.
        back_s: Part of ``round_trip_s`` on the way back, seconds.
        leaves_s: Returns when an acknowledgement leaves the queue of the way back that joined it at a time, seconds.
    """

    def __init__(
        self,
        initial_bytes: float,
        most_bytes: float,
        round_trip_s: float,
        timeout_s: float,
        back_s: float = 0.0,
        leaves_s: Callable[[float], float] = _at_once,
    ) -> None:
        self._back_s = back_s
        self._there_s = round_trip_s - back_s
        self._leaves_s = leaves_s
        self._initial_bytes = initial_bytes
        self._most_bytes = most_bytes
        self._round_trip_s = round_trip_s
        self._timeout_s = timeout_s + round_trip_s
        self._window_bytes = initial_bytes
        self._idle_since_s = 0.0
        # For each part: time of its arrival in seconds, size in bytes.
        self._unacknowledged: deque[tuple[float, float]] = deque()
        self._in_flight_bytes = 0.0
        # Bytes of the latest message that have not left, and most bytes in flight since it began, with those that wait
        # before the path.
        self._left_bytes = self._most_in_flight_bytes = 0.0

    @property
    def size_bytes(self) -> float:
        """Size of the window, bytes."""
        return min(self._window_bytes, self._most_bytes)

    def is_open(self, now_s: float) -> bool:
        """Return whether at ``now_s`` the window has its largest size, so that only the buffers limit the sender."""
        self._acknowledge(now_s)
        return self._window_bytes >= self._most_bytes

    def begin(self, now_s: float, size_bytes: float) -> None:
        """Take on a message of ``size_bytes``, not before the previous message has left."""
        if size_bytes and self._round_trip_s:
            self._halve_if_idle(now_s)
            self._acknowledge(now_s)
        self._left_bytes, self._most_in_flight_bytes = float(size_bytes), 0.0

    def waiting_s(self, now_s: float, size_bytes: float, rate_bps: float) -> float:
        """Send the next bytes of the message; return the delay that the window adds to their transmission, seconds.

        Args:
            now_s: Earliest start, not before the previous bytes have left, seconds.
            size_bytes: Number of bytes, no more than are left of the message.
            rate_bps: Payload rate of the path, bits per second.
        """
        if not size_bytes or not self._round_trip_s or not rate_bps:
            return 0.0
        clock_s, part_left_bytes = now_s, float(size_bytes)
        while part_left_bytes > 0:
            self._acknowledge(clock_s)
            open_bytes = self.size_bytes
            self._most_in_flight_bytes = max(
                self._most_in_flight_bytes, min(open_bytes, self._in_flight_bytes + self._left_bytes)
            )
            part_bytes = min(part_left_bytes, open_bytes / _PARTS)
            # Rounding must not delay a part.
            if open_bytes - self._in_flight_bytes < part_bytes * (1 - 1e-9) and self._unacknowledged:
                clock_s = max(clock_s, self._acknowledged_s())
                continue
            part_s = 8 * part_bytes / rate_bps
            clock_s += part_s
            # Bytes arrive one by one; the part counts as arrived halfway through its bytes.
            self._in_flight_bytes += part_bytes
            self._unacknowledged.append((clock_s - part_s / 2 + self._there_s, part_bytes))
            part_left_bytes -= part_bytes
            self._left_bytes -= part_bytes
        self._idle_since_s = clock_s
        return max(0.0, clock_s - now_s - 8 * size_bytes / rate_bps)

    def sent(self, now_s: float) -> None:
        """Note that bytes left at ``now_s`` for which the window was large enough."""
        self._idle_since_s = max(self._idle_since_s, now_s)

    def _acknowledged_s(self) -> float:
        """Return when the earliest unacknowledged part is acknowledged, seconds."""
        return self._leaves_s(self._unacknowledged[0][0]) + self._back_s

    def _acknowledge(self, now_s: float) -> None:
        while self._unacknowledged and self._acknowledged_s() <= now_s:
            _, part_bytes = self._unacknowledged.popleft()
            # Linux grows a window to at most twice the bytes in flight.
            grown_bytes = min(self._window_bytes + part_bytes, 2 * self._most_in_flight_bytes)
            self._window_bytes = max(self._window_bytes, grown_bytes)
            self._in_flight_bytes -= part_bytes
        if not self._unacknowledged:
            self._in_flight_bytes = 0.0

    def _halve_if_idle(self, now_s: float) -> None:
        idle_s = now_s - self._idle_since_s
        if idle_s < self._timeout_s:
            return
        # By now all earlier bytes have been acknowledged, and have increased the window.
        self._acknowledge(now_s)
        halvings = math.floor(min(idle_s / self._timeout_s, _MOST_HALVINGS))
        self._window_bytes = max(self._initial_bytes, self._window_bytes / 2**halvings)
