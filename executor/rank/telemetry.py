"""The rows and resource samples that a rank publishes for each step."""

import json
import os
import resource
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import InitVar, asdict, dataclass
from pathlib import Path
from typing import Any

from executor.core.messages import pack
from executor.rank.control_client import ControlClient
from planner.events.event import UPDATE_ACTION, Event, EventKind

_PAGE_BYTES = resource.getpagesize()


@dataclass(frozen=True, slots=True)
class ResourceSample:
    """Resources of one process at the end of one step.

    Attributes:
        time_s: Time since the start of the run in seconds.
        cpu_s: Processor time of all threads since the start of the process, user and system, in seconds.
        resident_bytes: Resident memory in bytes.
    """

    step: int
    time_s: float
    cpu_s: float
    resident_bytes: int
    open_files: int
    threads: int


def sample_resources(step: int, time_s: float) -> ResourceSample:
    """Return the present resources of this process; Linux only."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    open_files = len(os.listdir("/proc/self/fd"))
    return ResourceSample(
        step, time_s, usage.ru_utime + usage.ru_stime, pages * _PAGE_BYTES, open_files, threading.active_count()
    )


class SampleFile:
    """Writes samples as JSON lines, each to disk at once."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", buffering=1)

    def append(self, sample: ResourceSample) -> None:
        """Write a sample."""
        self._file.write(json.dumps(asdict(sample)) + "\n")

    def close(self) -> None:
        """Complete the file."""
        self._file.close()


def read_samples(path: Path) -> list[ResourceSample]:
    """Return the samples in the file of a `SampleFile`."""
    return [ResourceSample(**json.loads(line)) for line in path.read_text().splitlines()]


@dataclass(eq=False)
class StepPublisher:
    """Collects the rows of each step, and publishes them to the head once the step's sends have departed.

    Args:
        first_step: The first step of the session.
        steps: Number of the step after the last one.
        kept: Returns the newest step before which this rank's copies are complete; None if it keeps none.
    """

    _client: ControlClient
    _session: int
    first_step: InitVar[int]
    _steps: int
    _kept: Callable[[], int | None] = lambda: None

    def __post_init__(self, first_step: int) -> None:
        self._events: defaultdict[int, list[Event]] = defaultdict(list)
        self._late: list[Event] = []
        self._losses: dict[int, float] = {}
        # By step, how many operations hold it back: 1 for the step itself until it is finished, 1 for each send.
        self._open: defaultdict[int, int] = defaultdict(lambda: 1)
        self._finished = first_step - 1
        self._lock = threading.Lock()

    def log(self, event: Event) -> None:
        """Take a row; the row of a send or of a move of layers also releases the step that `sending` held back.

        Asynchronous updates may be sent and applied after their step was published. Such rows are published with the
        next step; a policy does not get them.
        """
        with self._lock:
            is_late = event.step <= self._finished and event.step not in self._open
            (self._late if is_late else self._events[event.step]).append(event)
        if event.kind in (EventKind.SEND, EventKind.MIGRATE):
            self.release(self._steps - 1 if event.action == UPDATE_ACTION else event.step)

    def sending(self, step: int) -> None:
        """Hold a step back from publication while a send, or a move of layers before the step, is under way."""
        with self._lock:
            self._open[step] += 1

    def note_loss(self, step: int, loss: float) -> None:
        """Store this rank's part of a step's loss; must precede `finish`."""
        with self._lock:
            self._losses[step] = loss

    def finish(self, step: int) -> None:
        """Finish a step; the step is published once all its sends have departed."""
        with self._lock:
            self._open.setdefault(step, 1)
            self._finished = step
        self.release(step)

    def release(self, step: int) -> None:
        """Release a step from one `sending`; publish the step if nothing else holds it back."""
        with self._lock:
            self._open[step] -= 1
            if self._open[step]:
                return
            del self._open[step]
            late, self._late = self._late, []
            part = pack([*self._events.pop(step, []), *late], self._losses.pop(step, None), self._kept())
        self._client.send("step", session=self._session, step=step, part=part)

    def unpublished(self) -> dict[str, Any]:
        """Return the rows of all steps that were not published, in one message as of `pack`."""
        with self._lock:
            return pack([event for events in self._events.values() for event in events], None, None)
