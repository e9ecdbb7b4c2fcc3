"""Whether a process still goes on, from what the kernel says of it and from a file that it touches."""

import os
import signal
from contextlib import suppress
from pathlib import Path

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
