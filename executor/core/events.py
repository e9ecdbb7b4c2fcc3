"""Records the events of a rank as rows, for the rank's event file and for the head (the host of the launcher).

Only the first device of a tensor-parallel group records rows, in a run as in a simulation.
"""

import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import InitVar, dataclass
from typing import Any

from executor.core.messages import pack
from planner.adapt.gradient_noise import LocalNorms
from planner.events.event import Event, EventWriter

# The shortest wait for a message that is recorded; a shorter one is the time of the call itself.
NOTICEABLE_WAIT_S = 0.0005

# For `EventRecorder.sending`: a step that no run has, so that the send holds none back.
NO_STEP = sys.maxsize

# Number of rows that are written together: those of about a second, which take a few milliseconds to write.
ROWS_AT_ONCE = 1024


@dataclass(eq=False)
class StepPublisher:
    """Collects the rows of each step, and publishes a step to the head once its sends have departed.

    Each send, and each transfer of layers before the step, holds the step back until its row is logged; the receive of
    a probe does so until it arrives. Backups hold nothing back: late rows are published with a later step.

    Args:
        publish: Sends the head a step and its rows, in the form of `executor.core.messages.pack`.
        kept: Returns the newest step before which this rank's copies are complete; None if it keeps none.
    """

    _publish: Callable[[int, dict[str, Any]], None]
    first_step: InitVar[int]
    _kept: Callable[[], int | None]

    def __post_init__(self, first_step: int) -> None:
        self._events: defaultdict[int, list[Event]] = defaultdict(list)
        self._late: list[Event] = []
        self._losses: dict[int, float] = {}
        self._norms: dict[int, LocalNorms] = {}
        # By step, how many operations hold it back: 1 for the step itself until it is finished, 1 for each send, 1 for
        # each receive of a probe.
        self._open: defaultdict[int, int] = defaultdict(lambda: 1)
        self._finished = first_step - 1
        self._lock = threading.Lock()

    def log(self, event: Event) -> None:
        """Add an event row.

        Asynchronous updates may be sent and applied after their step was published. Such rows are published with the
        next step; a policy does not get them.
        """
        with self._lock:
            is_late = event.step <= self._finished and event.step not in self._open
            (self._late if is_late else self._events[event.step]).append(event)

    def sending(self, step: int) -> None:
        """Hold a step back from publication while a send is under way."""
        with self._lock:
            self._open[step] += 1

    def note_loss(self, step: int, loss: float) -> None:
        """Store this rank's part of a step's loss; must precede `finish`."""
        with self._lock:
            self._losses[step] = loss

    def note_norms(self, norms: LocalNorms) -> None:
        """Store this rank's norms of a step's gradients; must precede `finish`."""
        with self._lock:
            self._norms[norms.step] = norms

    def finish(self, step: int) -> None:
        """Mark a step as finished; the step is published once all its sends have departed."""
        with self._lock:
            self._open.setdefault(step, 1)
            self._finished = step
        self.release(step)

    def release(self, step: int) -> None:
        """End the effect of one call of `sending`; publish the step if nothing else holds it back."""
        with self._lock:
            self._open[step] -= 1
            if self._open[step]:
                return
            del self._open[step]
            late, self._late = self._late, []
            loss, norms = self._losses.pop(step, None), self._norms.pop(step, None)
            part = pack([*self._events.pop(step, []), *late], loss, self._kept(), norms)
        self._publish(step, part)

    def unpublished(self) -> dict[str, Any]:
        """Return the rows of all steps that were not published, in the form of `executor.core.messages.pack`."""
        with self._lock:
            return pack([*self._late, *(event for events in self._events.values() for event in events)], None, None)


class EventRecorder:
    """Writes rows to a file, many at a time.

    Args:
        file: The rank's event file.
        publisher: Gets a copy of each row; None if the launcher does not follow the run.
        at_once: Least number of rows that `end_step` writes.
    """

    def __init__(self, file: EventWriter, publisher: StepPublisher | None, at_once: int = ROWS_AT_ONCE) -> None:
        self._file = file
        self._publisher = publisher
        self._at_once = at_once
        self._rows: list[Event] = []
        self._lock = threading.Lock()

    def log(self, event: Event) -> None:
        """Record an event row; safe in any thread."""
        with self._lock:
            self._rows.append(event)
        if self._publisher is not None:
            self._publisher.log(event)

    def end_step(self) -> None:
        """Write the collected rows to the file if there are enough."""
        if len(self._rows) >= self._at_once:
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

        A row of zero length only tells the arrival: `executor.control.record.arrivals` puts it into the sender's row.

        Args:
            row: Returns the row from its start and its end in run seconds.
            idle_since_s: Run second since which the device is idle.
            arrived_s: Run second of the arrival.
        """
        waited = arrived_s - idle_since_s > NOTICEABLE_WAIT_S
        self.log(row(idle_since_s if waited else arrived_s, arrived_s))

    def hold(self, step: int) -> Callable[[], None]:
        """Hold a step back from publication; return the function that releases it."""
        publisher = self._publisher
        if publisher is None:
            return lambda: None
        publisher.sending(step)
        return lambda: publisher.release(step)

    def sending(self, step: int, row: Callable[[float, float], Event], start_s: float) -> Callable[[float], None]:
        """Begin a send; return the function to call with the run second at which the send's last byte departed.

        Before that call the step is not published. For asynchronous updates ``step`` is the last step of the run.
        """
        if self._publisher is not None:
            self._publisher.sending(step)

        def departed(end_s: float) -> None:
            self.log(row(start_s, end_s))
            if self._publisher is not None:
                self._publisher.release(step)

        return departed


class PartnerRows(EventRecorder):
    """Records no rows, for devices of a tensor-parallel group other than the first: their event files stay empty."""

    def log(self, event: Event) -> None:
        """Drop an event row."""

    def sending(self, step: int, row: Callable[[float, float], Event], start_s: float) -> Callable[[float], None]:
        """Begin a send without holding the step back."""
        return lambda end_s: None
