"""The clock of a run: seconds since an origin that all ranks share, on one host or on several.

The monotonic clocks of hosts start at unrelated values. A rank measures the offset of its clock from the head's as NTP
does (RFC 5905): it asks for the head's reading several times, keeps the answer with the shortest round trip, and
assumes that the answer travelled for half of that round trip. Clocks drift by some 10 ms an hour, so a thread measures
again every few seconds and corrects the run's clock in small steps.
"""

import math
import mmap
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from executor.core.timeouts import timeouts


class RunClock:
    """Counts seconds from an origin, which is a reading of this machine's monotonic clock.

    Args:
        origin_s: Monotonic time of second 0; None if the ranks have not agreed on it yet: call `start` before `now_s`.
    """

    def __init__(self, origin_s: float | None = None) -> None:
        self.has_started = False
        if origin_s is not None:
            self.start(origin_s)

    def start(self, origin_s: float) -> None:
        """Set the monotonic time of second 0."""
        self._origin_s = origin_s
        self.has_started = True

    def adjust(self, later_s: float) -> None:
        """Advance the clock by ``later_s`` seconds; a negative value sets it back."""
        self._origin_s -= later_s

    def now_s(self) -> float:
        """Return the seconds since the start of the run; negative before the start."""
        return time.monotonic() - self._origin_s

    def sleep_until(self, time_s: float) -> None:
        """Sleep until ``time_s`` seconds after the start of the run; return at once if that time has passed."""
        remaining_s = time_s - self.now_s()
        if remaining_s > 0:
            time.sleep(remaining_s)


_ORIGIN = struct.Struct("d")


def create_origin(path: Path) -> None:
    """Create the file for the origin of the run; until `announce_origin` the file holds 0."""
    path.write_bytes(bytes(_ORIGIN.size))


def announce_origin(path: Path, origin_s: float) -> None:
    """Write the start of the run into the file, for the relay: a future reading of the machine's monotonic clock."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as content:
        _ORIGIN.pack_into(content, 0, origin_s)


class OriginWatch:
    """Reads the file of `announce_origin` through a memory map, which is cheap enough to do before each packet."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def origin_s(self) -> float | None:
        """Return when the run starts, by the machine's monotonic clock; None before `announce_origin`."""
        (origin_s,) = _ORIGIN.unpack_from(self._content)
        return origin_s or None


_ROUND_TRIPS = 8
_REMEMBERED = 12
# The largest correction at once: less than the smallest latency, so that no transfer seems to end before its start.
_MAX_STEP_S = 0.0002


class HeadClock:
    """Measures how far the head's monotonic clock is ahead of this machine's.

    Args:
        ask: Asks the head for a reading of its clock, in seconds; None on the head's own machine, whose clock is the
            same.

    Attributes:
        offset_s: The head's reading less this machine's, in seconds.
    """

    def __init__(self, ask: Callable[[], float] | None) -> None:
        self.offset_s = 0.0
        self._ask = ask
        if ask is not None:
            self._seen = deque([_measure(ask)], maxlen=_REMEMBERED)
            self.offset_s = self._seen[0][1]

    def lead(self, clock: RunClock) -> None:
        """Start a thread that keeps ``clock`` synchronous with the head's clock."""
        if self._ask is not None:
            threading.Thread(target=self._lead, args=(self._ask, clock), name="head-clock", daemon=True).start()

    def _lead(self, ask: Callable[[], float], clock: RunClock) -> None:
        interval_s = timeouts().clock_interval_s
        while True:
            time.sleep(interval_s)
            try:
                self._seen.append(_measure(ask))
            except TimeoutError:
                continue
            # The measurements of the last minute: in a minute clocks drift by less than the error of a round trip.
            _, best_s = min(self._seen)
            step_s = best_s - self.offset_s
            step_s = math.copysign(min(abs(step_s), _MAX_STEP_S), step_s)
            self.offset_s += step_s
            clock.adjust(step_s)


def _measure(ask: Callable[[], float]) -> tuple[float, float]:
    """Return the shortest of several round trips, and the offset of the head's clock in that one; both in seconds."""
    found = []
    for _ in range(_ROUND_TRIPS):
        asked_s = time.monotonic()
        head_s = ask()
        answered_s = time.monotonic()
        found.append((answered_s - asked_s, head_s - (asked_s + answered_s) / 2))
    return min(found)
