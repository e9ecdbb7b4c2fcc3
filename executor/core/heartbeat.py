"""Whether the processes of the ranks still go on: each touches a file every second, at which the agent looks.

A process that stands still keeps its connections: the others would wait for it as they do for a link that is out. Time
is counted in looks, so that a machine that is too busy for the ranks is too busy for the agent too. Code of the user
that never returns is not seen here: other threads of its process go on, and it may just be slow.
"""

import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from executor.core.job import JobFolder
from executor.core.last_words import speak_for
from executor.core.peers import rank_name
from executor.core.pulse import LivenessProbe, beat_path

_PAUSE_S = 1.0

# Who was stopped by a signal goes on when somebody says so, which may be about to happen.
STOPPED_LOOKS = 10
# Long enough for code that lets no other thread of its process run, as some extensions do.
SILENT_LOOKS = 60


def start_beating(job: JobFolder, rank: int) -> None:
    """Have a thread show that this process goes on, for as long as it does."""
    path = beat_path(job.path, rank)
    path.write_text(str(os.getpid()))
    threading.Thread(target=_beat, args=(path,), name="heartbeat", daemon=True).start()


def watch_ranks(job: JobFolder, devices: Sequence[str]) -> None:
    """Have a thread end every rank that stands still, and write down that it did; ``devices`` are in rank order."""
    threading.Thread(target=_watch, args=(job, devices), name="heartbeats", daemon=True).start()


def _beat(path: Path) -> None:
    # The folder of the run may be gone a moment before this process is.
    with suppress(FileNotFoundError):
        while True:
            os.utime(path)
            time.sleep(_PAUSE_S)


def _watch(job: JobFolder, devices: Sequence[str]) -> None:
    pulses = [
        LivenessProbe(beat_path(job.path, rank), STOPPED_LOOKS, SILENT_LOOKS, _PAUSE_S) for rank in range(len(devices))
    ]
    while True:
        time.sleep(_PAUSE_S)
        for rank, pulse in enumerate(pulses):
            if reason := pulse.look():
                speak_for(job, rank, f"{rank_name(rank, devices[rank])}: {reason}")
                pulse.end()
