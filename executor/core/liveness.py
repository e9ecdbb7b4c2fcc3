"""Whether the processes of the ranks still go on: each touches a file every second, at which the agent looks.

A process that stands still keeps its connections: the others would wait for it as they do for a link that is out. Time
is counted in looks, so that a machine that is too busy for the ranks is too busy for the agent too. Code of the user
that never returns is not seen here: other threads of its process go on, and it may just be slow.
"""

import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from executor.core.failures import rank_name, speak_for
from executor.core.job import JobFolder

# States of Linux' processes.
_ENDED = "ZX"
_STOPPED = "T"
_DEBUGGED = "t"


def beat_path(folder: Path, rank: int) -> Path:
    """Return the file in a job's folder that a rank's process touches while it goes on; its number is in there."""
    return folder / f"beat-{rank}"


class LivenessProbe:
    """What is seen of one rank, look by look.

    Args:
        path: The file that it touches, which holds the id of its process.
        stopped_looks: At so many in a row a process may be found stopped by a signal before it must be ended.
        silent_looks: So many in a row may find no sign of life.
        pause_s: From one look to the next, seconds.
    """

    def __init__(
        self,
        path: Path,
        stopped_looks: int,
        silent_looks: int,
        pause_s: float,
    ) -> None:
        self._path = path
        self._stopped_looks = stopped_looks
        self._silent_looks = silent_looks
        self._pause_s = pause_s
        self._process = 0
        self._beat_ns = 0
        self._silent = 0
        self._stopped = 0

    def look(self) -> str:
        """Return why the rank must be ended; nothing if it goes on, has ended, or has not begun."""
        try:
            self._process, beat_ns = int(self._path.read_text()), self._path.stat().st_mtime_ns
            state = Path(f"/proc/{self._process}/stat").read_text().rpartition(") ")[2][:1]
        except (OSError, ValueError):
            return ""
        if state in _ENDED:
            return ""
        self._stopped = self._stopped + 1 if state == _STOPPED else 0
        self._silent = self._silent + 1 if beat_ns == self._beat_ns and state != _DEBUGGED else 0
        self._beat_ns = beat_ns
        if self._stopped >= self._stopped_looks:
            return f"its process was stopped by a signal, and did not go on for {self._stopped * self._pause_s:.0f} s"
        if self._silent >= self._silent_looks:
            return f"its process has given no sign of life for {self._silent * self._pause_s:.0f} s"
        return ""

    def end(self) -> None:
        """End the process, by the signal that is no cause of its own to the launcher."""
        with suppress(ProcessLookupError):
            os.kill(self._process, signal.SIGTERM)
            os.kill(self._process, signal.SIGCONT)


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
