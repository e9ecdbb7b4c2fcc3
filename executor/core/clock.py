"""The clock of a run: seconds since an origin that all ranks agree on, also where they are on several hosts.

The monotonic clocks of hosts begin anywhere. Of several questions to the head for the reading of its clock the quickest
says most: the answer was under way for half of the round trip, give or take what the two directions differ by. Clocks
drift by some 10 ms in an hour, so a thread asks again every few seconds and corrects the run's clock in small steps.
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
    """Counts from an origin, a reading of the machine's monotonic clock.

    Args:
        origin_s: Monotonic time of second 0; None where it is not yet agreed on: there is no time before `start`.
    """

    def __init__(self, origin_s: float | None = None) -> None:
        self.has_started = False
        if origin_s is not None:
            self.start(origin_s)

    def start(self, origin_s: float) -> None:
        """Count from here."""
        self._origin_s = origin_s
        self.has_started = True

    def adjust(self, later_s: float) -> None:
        """Show ``later_s`` more seconds; fewer if it is negative."""
        self._origin_s -= later_s

    def now_s(self) -> float:
        """Return the seconds since the start of the run; negative before it."""
        return time.monotonic() - self._origin_s

    def sleep_until(self, time_s: float) -> None:
        """Sleep until ``time_s`` seconds after the start; return at once if that is over."""
        remaining_s = time_s - self.now_s()
        if remaining_s > 0:
            time.sleep(remaining_s)


_ORIGIN = struct.Struct("d")


def create_origin(path: Path) -> None:
    """Write the file in which no origin is agreed yet."""
    path.write_bytes(bytes(_ORIGIN.size))


def announce_origin(path: Path, origin_s: float) -> None:
    """Write when the run starts, a reading of the machine's monotonic clock in the future, for the relay."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as content:
        _ORIGIN.pack_into(content, 0, origin_s)


class OriginWatch:
    """Reads whether the run's start is agreed; cheap enough to ask before each packet."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def origin_s(self) -> float | None:
        """Return when the run starts, by the machine's monotonic clock; None while nobody has said."""
        (origin_s,) = _ORIGIN.unpack_from(self._content)
        return origin_s or None


_ROUND_TRIPS = 8
_REMEMBERED = 12
# No transfer seems to end before it began if the clock goes back by less than the least latency.
_MAX_STEP_S = 0.0002


class HeadClock:
    """The clock of the head, as seen from this process.

    Args:
        ask: Returns a reading of the head's clock after a round trip; None on the head's own machine, where both
            clocks are one.

    Attributes:
        offset_s: What the head's clock shows more than this machine's, in seconds.
    """

    def __init__(self, ask: Callable[[], float] | None) -> None:
        self.offset_s = 0.0
        self._ask = ask
        if ask is not None:
            self._seen = deque([_measure(ask)], maxlen=_REMEMBERED)
            self.offset_s = self._seen[0][1]

    def lead(self, clock: RunClock) -> None:
        """Have a thread keep a clock of this machine in step with the head's."""
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
            # Of the last minute, in which clocks drift by less than a round trip is uncertain.
            _, best_s = min(self._seen)
            step_s = best_s - self.offset_s
            step_s = math.copysign(min(abs(step_s), _MAX_STEP_S), step_s)
            self.offset_s += step_s
            clock.adjust(step_s)


def _measure(ask: Callable[[], float]) -> tuple[float, float]:
    """Return the quickest of several round trips, and what the head's clock shows more than this one's; seconds."""
    found = []
    for _ in range(_ROUND_TRIPS):
        asked_s = time.monotonic()
        head_s = ask()
        answered_s = time.monotonic()
        found.append((answered_s - asked_s, head_s - (asked_s + answered_s) / 2))
    return min(found)
