"""A TCP sender whose acknowledgements wait behind the bytes of the other direction."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from sim.network.send_window import grown_bytes, halved_bytes
from sim.network.single_link import FifoLink

# Share of a full buffer that must be free before Linux wakes the sender, which then fills the buffer again
# (sk_stream_is_writeable): between two thirds of a buffer and all of it are under way.
_FREE_SHARE = 1 / 3

# Share of the largest number of bytes under way that is no room, but the rounding of sums.
_ROUNDING = 1e-6

# Share of a congestion window whose acknowledgement lets the sender send on. Real ones let it for two packets.
_CLOCKED_SHARE = 1 / 8


@dataclass(slots=True)
class _Segment:
    """Bytes that arrive at a constant rate between two times."""

    first_s: float
    last_s: float
    size_bytes: float


class SendBuffer:
    """Bytes of one direction that were sent and are not acknowledged, within TCP's congestion window and send buffer.

    A byte is acknowledged when it arrives, and the acknowledgement joins the queue of the link back: behind all bytes
    that are there by then. Where both directions send at once, each thus waits for the other (Zhang, Shenker and
    Clark, Observations on the Dynamics of a Congestion Control Algorithm: The Effects of Two-Way Traffic, 1991). The
    window opens as in `sim.network.send_window.SendWindow`.

    Args:
        initial_bytes: Initial window, bytes.
        window_bytes: Bytes of a long stream that are under way, two thirds of the buffer.
        timeout_s: Function from a time to the smallest retransmission timeout with the round trip, both in seconds.
        way_back: The link that carries the acknowledgements.
        back_s: Function from a time to the latency of the way back, both in seconds.
    """

    def __init__(
        self,
        initial_bytes: float,
        window_bytes: float,
        timeout_s: Callable[[float], float],
        way_back: FifoLink,
        back_s: Callable[[float], float],
    ) -> None:
        self._initial_bytes = self._window_bytes = initial_bytes
        self._most_bytes = window_bytes
        self._timeout_s = timeout_s
        self._way_back = way_back
        self._back_s = back_s
        self._segments: deque[_Segment] = deque()
        self._held_bytes = 0.0
        self._is_full = False
        self._left_at_s = 0.0
        # Bytes of the latest message that were not sent, and most bytes in flight since it began.
        self._left_bytes = self._most_in_flight_bytes = 0.0

    def begin(self, now_s: float, size_bytes: float) -> None:
        """Take on a message of ``size_bytes``."""
        self._acknowledge(self._way_back.passed_s(now_s - self._back_s(now_s)))
        if not self._segments:
            idle_s = now_s - self._left_at_s
            self._window_bytes = halved_bytes(self._window_bytes, self._initial_bytes, idle_s, self._timeout_s(now_s))
        self._left_bytes, self._most_in_flight_bytes = float(size_bytes), 0.0

    def room_bytes(self, now_s: float) -> float:
        """Return how many bytes of the message may be sent now; 0 while too little of a full buffer is free."""
        self._acknowledge(self._way_back.passed_s(now_s - self._back_s(now_s)))
        in_flight_bytes = min(self._limit_bytes, self._most_bytes, self._held_bytes + self._left_bytes)
        self._most_in_flight_bytes = max(self._most_in_flight_bytes, in_flight_bytes)
        if self._is_full and self._held_bytes > self._low_bytes:
            return 0.0
        room_bytes = self._limit_bytes - self._held_bytes
        # What rounding leaves is no room.
        return min(self._left_bytes, room_bytes) if room_bytes > _ROUNDING * self._limit_bytes else 0.0

    def send(self, size_bytes: float, first_s: float, last_s: float) -> None:
        """Note bytes that were sent and arrive between two times in seconds, in the order in which they were sent."""
        if not size_bytes:
            return
        # Bytes arrive in order, also where the latency falls.
        first_s = max(first_s, self._segments[-1].last_s) if self._segments else first_s
        self._segments.append(_Segment(first_s, max(first_s, last_s), size_bytes))
        self._held_bytes += size_bytes
        self._left_bytes -= size_bytes
        self._is_full = False

    def left(self, departed_s: float) -> None:
        """Note that the last byte of a message left the sender's link."""
        self._left_at_s = departed_s

    def await_room_s(self) -> float:
        """Return when the byte arrives whose acknowledgement makes enough of the full buffer free, seconds."""
        self._is_full = True
        missing_bytes, last_s = self._held_bytes - self._low_bytes, self._segments[0].first_s
        for segment in self._segments:
            # While the window opens, every acknowledgement lets bytes pass, also the last one before a pause.
            if not self._is_open and segment.first_s > last_s:
                break
            if missing_bytes <= segment.size_bytes:
                share = max(0.0, missing_bytes / segment.size_bytes)
                return segment.first_s + share * (segment.last_s - segment.first_s)
            missing_bytes -= segment.size_bytes
            last_s = segment.last_s
        return last_s

    def acknowledged_s(self, arrived_s: float) -> float:
        """Return when the sender hears of bytes that arrived at ``arrived_s``, not later than now, seconds."""
        leaves_s = self._way_back.leaves_s(arrived_s)
        return leaves_s + self._back_s(leaves_s)

    def make_room(self, arrived_s: float) -> None:
        """Free the bytes that arrived until ``arrived_s``, a result of `await_room_s` that the sender has heard of."""
        self._acknowledge(arrived_s)
        # Rounding must not keep the sender waiting.
        self._is_full = False

    @property
    def _limit_bytes(self) -> float:
        """Most bytes under way: the window while it opens, and then the buffer."""
        return self._most_bytes / (1 - _FREE_SHARE) if self._is_open else self._window_bytes

    @property
    def _is_open(self) -> bool:
        return self._window_bytes >= self._most_bytes

    @property
    def _low_bytes(self) -> float:
        """Bytes under way at which a sender whose buffer was full sends on."""
        if self._is_open:
            return self._most_bytes
        return self._limit_bytes - min(self._left_bytes, _CLOCKED_SHARE * self._limit_bytes)

    def _acknowledge(self, arrived_s: float) -> None:
        """Free the bytes that arrived until ``arrived_s``; they open the window."""
        while self._segments:
            segment = self._segments[0]
            if segment.last_s > arrived_s and segment.first_s >= arrived_s:
                break
            freed_bytes = segment.size_bytes
            if segment.last_s <= arrived_s:
                self._segments.popleft()
            else:
                freed_bytes *= (arrived_s - segment.first_s) / (segment.last_s - segment.first_s)
                segment.first_s, segment.size_bytes = arrived_s, segment.size_bytes - freed_bytes
            self._held_bytes -= freed_bytes
            self._window_bytes = grown_bytes(self._window_bytes, freed_bytes, self._most_in_flight_bytes)
        if not self._segments:
            self._held_bytes = 0.0
