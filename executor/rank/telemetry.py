"""What a rank publishes of each step of a session, beside the training and never in its way."""

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
    """One process at the end of one step.

    Attributes:
        time_s: Seconds since the start of the run.
        cpu_s: Seconds of processor time since the process began, all threads, user and system.
        resident_bytes: Memory that it really occupies.
    """

    step: int
    time_s: float
    cpu_s: float
    resident_bytes: int
    open_files: int
    threads: int


def sample_resources(step: int, time_s: float) -> ResourceSample:
    """Return what this process holds now; Linux only."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    open_files = len(os.listdir("/proc/self/fd"))
    return ResourceSample(
        step, time_s, usage.ru_utime + usage.ru_stime, pages * _PAGE_BYTES, open_files, threading.active_count()
    )


class SampleFile:
    """Samples as JSON lines, each on disk as soon as it is there."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", buffering=1)

    def append(self, sample: ResourceSample) -> None:
        """Write a sample."""
        self._file.write(json.dumps(asdict(sample)) + "\n")

    def close(self) -> None:
        """Complete the file."""
        self._file.close()


def read_samples(path: Path) -> list[ResourceSample]:
    """Return what a `SampleFile` holds."""
    return [ResourceSample(**json.loads(line)) for line in path.read_text().splitlines()]


@dataclass(eq=False)
class StepPublisher:
    """Collects the rows of each step, and publishes them once the step's sends have left.

    Args:
        first_step: The step with which it begins.
        kept: Gives the step before which this rank's copies of the state are complete; None where it keeps none.
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
        # What holds a step back: itself, until it is finished, and each of its sends.
        self._open: defaultdict[int, int] = defaultdict(lambda: 1)
        self._finished = first_step - 1
        self._lock = threading.Lock()

    def log(self, event: Event) -> None:
        """Take an event; that of a send or of a move of layers closes what `sending` opened.

        Updates of other pipelines may be sent and applied when the step that they belong to has long been published.
        They go with the next one; a policy does not see them.
        """
        with self._lock:
            is_late = event.step <= self._finished and event.step not in self._open
            (self._late if is_late else self._events[event.step]).append(event)
        if event.kind in (EventKind.SEND, EventKind.MIGRATE):
            self.release(self._steps - 1 if event.action == UPDATE_ACTION else event.step)

    def sending(self, step: int) -> None:
        """Hold a step back while a send, or a move of layers before the step, is under way."""
        with self._lock:
            self._open[step] += 1

    def note_loss(self, step: int, loss: float) -> None:
        """Take this rank's part of a step's loss, before the step is finished."""
        with self._lock:
            self._losses[step] = loss

    def finish(self, step: int) -> None:
        """Note that the rank has done its work of a step; it is published once its sends have left."""
        with self._lock:
            self._open.setdefault(step, 1)
            self._finished = step
        self.release(step)

    def release(self, step: int) -> None:
        """Note that something is over that held a step back."""
        with self._lock:
            self._open[step] -= 1
            if self._open[step]:
                return
            del self._open[step]
            late, self._late = self._late, []
            part = pack([*self._events.pop(step, []), *late], self._losses.pop(step, None), self._kept())
        self._client.send("step", session=self._session, step=step, part=part)

    def unpublished(self) -> dict[str, Any]:
        """Return what happened in steps that were never published, as it would have been."""
        with self._lock:
            return pack([event for events in self._events.values() for event in events], None, None)
