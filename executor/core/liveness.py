"""Whether the processes of the ranks still go on: each touches a file every second, which its agent checks.

A process that stands still keeps its connections: the others would wait for it as they do for a link that is out. Time
is counted in checks, so that a machine that is too busy for the ranks is too busy for the agent too. Code of the user
that never returns is not seen here: other threads of its process go on, and it may just be slow.
"""

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

from executor.core.timeouts import timeouts

# States of Linux' processes.
_ENDED = "ZX"
_STOPPED = "T"
_DEBUGGED = "t"


def beat_path(folder: Path, rank: int) -> Path:
    """Return the file in a job's folder that a rank's process touches while it goes on; it holds the process's id."""
    return folder / f"beat-{rank}"


def start_beating(folder: Path, rank: int) -> None:
    """Have a thread show that this process goes on, for as long as it does."""
    path = beat_path(folder, rank)
    path.write_text(str(os.getpid()))
    threading.Thread(target=_beat, args=(path, timeouts().heartbeat_s), name="heartbeat", daemon=True).start()


def _beat(path: Path, interval_s: float) -> None:
    # The folder of the run may be gone a moment before this process is.
    with suppress(FileNotFoundError):
        while True:
            os.utime(path)
            time.sleep(interval_s)


class LivenessProbe:
    """What is seen of one rank's process, check by check.

    Args:
        path: The file that it touches once it has begun.
        stopped_s: For how long a signal may stop the process, in seconds.
        silent_s: For how long it may show no sign of life, in seconds.
        pause_s: Time from one check to the next, in seconds.
    """

    def __init__(self, process: int, path: Path, stopped_s: float, silent_s: float, pause_s: float) -> None:
        self._state = Path(f"/proc/{process}/stat")
        self._path = path
        self._max_stopped = round(stopped_s / pause_s)
        self._max_silent = round(silent_s / pause_s)
        self._pause_s = pause_s
        self._beat_ns = 0
        self._silent = 0
        self._stopped = 0

    def check(self) -> str:
        """Return why the process must be ended; nothing if it goes on, or has ended."""
        try:
            state = self._state.read_text().rpartition(") ")[2][:1]
        except OSError:
            return ""
        if state in _ENDED:
            return ""
        try:
            beat_ns = self._path.stat().st_mtime_ns
        except OSError:
            # It has not begun, and touches nothing yet.
            beat_ns = self._beat_ns + 1
        self._stopped = self._stopped + 1 if state == _STOPPED else 0
        self._silent = self._silent + 1 if beat_ns == self._beat_ns and state != _DEBUGGED else 0
        self._beat_ns = beat_ns
        if self._stopped >= self._max_stopped:
            return f"its process was stopped by a signal, and did not go on for {self._stopped * self._pause_s:.0f} s"
        if self._silent >= self._max_silent:
            return f"its process has given no sign of life for {self._silent * self._pause_s:.0f} s"
        return ""
