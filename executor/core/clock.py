"""The clock of a run: seconds since second 0, a moment that all ranks have agreed on, on one host or on several.

The monotonic clocks of hosts start at unrelated values. Each rank measures the offset of its clock from that of the
head, as NTP does (RFC 5905): it asks for the head's reading several times, keeps the answer with the shortest round
trip, and assumes that the answer was on its way for half of this time. Clocks drift by some 10 ms an hour, so a thread
measures again every few seconds and corrects the run's clock in small steps.
"""

import math
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from executor.core.timeouts import timeouts


class RunClock:
    """Counts the seconds of the run.

    Args:
        origin_s: Reading of this machine's monotonic clock at second 0; None to set it later by `start`.
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
    """Create the file for second 0 of the run, which contains 0 until `announce_origin` is called."""
    path.write_bytes(bytes(_ORIGIN.size))


def announce_origin(path: Path, origin_s: float) -> None:
    """Write second 0 of the run, a reading of this machine's monotonic clock, into the file for the relay."""
    with path.open("r+b") as file:
        file.write(_ORIGIN.pack(origin_s))


def read_origin(path: Path) -> float | None:
    """Return second 0 of the run by this machine's monotonic clock; None before `announce_origin`."""
    (origin_s,) = _ORIGIN.unpack(path.read_bytes())
    return origin_s or None


# Number of questions in one measurement, and number of measurements that are kept.
_ROUND_TRIPS = 8
_REMEMBERED = 12
# The largest correction at once: less than any latency, so that no message seems to arrive before its departure.
_MAX_STEP_S = 0.0002


class HeadClock:
    """Measures the offset of the head's monotonic clock from this machine's.

    Args:
        ask: Returns a reading of the head's clock in seconds; None on the head's own machine.

    Attributes:
        offset_s: The reading of the head's clock less that of this machine's clock, in seconds.
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
            # The kept measurements span a minute, in which clocks drift by less than the error of a measurement.
            _, best_s = min(self._seen)
            step_s = best_s - self.offset_s
            step_s = math.copysign(min(abs(step_s), _MAX_STEP_S), step_s)
            self.offset_s += step_s
            clock.adjust(step_s)


def _measure(ask: Callable[[], float]) -> tuple[float, float]:
    """Return the shortest of several round trips, and the offset of the head's clock found in it, both in seconds."""
    found = []
    for _ in range(_ROUND_TRIPS):
        asked_s = time.monotonic()
        head_s = ask()
        answered_s = time.monotonic()
        found.append((answered_s - asked_s, head_s - (asked_s + answered_s) / 2))
    return min(found)
