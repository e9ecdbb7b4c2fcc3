"""Records the events of a rank as rows, for the rank's event file and for the head.

A tensor-parallel group has one set of rows, those of its first device, in a run as in a simulation.
"""

import threading
from collections.abc import Callable
from typing import Protocol

from planner.events.event import Event, EventWriter

# The shortest wait that is recorded: a shorter one is the time of the call itself, not idle time of the device.
NOTICEABLE_WAIT_S = 0.0005

# Rows that are written together: about a second of a busy rank, which takes a few milliseconds to write.
_ROWS_AT_ONCE = 1024


class Feed(Protocol):
    """A receiver of copies of the rows; it publishes them step by step."""

    def log(self, event: Event) -> None:
        """Take a row; the row of a send also releases the step that `sending` held back."""

    def sending(self, step: int) -> None:
        """Hold the step back from publication while a send of it is under way."""

    def release(self, step: int) -> None:
        """Release the step from one `sending` whose operation logs no row."""


class EventRecorder:
    """Writes rows to a file, many at a time.

    Args:
        file: The rank's event file.
        feed: Takes a copy of each row; None if the launcher does not follow the run.
    """

    def __init__(self, file: EventWriter, feed: Feed | None) -> None:
        self._file = file
        self._feed = feed
        self._rows: list[Event] = []
        self._lock = threading.Lock()

    def log(self, event: Event) -> None:
        """Record a row; safe in any thread."""
        with self._lock:
            self._rows.append(event)
        if self._feed is not None:
            self._feed.log(event)

    def end_step(self) -> None:
        """Write the collected rows to the file if there are at least `_ROWS_AT_ONCE`."""
        if len(self._rows) >= _ROWS_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Write the collected rows to the file."""
        with self._lock:
            rows, self._rows = self._rows, []
        self._file.append(rows)

    def close(self) -> None:
        """Write the remaining rows, and complete the file."""
        self.flush()
        self._file.close()

    def arrived(self, row: Callable[[float, float], Event], idle_since_s: float, arrived_s: float) -> None:
        """Log the arrival of a message: as a wait if the device was idle, otherwise as a row of zero length.

        A row of zero length records the time of arrival for `executor.control.results`, which then removes the row.

        ``row`` makes the row from its start and its end; all times are run seconds.
        """
        waited = arrived_s - idle_since_s > NOTICEABLE_WAIT_S
        self.log(row(idle_since_s if waited else arrived_s, arrived_s))

    def hold(self, step: int) -> Callable[[], None]:
        """Hold a step back from publication; return the function that releases it."""
        feed = self._feed
        if feed is None:
            return lambda: None
        feed.sending(step)
        return lambda: feed.release(step)

    def sending(self, step: int, row: Callable[[float, float], Event], start_s: float) -> Callable[[float], None]:
        """Begin a send; return the function to call with the run second at which its last byte departed.

        The step is not published before that call. Sends of asynchronous updates pass the last step of the run.
        """
        if self._feed is not None:
            self._feed.sending(step)
        return lambda end_s: self.log(row(start_s, end_s))


class PartnerRows(EventRecorder):
    """Records no rows: the recorder of a tensor-parallel partner, whose event file stays empty."""

    def log(self, event: Event) -> None:
        """Drop a row."""

    def sending(self, step: int, row: Callable[[float, float], Event], start_s: float) -> Callable[[float], None]:
        """Hold nothing back: the row that would release the step is dropped."""
        return lambda end_s: None
