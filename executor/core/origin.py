"""Second 0 of a run, as rank 0 tells it to the relay: eight bytes in a file that both have mapped."""

import mmap
import struct
from pathlib import Path

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
