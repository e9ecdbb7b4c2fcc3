"""A trace file that grows row by row while a link is measured, and that a crash cannot damage.

A recording is CSV as `traces.formats.csv_units` reads it. Each row is on the disk before the next one is measured; a
last row without line end, left by a crash, is ignored. Times exclude pauses of the recording, for which there is no
rate.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

from traces.common.atomic import check_place
from traces.common.errors import InputError, RunError
from traces.common.locks import lock_file
from traces.formats import csv_units

_HEADER = csv_units.RECORDING_HEADER.encode()
_VALID = "name a new file, or one that 'ropebridge traces record' began"


@dataclass(frozen=True, slots=True)
class Sample:
    """A measurement of a link at one time.

    Attributes:
        bandwidth_bps: Rate of the link, bits per second; 0 in an outage.
        latency_s: One-way latency, seconds.
    """

    bandwidth_bps: float
    latency_s: float


class Recording:
    """A file that samples are appended to: a context manager that locks it for this process.

    Nothing is written before the first sample.

    Args:
        path: Path of the file; an existing recording is continued.

    Attributes:
        end_s: End of the recording so far, seconds.
        latency_s: Latency of the last sample, seconds; None without one.

    Raises:
        InputError: The file cannot be created, is not a recording, or another process appends to it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.end_s = 0.0
        self.samples = 0
        self.latency_s: float | None = None
        self._latest_ms = -1
        self._whole_bytes = 0
        self._file: BinaryIO | None = None

    def __enter__(self) -> Self:
        check_place(self.path)
        if self.path.exists() and not self.path.is_file():
            raise InputError("is not a file", str(self.path), "name a file to write")
        if not self.path.exists():
            if not os.access(self.path.parent, os.W_OK):
                raise InputError("cannot be written: Permission denied", str(self.path), "choose another folder")
            return self
        try:
            self._open("r+b")
            self._resume()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._close()

    def append(self, time_s: float, sample: Sample) -> None:
        """Append a sample, and wait until it is on the disk.

        Raises:
            InputError: The file cannot be created.
            RunError: The file cannot be written any more.
        """
        time_ms = max(round(1000 * time_s), self._latest_ms + 1)
        row = f"{time_ms / 1000:.3f},{sample.bandwidth_bps / 1e6:.6f},{1000 * sample.latency_s:.3f}\n".encode()
        if self._file is None:
            self._open("x+b")
        assert self._file is not None
        if not self._whole_bytes:
            row = _HEADER + row
        try:
            # Remove a row that an earlier recorder did not finish.
            self._file.truncate(self._whole_bytes)
            if os.pwrite(self._file.fileno(), row, self._whole_bytes) < len(row):
                raise OSError(0, "no space left")
            os.fsync(self._file)
        except OSError as error:
            if not self._whole_bytes:
                self.path.unlink()
            raise RunError(f"{self.path} cannot be written: {error.strerror}; its earlier rows are kept") from error
        self._whole_bytes += len(row)
        self._latest_ms, self.latency_s = time_ms, sample.latency_s
        self.samples += 1

    def _open(self, mode: str) -> None:
        try:
            self._file = lock_file(self.path, mode)
            if mode.startswith("x"):
                # The folder's entry must be on the disk as well.
                folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
                os.fsync(folder)
                os.close(folder)
        except BlockingIOError:
            raise InputError("another recorder writes this file", str(self.path), "name another file") from None
        except OSError as error:
            raise InputError(f"cannot be written: {error.strerror}", str(self.path), "choose another folder") from error

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _resume(self) -> None:
        """Find where an existing recording ends.

        Raises:
            InputError: The file is not a recording.
        """
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if _HEADER.startswith(content):
            return
        if not whole.startswith(_HEADER):
            raise InputError("is not a recording", str(self.path), _VALID)
        if whole == _HEADER:
            return
        try:
            trace = csv_units.read(whole.decode())
        except (InputError, UnicodeDecodeError) as error:
            raise InputError(f"the recording is damaged: {error}", str(self.path), _VALID) from error
        rows = whole.splitlines()
        if len(trace.times_s) != len(rows) - 1:
            problem = "the recording has a last row with its end, after which nothing can be appended"
            raise InputError(problem, str(self.path), f"remove this row, or {_VALID}")
        first_s = float(rows[1].split(b",")[0])
        assert trace.latency_s is not None
        self.end_s = first_s + trace.duration_s
        self.samples = len(trace.times_s)
        self.latency_s = float(trace.latency_s[-1])
        self._latest_ms = round(1000 * (first_s + float(trace.times_s[-1])))
        self._whole_bytes = len(whole)
