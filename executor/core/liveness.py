"""Heartbeats, by which an agent finds stopped processes of ranks: each touches a file every second.

A stopped process keeps its connections open, so that for other ranks it looks like a link that is down. The agent
measures silence in its own checks instead of seconds: if the machine is too busy to run the ranks, it is also too busy
to run the checks. It also learns how irregular a rank's heartbeats are, and suspects only a silence far outside their
distribution, so that a rank which is merely slow lives on. User code that never returns is not detected, since the
heartbeat has a thread of its own.
"""

import os
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

from executor.core.timeouts import timeouts

# States of a process in /proc/PID/stat of Linux; see proc(5).
_ENDED = "ZX"
_STOPPED = "T"
_DEBUGGED = "t"

# A silence is suspicious if it is this many times as long as the longest pause between the last heartbeats.
_OUTSIDE = 2
_REMEMBERED = 256


def beat_path(folder: Path, rank: int) -> Path:
    """Return the path of a rank's heartbeat file, which contains the id of the rank's process."""
    return folder / f"beat-{rank}"


def start_beating(folder: Path, rank: int) -> None:
    """Start a daemon thread that touches the rank's heartbeat file for the life of this process."""
    path = beat_path(folder, rank)
    path.write_text(str(os.getpid()))
    threading.Thread(target=_beat, args=(path, timeouts().heartbeat_s), name="heartbeat", daemon=True).start()


def _beat(path: Path, interval_s: float) -> None:
    # The folder of the run may be removed a moment before this process ends.
    with suppress(FileNotFoundError):
        while True:
            os.utime(path)
            time.sleep(interval_s)


class LivenessProbe:
    """Decides, from one check to the next, whether a rank's process must be killed.

    Args:
        path: The heartbeat file, which the process creates after its start.
        stopped_s: The longest time for which a signal may stop the process, in seconds.
        silent_s: The longest time without a heartbeat if the earlier ones were regular, in seconds.
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
        # The pauses between the last heartbeats that were not regular, in checks.
        self._pauses: deque[int] = deque(maxlen=_REMEMBERED)

    def check(self) -> str:
        """Return why the process must be killed; an empty string if it runs, or has ended."""
        try:
            state = self._state.read_text().rpartition(") ")[2][:1]
        except OSError:
            return ""
        if state in _ENDED:
            return ""
        try:
            beat_ns = self._path.stat().st_mtime_ns
        except OSError:
            # There is no file before the process has started its heartbeat: count this as a beat.
            beat_ns = self._beat_ns + 1
        self._stopped = self._stopped + 1 if state == _STOPPED else 0
        if beat_ns == self._beat_ns and state != _DEBUGGED:
            self._silent += 1
        elif beat_ns != self._beat_ns:
            self._pauses.append(self._silent)
            self._silent = 0
        self._beat_ns = beat_ns
        if self._stopped >= self._max_stopped:
            return f"its process was stopped by a signal, and not continued for {self._stopped * self._pause_s:.0f} s"
        if self._silent >= max(self._max_silent, _OUTSIDE * max(self._pauses, default=0)):
            return f"its process has not touched its heartbeat file for {self._silent * self._pause_s:.0f} s"
        return ""
