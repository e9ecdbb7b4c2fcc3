"""The resources that a rank's process uses, sampled at the end of each step: memory, processor time, files, threads."""

import json
import os
import resource
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

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


def write_sample(file: TextIO, step: int, time_s: float) -> None:
    """Append a sample of this process's present resources to a file as a JSON line; Linux only."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    open_files = len(os.listdir("/proc/self/fd"))
    sample = ResourceSample(
        step, time_s, usage.ru_utime + usage.ru_stime, pages * _PAGE_BYTES, open_files, threading.active_count()
    )
    file.write(json.dumps(asdict(sample)) + "\n")


def read_samples(path: Path) -> list[ResourceSample]:
    """Return the samples in a file that `write_sample` has written."""
    return [ResourceSample(**json.loads(line)) for line in path.read_text().splitlines()]
