"""Arrivals of a burst's bytes over time, and the rates that follow from them."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from traces.probe.conversation import PeerError

# Share of a burst's time that rates leave out, because TCP windows open in it: slow start is no property of the link.
_WARM_UP_SHARE = 0.4

# Share of a burst's bytes in whose time all connections are assumed to send; at the end, some have finished already.
_FULL_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Bytes of all connections of a burst together, at the receiving end.

    Attributes:
        times_s: Times of arrivals since the receiver was ready, seconds, rising.
        totals_bytes: Payload that had arrived by these times, bytes.
        end_s: Time at which the receiver stopped, seconds.
        complete: Whether the sender closed all connections, so that all bytes have arrived.
    """

    times_s: tuple[float, ...]
    totals_bytes: tuple[int, ...]
    end_s: float
    complete: bool

    @property
    def size_bytes(self) -> int:
        """Payload that arrived in all, bytes."""
        return self.totals_bytes[-1] if self.totals_bytes else 0

    def window_rates_bps(self, count: int) -> list[float]:
        """Return payload rates in equal windows after slow start, bits per second; empty if too few bytes arrived."""
        if len(self.times_s) < 2:
            return []
        first_s, last_s = self.times_s[0], self._until_s
        if self.complete:
            last_s = self._time_of(_FULL_SHARE * self.size_bytes)
        edges_s = np.linspace(first_s + _WARM_UP_SHARE * (last_s - first_s), last_s, count + 1)
        if not edges_s[-1] > edges_s[0]:
            return []
        bits = 8 * np.interp(edges_s, self.times_s, self.totals_bytes)
        return [float((later - earlier) / (edges_s[1] - edges_s[0])) for earlier, later in pairwise(bits)]

    def last_half_bps(self) -> float | None:
        """Return the payload rate of the second half of the bytes, bit/s; None if that half arrived all at once.

        The rate is 0 if no bytes arrived.
        """
        if not self.size_bytes:
            return 0.0
        half_s = self._time_of(self.size_bytes / 2)
        return 4 * self.size_bytes / (self._until_s - half_s) if self._until_s > half_s else None

    @property
    def warm_up_s(self) -> float:
        """Time at the beginning that `window_rates_bps` leaves out, seconds."""
        return _WARM_UP_SHARE * (self._until_s - self.times_s[0]) if self.times_s else 0.0

    @property
    def _until_s(self) -> float:
        # In an incomplete burst, nothing arrived after the last recorded time, up to the end.
        return self.times_s[-1] if self.complete else self.end_s

    def _time_of(self, size_bytes: float) -> float:
        return float(np.interp(size_bytes, self.totals_bytes, self.times_s))

    def as_message(self) -> dict[str, Any]:
        """Return the message that reports the arrivals to the other end."""
        return {
            "times_s": [round(each, 6) for each in self.times_s],
            "totals_bytes": self.totals_bytes,
            "end_s": round(self.end_s, 6),
            "complete": self.complete,
        }


def arrivals_of(message: dict[str, Any]) -> Arrivals:
    """Return the arrivals in a message from another host.

    Raises:
        PeerError: The message is invalid.
    """
    try:
        times_s = tuple(float(each) for each in message["times_s"])
        totals = tuple(int(each) for each in message["totals_bytes"])
        found = Arrivals(times_s, totals, float(message["end_s"]), bool(message["complete"]))
    except (KeyError, TypeError, ValueError, OverflowError):
        raise PeerError("the responder reported invalid arrivals") from None
    if len(times_s) != len(totals):
        raise PeerError("the responder reported invalid arrivals")
    rising = all(earlier <= later for each in (times_s, totals) for earlier, later in pairwise(each))
    ends = not times_s or (times_s[0] >= 0 and times_s[-1] <= found.end_s < float("inf") and totals[0] > 0)
    if not rising or not ends:
        raise PeerError("the responder reported invalid arrivals")
    return found
