"""The resources that a rank's process uses, sampled at the end of each step: memory, processor time, files, threads."""

import json
import os
import resource
import threading
from dataclasses import dataclass, fields
from pathlib import Path

_PAGE_BYTES = resource.getpagesize()


@dataclass(frozen=True, slots=True)
class ResourceSample:
    """Resources of one process at the end of one step.

    Attributes:
        time_s: Time since the start of the run in seconds.
        cpu_s: Processor time of all threads since the start of the process, user and system, in seconds.
    """

    step: int
    time_s: float
    cpu_s: float
    resident_bytes: int
    open_files: int
    threads: int


_FIELDS = tuple(field.name for field in fields(ResourceSample))


class ResourceLog:
    """Writes samples of this process's resources to a file as JSON lines; Linux only.

    A sample is written between two steps, while the rank does not compute, so that it must be quick.
    """

    def __init__(self, path: Path) -> None:
        # A line is on the disk before the next step.
        self._file = path.open("w", buffering=1)
        self._memory = os.open("/proc/self/statm", os.O_RDONLY)

    def write(self, step: int, time_s: float) -> None:
        """Append a sample of the present resources, at the end of a step."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        pages = int(os.pread(self._memory, 256, 0).split()[1])
        open_files = len(os.listdir("/proc/self/fd"))
        cpu_s, threads = usage.ru_utime + usage.ru_stime, threading.active_count()
        sample = ResourceSample(step, time_s, cpu_s, pages * _PAGE_BYTES, open_files, threads)
        self._file.write(f"{json.dumps({name: getattr(sample, name) for name in _FIELDS})}\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        os.close(self._memory)


def read_samples(path: Path) -> list[ResourceSample]:
    """Return the samples in a file that `write_sample` has written."""
    return [ResourceSample(**json.loads(line)) for line in path.read_text().splitlines()]
