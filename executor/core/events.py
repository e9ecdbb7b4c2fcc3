"""Records what happens on a rank as rows of events, for its file and for the head.

What a partner of a tensor-parallel group does is in the rows of its first device, as in a simulation.
"""

import threading
from collections.abc import Callable
from typing import Protocol

from planner.events.event import Event, EventWriter

# A shorter wait is the time it takes to ask; the device did not stand idle.
NOTICEABLE_WAIT_S = 0.0005

# A second of a busy rank; to write them takes a few milliseconds, and no more memory than the run has anyway.
_ROWS_AT_ONCE = 1024


class Feed(Protocol):
    """What takes a copy of the rows, step by step."""

    def log(self, event: Event) -> None:
        """Take a row; that of a send closes what `sending` opened."""

    def sending(self, step: int) -> None:
        """Hold a step back while a send is under way."""

    def release(self, step: int) -> None:
        """Note that something is over that held a step back and has no row."""


class EventRecorder:
    """Writes rows to a file, many at a time.

    Args:
        feed: Takes a copy of each row; None if nobody steers the run.
    """

    def __init__(self, file: EventWriter, feed: Feed | None) -> None:
        self._file = file
        self._feed = feed
        self._rows: list[Event] = []
        self._lock = threading.Lock()

    def log(self, event: Event) -> None:
        """Take a row, in any thread."""
        with self._lock:
            self._rows.append(event)
        if self._feed is not None:
            self._feed.log(event)

    def end_step(self) -> None:
        """Write the rows that have come together, if there are many."""
        if len(self._rows) >= _ROWS_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Write the rows that have come together."""
        with self._lock:
            rows, self._rows = self._rows, []
        self._file.append(rows)

    def close(self) -> None:
        """Write the rows that are left, and complete the file."""
        self.flush()
        self._file.close()

    def arrived(self, row: Callable[[float, float], Event], idle_since_s: float, arrived_s: float) -> None:
        """Log an arrival: a wait, or a row without length where the device had other things to do.

        The latter say when the bytes arrived, and are gone once `executor.control.results` has used them.
        """
        waited = arrived_s - idle_since_s > NOTICEABLE_WAIT_S
        self.log(row(idle_since_s if waited else arrived_s, arrived_s))

    def hold(self, step: int) -> Callable[[], None]:
        """Keep a step from being shown until what is returned is called."""
        feed = self._feed
        if feed is None:
            return lambda: None
        feed.sending(step)
        return lambda: feed.release(step)

    def sending(self, step: int, row: Callable[[float, float], Event], start_s: float) -> Callable[[float], None]:
        """Take note of a send that is under way; return what is to be called when its last byte has departed.

        Its step is not published before: for updates, for which nobody waits, that is the run's last one.
        """
        if self._feed is not None:
            self._feed.sending(step)
        return lambda end_s: self.log(row(start_s, end_s))


class PartnerRows(EventRecorder):
    """Writes a file without rows."""

    def log(self, event: Event) -> None:
        """Drop a row."""

    def sending(self, step: int, row: Callable[[float, float], Event], start_s: float) -> Callable[[float], None]:
        """Open nothing: the row that would close it is dropped, and its step would never be published."""
        return lambda end_s: None
