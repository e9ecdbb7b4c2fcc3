"""Telling the cause of a failure from what follows from it on the other ranks."""

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
from traces.common.errors import InputError, RopebridgeError, RunError


class PeerLostError(RunError):
    """The other end of a transfer is gone; the cause lies there."""


class SharedRunError(RunError):
    """What every rank of the run raises alike; the message names the ranks that it is about."""


class SharedInputError(InputError):
    """The same for wrong input."""


def rank_name(rank: int, device: str = "") -> str:
    """Return what a message calls a rank of this machine; ``device`` is empty where it is not known."""
    place = f"device '{device}', " if device else ""
    return f"rank {rank} ({place}host {socket.gethostname()})"


def first_line(error: BaseException) -> str:
    """Return what an error says, without the stack of C++ that torch appends."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


@contextmanager
def blaming(peer: str) -> Iterator[None]:
    """Turn what gloo raises when a peer is gone into an error that says so.

    Raises:
        PeerLostError: The transfer inside failed.
    """
    try:
        yield
    except RuntimeError as error:
        raise PeerLostError(f"lost the connection to device '{peer}': {first_line(error)}") from error


# How far from the cause.
_LOST_PEER = 2

# How the lines of torch's own log start, which tell that a rank failed and not why.
_TORCHS_OWN = re.compile(r"\[?[EWI]\d{4} ")
_TRACE = "Traceback (most recent call last):"


@dataclass(frozen=True, slots=True)
class RankFailure:
    """What a rank leaves when it cannot go on.

    Attributes:
        message: Names rank, device, host and cause.
        follows: How far from the cause it may be: 0 for an error of the rank's own, 1 for one that all ranks raise, 2
            for a lost peer.
        wrong_input: Whether the user can correct it.
        trace: The Python stack of an error that nobody foresaw, otherwise empty.
    """

    message: str
    follows: int = 0
    wrong_input: bool = False
    trace: str = ""

    @property
    def explains(self) -> bool:
        """Whether this says more than that another rank is lost."""
        return self.follows < _LOST_PEER

    @classmethod
    def of_error(cls, name: str, error: Exception) -> "RankFailure":
        """Return what the rank ``name`` says of an error."""
        shared = isinstance(error, SharedRunError | SharedInputError)
        message = str(error) or type(error).__name__
        return cls(
            message if shared else f"{name}: {message}",
            _LOST_PEER if isinstance(error, PeerLostError) else int(shared),
            isinstance(error, InputError),
            "" if isinstance(error, RopebridgeError) else "".join(traceback.format_exception(error)),
        )

    @classmethod
    def of_exit(cls, name: str, status: int, printed: str) -> "RankFailure":
        """Return what is known of a process that could write nothing down; a signal is a negative status."""
        if status < 0:
            return cls(f"{name} was ended by {_signal_name(-status)}")
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


def give_up(job: JobFolder, rank: int, name: str, error: Exception) -> Never:
    """Write down why this rank cannot go on, and end its process; its agent then tells the head."""
    failure = RankFailure.of_error(name, error)
    partial = job.of_rank("error", rank).with_suffix(f".{threading.get_ident()}")
    try:
        print(f"ropebridge: {failure.message}\n{failure.trace}", end="", file=sys.stderr, flush=True)
        partial.write_text(json.dumps(asdict(failure)))
        # Of several threads that give up, the first one's reason stays.
        with contextlib.suppress(FileExistsError):
            os.link(partial, job.of_rank("error", rank))
    finally:
        os._exit(2 if failure.wrong_input else 1)


def read_failure(job: JobFolder, rank: int) -> RankFailure | None:
    """Return why a rank gave up; None if it has written nothing."""
    try:
        return RankFailure(**json.loads(job.of_rank("error", rank).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
