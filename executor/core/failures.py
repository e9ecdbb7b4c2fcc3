"""Errors and reports of failed ranks, by which the cause of a failure is told from its effects on other ranks."""

import contextlib
import json
import os
import re
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Never

from executor.core.job import JobFolder
from executor.core.subprocesses import NO_ROOM
from planner.systems.user_code import described, raised_at
from traces.common.errors import InputError, RopebridgeError, RunError, unwritable


class PeerLostError(RunError):
    """The rank at the other end of a connection is lost, so the cause of the failure is on that rank."""


class SharedRunError(RunError):
    """An error that every rank raises with the same message, which names the ranks concerned."""


class SharedInputError(InputError):
    """An error in the user's input, which every rank raises with the same message; it names the ranks concerned."""


def rank_name(rank: int, device: str = "") -> str:
    """Return the name of a rank of this host for messages; ``device`` is empty if unknown."""
    place = f"device '{device}', " if device else ""
    return f"rank {rank} ({place}host {socket.gethostname()})"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, without the C++ stack that torch appends."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


@contextmanager
def blaming(peer: str = "") -> Iterator[None]:
    """Turn gloo's error in the context into a `PeerLostError` that names the device ``peer``, if it is known."""
    try:
        yield
    except RuntimeError as error:
        place = f"device '{peer}'" if peer else "another rank"
        raise PeerLostError(f"lost the connection to {place}: {first_line(error)}") from error


# The value of `RankFailure.follows` for the loss of a peer.
_LOST_PEER = 2

# What is said of a process that has ended with `NO_ROOM`.
FULL_DISK = "the disk is full or read-only; make room, or choose another place"

# The start of a line of torch's own log, such as "[E1123 ": such a line never gives the cause of a failure.
_TORCHS_OWN = re.compile(r"\[?[EWI]\d{4} ")
_TRACE = "Traceback (most recent call last):"


@dataclass(frozen=True, slots=True)
class RankFailure:
    """The failure that a rank reports when it cannot continue.

    Attributes:
        message: One sentence with rank, device, host and cause.
        follows: Distance from the cause: 0 for an error of this rank, 1 for an error that all ranks raise, 2 for a lost
            peer. Of several failures, the run ends with the one with the smallest distance.
        wrong_input: Whether the user's input is the cause.
        trace: The Python traceback of an unexpected error, otherwise empty.
    """

    message: str
    follows: int = 0
    wrong_input: bool = False
    trace: str = ""

    @property
    def explains(self) -> bool:
        """Whether the failure is more than the loss of another rank."""
        return self.follows < _LOST_PEER

    @classmethod
    def of_error(cls, name: str, error: BaseException) -> "RankFailure":
        """Return the failure of a rank that has raised an error; one of the user's code names its line."""
        if full := unwritable(error):
            return cls(f"{name}: {full}")
        if not isinstance(error, RopebridgeError):
            if (place := raised_at(error)) is not None:
                return cls(f"{name}: {place}: {described(error)}")
            trace = "".join(traceback.format_exception(error))
            return cls(f"{name}: {str(error) or type(error).__name__}", trace=trace)
        shared = isinstance(error, SharedRunError | SharedInputError)
        return cls(
            str(error) if shared else f"{name}: {error}",
            _LOST_PEER if isinstance(error, PeerLostError) else int(shared),
            isinstance(error, InputError),
        )

    @classmethod
    def of_exit(cls, name: str, status: int, printed: str) -> "RankFailure":
        """Return the failure of a process that has ended without a report, by its exit status and its output.

        A negative status is the negative number of the signal that has ended the process.
        """
        if status < 0:
            return cls(f"{name} was ended by {_signal_name(-status)}")
        if status == NO_ROOM:
            return cls(f"{name}: its files cannot be written: {FULL_DISK}")
        lines = printed.strip().splitlines()
        said = [line for line in lines if not _TORCHS_OWN.match(line)] or lines
        trace = "\n".join(said[len(said) - 1 - said[::-1].index(_TRACE) :]) if _TRACE in said else ""
        reason = " | ".join(map(str.strip, said[-3:])) or "no message"
        return cls(f"{name} ended with status {status}: {reason}", follows=1, trace=trace)

    def to_error(self) -> Exception:
        """Return the error with which the run ends."""
        error = InputError(self.message) if self.wrong_input else RunError(self.message)
        if self.trace:
            error.add_note(self.trace)
        return error


def give_up(job: JobFolder, rank: int, name: str, error: BaseException) -> Never:
    """Write the failure to the rank's error file, and end this process; the agent sends the file to the head."""
    failure = RankFailure.of_error(name, error)
    partial = job.of_rank("error", rank).with_suffix(f".{threading.get_ident()}")
    status = 2 if failure.wrong_input else 1
    try:
        print(f"ropebridge: {failure.message}\n{failure.trace}", end="", file=sys.stderr, flush=True)
        partial.write_text(json.dumps(asdict(failure)))
        # If several threads fail, the file of the first one stays.
        with contextlib.suppress(FileExistsError):
            os.link(partial, job.of_rank("error", rank))
    except OSError as error:
        status = NO_ROOM if unwritable(error) else status
    finally:
        os._exit(status)


def read_failure(job: JobFolder, rank: int) -> RankFailure | None:
    """Return the failure in a rank's error file; None if there is none."""
    try:
        return RankFailure(**json.loads(job.of_rank("error", rank).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
