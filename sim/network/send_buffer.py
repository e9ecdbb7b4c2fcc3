"""The send buffer of a TCP connection whose acknowledgements wait behind the bytes of the other direction."""

from collections import deque
from dataclasses import dataclass

from sim.network.single_link import FifoLink

# Share of a full buffer that must be free before Linux wakes the sender, which then fills the buffer again
# (sk_stream_is_writeable): between two thirds of a buffer and all of it are under way.
_FREE_SHARE = 1 / 3


@dataclass(slots=True)
class _Segment:
    """Bytes that arrive at a constant rate between two times."""

    first_s: float
    last_s: float
    size_bytes: float


class SendBuffer:
    """Bytes of one direction that were written and are not acknowledged, at most as many as the buffer holds.

    A byte is acknowledged when it arrives, and the acknowledgement joins the queue of the link back: behind all bytes
    that are there by then. Where both directions send at once, each thus waits for the other (Zhang, Shenker and
    Clark, Observations on the Dynamics of a Congestion Control Algorithm: The Effects of Two-Way Traffic, 1991).

    Args:
        window_bytes: Bytes of a long stream that are under way, two thirds of the buffer.
        way_back: The link that carries the acknowledgements.
        back_s: Latency of the way back, seconds.
    """

    def __init__(self, window_bytes: float, way_back: FifoLink, back_s: float) -> None:
        self._size_bytes = window_bytes / (1 - _FREE_SHARE)
        self._window_bytes = window_bytes
        self._way_back = way_back
        self._back_s = back_s
        self._segments: deque[_Segment] = deque()
        self._held_bytes = 0.0
        self._is_full = False

    def room_bytes(self, now_s: float) -> float:
        """Return how many bytes may be written; 0 while a buffer that was full has no third free."""
        self._acknowledge(self._way_back.passed_s(now_s - self._back_s))
        if self._is_full and self._held_bytes > self._window_bytes:
            return 0.0
        return self._size_bytes - self._held_bytes

    def write(self, size_bytes: float, first_s: float, last_s: float) -> None:
        """Note bytes that were written and arrive between two times, in seconds."""
        self._segments.append(_Segment(first_s, last_s, size_bytes))
        self._held_bytes += size_bytes
        self._is_full = False

    def await_third_s(self) -> float:
        """Return when the byte arrives whose acknowledgement makes a third of the full buffer free, seconds."""
        self._is_full = True
        missing_bytes = self._held_bytes - self._window_bytes
        for segment in self._segments:
            if missing_bytes <= segment.size_bytes:
                share = max(0.0, missing_bytes / segment.size_bytes)
                return segment.first_s + share * (segment.last_s - segment.first_s)
            missing_bytes -= segment.size_bytes
        return self._segments[-1].last_s

    def acknowledged_s(self, arrived_s: float) -> float:
        """Return when the sender hears of a byte that arrived at ``arrived_s``, not later than now, seconds."""
        return self._way_back.leaves_s(arrived_s) + self._back_s

    def free_third(self, arrived_s: float) -> None:
        """Free the bytes that arrived until ``arrived_s``, a result of `await_third_s` that the sender has heard of."""
        self._acknowledge(arrived_s)
        # Rounding must not keep the sender waiting.
        self._is_full = False

    def _acknowledge(self, arrived_s: float) -> None:
        """Free the bytes that arrived until ``arrived_s``."""
        while self._segments and self._segments[0].first_s < arrived_s:
            segment = self._segments[0]
            if segment.last_s <= arrived_s:
                self._segments.popleft()
                self._held_bytes -= segment.size_bytes
                continue
            freed_bytes = segment.size_bytes * (arrived_s - segment.first_s) / (segment.last_s - segment.first_s)
            segment.first_s, segment.size_bytes = arrived_s, segment.size_bytes - freed_bytes
            self._held_bytes -= freed_bytes
        if not self._segments:
            self._held_bytes = 0.0
