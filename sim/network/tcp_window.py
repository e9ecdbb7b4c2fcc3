"""The congestion window of a TCP sender: it opens as bytes are acknowledged, and closes while the sender is idle.

At most a window of bytes is unacknowledged; bytes are acknowledged a round trip after they left. In slow start each
acknowledged byte opens the window by another one (RFC 5681), as long as the sender makes use of it; for each
retransmission timeout of idleness the window halves (RFC 2861, as Linux does it).
"""

import math
from collections import deque

# Parts of a window that are acknowledged separately: acknowledgements come while the window is still being sent.
_PARTS = 16

# Halvings after which every window has its initial size.
_MOST_HALVINGS = 64


class SendWindow:
    """The window of all connections of one direction together.

    Args:
        initial_bytes: Initial window, bytes.
        most_bytes: Largest window, which is the size of the connections' buffers, bytes.
        round_trip_s: Latency there and back, seconds.
        timeout_s: Least retransmission timeout without the round trip, seconds.
    """

    def __init__(self, initial_bytes: float, most_bytes: float, round_trip_s: float, timeout_s: float) -> None:
        self._initial_bytes = initial_bytes
        self._most_bytes = most_bytes
        self._round_trip_s = round_trip_s
        self._timeout_s = timeout_s + round_trip_s
        self._window_bytes = initial_bytes
        self._idle_since_s = 0.0
        # When each part will be acknowledged, its bytes, and the bytes in flight when it left.
        self._unacknowledged: deque[tuple[float, float, float]] = deque()
        self._in_flight_bytes = 0.0

    def waiting_s(self, now_s: float, size_bytes: int, rate_bps: float) -> float:
        """Send a message; return how much longer that takes than its bytes alone take on the path, seconds.

        Args:
            now_s: When the message could start, seconds; times rise from message to message.
            size_bytes: Size of the message, bytes.
            rate_bps: Payload rate of the path, bits per second.
        """
        if not size_bytes or not self._round_trip_s or not rate_bps:
            return 0.0
        self._halve_if_idle(now_s)
        path_bytes = rate_bps * self._round_trip_s / 8
        clock_s, left_bytes = now_s, float(size_bytes)
        while left_bytes > 0:
            self._acknowledge(clock_s, path_bytes)
            open_bytes = min(self._window_bytes, self._most_bytes)
            part_bytes = min(left_bytes, open_bytes / _PARTS)
            # Rounding must not delay a part.
            if open_bytes - self._in_flight_bytes < part_bytes * (1 - 1e-9) and self._unacknowledged:
                clock_s = max(clock_s, self._unacknowledged[0][0])
                continue
            part_s = 8 * part_bytes / rate_bps
            clock_s += part_s
            # Bytes are acknowledged one by one: a part in the middle of the times of its bytes.
            self._in_flight_bytes += part_bytes
            acknowledged_s = clock_s - part_s / 2 + self._round_trip_s
            self._unacknowledged.append((acknowledged_s, part_bytes, self._in_flight_bytes))
            left_bytes -= part_bytes
        self._idle_since_s = clock_s
        return max(0.0, clock_s - now_s - 8 * size_bytes / rate_bps)

    def _acknowledge(self, now_s: float, path_bytes: float) -> None:
        while self._unacknowledged and self._unacknowledged[0][0] <= now_s:
            latest_bytes = self._unacknowledged[-1][2]
            _, part_bytes, in_flight_bytes = self._unacknowledged.popleft()
            # Linux opens a window to twice what the sender uses at most. A sender that fills the path has as much again
            # in the buffer before it.
            useful_bytes = 2 * min(max(in_flight_bytes, latest_bytes), max(path_bytes, self._initial_bytes))
            self._window_bytes = max(self._window_bytes, min(self._window_bytes + part_bytes, useful_bytes))
            self._in_flight_bytes -= part_bytes
        if not self._unacknowledged:
            self._in_flight_bytes = 0.0

    def _halve_if_idle(self, now_s: float) -> None:
        idle_s = now_s - self._idle_since_s
        if idle_s < self._timeout_s:
            return
        # All earlier bytes have been acknowledged by then, and have opened the window.
        self._acknowledge(now_s, math.inf)
        halvings = math.floor(min(idle_s / self._timeout_s, _MOST_HALVINGS))
        self._window_bytes = max(self._initial_bytes, self._window_bytes / 2**halvings)
