"""What a rank's process holds, step by step: to show that a long run does not grow."""

import json
import os
import resource
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

_PAGE_BYTES = resource.getpagesize()


@dataclass(frozen=True, slots=True)
class ResourceSample:
    """One process at the end of one step.

    Attributes:
        step: Index.
        time_s: Run seconds.
        cpu_s: Seconds of processor time since the process began, all threads, user and system.
        resident_bytes: Memory that it really occupies.
        open_files: Files, sockets and pipes.
        threads: Of Python.
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
