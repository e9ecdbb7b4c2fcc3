"""Outcomes of points, and the logs into which workers write them line by line."""

import json
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from traces.common.errors import InputError, RunError

OK, FAILED = "ok", "failed"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a point.

    Attributes:
        key: The point's key, see `experiments.sweep.points.Point`.
        status: `OK` or `FAILED`.
        error: Error of a failed point; empty for a point that succeeded.
        metrics: Maps the name of a metric to its value; empty if the point failed.
        ended_s: Time of the point's end, seconds since 1970.
    """

    key: str
    status: str
    error: str
    metrics: Mapping[str, float | int | str]
    wall_s: float
    ended_s: float


class OutcomeLog:
    """A log file of one process with a line for each outcome; lines are kept even if the process is killed."""

    def __init__(self, folder: Path) -> None:
        name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}.jsonl"
        try:
            # Without a buffer each line is one write, which a kill cannot divide.
            self._file = (folder / name).open("xb", buffering=0)
        except OSError as error:
            raise RunError(f"{folder / name}: cannot be written: {error.strerror}") from error

    def write(self, outcome: Outcome) -> None:
        """Append an outcome; raise RunError if the disk is full or gone."""
        line = json.dumps(asdict(outcome)).encode() + b"\n"
        try:
            whole = self._file.write(line) == len(line)
        except OSError as error:
            raise self._refusal(error.strerror) from error
        if not whole:
            raise self._refusal("a line was cut off")

    def keep(self) -> None:
        """Flush appended outcomes to the disk; raise RunError if it is full or gone."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._refusal(error.strerror) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _refusal(self, problem: str | None) -> RunError:
        return RunError(f"{self._file.name}: cannot be written: {problem}; the outcomes in the file are kept")


def read_outcomes(folder: Path) -> dict[str, Outcome]:
    """Return the outcomes in all logs of a folder, by the key of their point.

    If a point has several outcomes, the latest success counts, or else the latest failure. A last line that is
    incomplete, since its process was killed, is ignored.

    Raises:
        InputError: A log is damaged.
    """
    outcomes: dict[str, Outcome] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
            try:
                outcome = _outcome(json.loads(line))
            except (ValueError, TypeError) as error:
                where, valid = f"{path}:{number}", "remove this file: its points are then done again"
                raise InputError(f"the log is damaged: {error}", where=where, valid=valid) from None
            before = outcomes.get(outcome.key)
            if before is None or _rank(outcome) > _rank(before):
                outcomes[outcome.key] = outcome
    return outcomes


def _rank(outcome: Outcome) -> tuple[bool, float]:
    return outcome.status == OK, outcome.ended_s


def _outcome(data: Any) -> Outcome:
    if not isinstance(data, dict) or set(data) != {field.name for field in fields(Outcome)}:
        raise ValueError("a line is no outcome")
    return Outcome(**data)
