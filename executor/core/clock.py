"""The clock of a run: seconds since an origin that all ranks agree on."""

import mmap
import struct
import time
from pathlib import Path


class RunClock:
    """Counts from an origin, a reading of the machine's monotonic clock.

    Args:
        origin_s: None where it is not yet agreed on: there is no time before `start`.
    """

    def __init__(self, origin_s: float | None = None) -> None:
        if origin_s is not None:
            self.start(origin_s)

    def start(self, origin_s: float) -> None:
        """Count from here."""
        self._origin_s = origin_s

    def adjust(self, later_s: float) -> None:
        """Show so much more, seconds; less if negative."""
        self._origin_s -= later_s

    def now_s(self) -> float:
        """Return the seconds since the start of the run; negative before it."""
        return time.monotonic() - self._origin_s

    def sleep_until(self, time_s: float) -> None:
        """Sleep until ``time_s`` seconds after the start; return at once if that is over."""
        remaining_s = time_s - self.now_s()
        if remaining_s > 0:
            time.sleep(remaining_s)


_RECORD = struct.Struct("d")


def create_origin(path: Path) -> None:
    """Write the file in which nothing is agreed yet."""
    path.write_bytes(bytes(_RECORD.size))


def announce_origin(path: Path, origin_s: float) -> None:
    """Say when the run starts: a reading of the machine's monotonic clock, in the future."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as content:
        _RECORD.pack_into(content, 0, origin_s)


class OriginWatch:
    """Looks whether the run's start is agreed; cheap enough to ask before each packet."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def origin_s(self) -> float | None:
        """Return when the run starts, machine seconds; None while nobody has said."""
        (origin_s,) = _RECORD.unpack_from(self._content)
        return origin_s or None
