"""Telling the cause of a failure from what follows from it on the other ranks."""

import contextlib
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
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

    Args:
        peer: Name of the device at the other end.

    Raises:
        PeerLostError: The transfer inside failed.
    """
    try:
        yield
    except RuntimeError as error:
        raise PeerLostError(f"lost the connection to device '{peer}': {first_line(error)}") from error


# How far from the cause.
_LOST_PEER = 2


@dataclass(frozen=True, slots=True)
class RankFailure:
    """What a rank leaves when it cannot go on.

    Attributes:
        time_s: When, by the machine's monotonic clock, seconds.
        message: Names rank, device, host and cause.
        follows: How far from the cause it may be: 0 for an error of the rank's own, 1 for one that all ranks raise, 2
            for a lost peer.
        wrong_input: Whether it is for the user to correct.
        trace: The Python stack of an error that nobody foresaw, otherwise empty.
    """

    time_s: float
    message: str
    follows: int
    wrong_input: bool
    trace: str


def give_up(job: JobFolder, rank: int, name: str, error: Exception) -> Never:
    """Write down why this rank cannot go on, and end its process; who started it then ends the others.

    Args:
        job: Of the run.
        rank: This one.
        name: What messages call it.
        error: The reason.
    """
    words = _words(name, error)
    beside = job.error(rank).with_suffix(f".{threading.get_ident()}")
    try:
        print(f"ropebridge: {words.message}\n{words.trace}", end="", file=sys.stderr, flush=True)
        beside.write_text(json.dumps(asdict(words)))
        # Of several threads that give up, the first one's reason stays.
        with contextlib.suppress(FileExistsError):
            os.link(beside, job.error(rank))
    finally:
        os._exit(2 if words.wrong_input else 1)


def speak_for(job: JobFolder, rank: int, message: str) -> None:
    """Write down why a rank is ended that cannot say so itself; what it has said before stays.

    Args:
        job: Of the run.
        rank: Which.
        message: Names rank, device, host and cause.
    """
    words = RankFailure(time.monotonic(), message, follows=0, wrong_input=False, trace="")
    with contextlib.suppress(FileExistsError), job.error(rank).open("x") as file:
        file.write(json.dumps(asdict(words)))


def _words(name: str, error: Exception) -> RankFailure:
    shared = isinstance(error, SharedRunError | SharedInputError)
    message = str(error) or type(error).__name__
    return RankFailure(
        time.monotonic(),
        message if shared else f"{name}: {message}",
        _LOST_PEER if isinstance(error, PeerLostError) else int(shared),
        isinstance(error, InputError),
        "" if isinstance(error, RopebridgeError) else "".join(traceback.format_exception(error)),
    )


def read_cause(job: JobFolder, ranks: int) -> Exception | None:
    """Return the error that ended the run, from what its ranks have left; None if they left nothing."""
    left = [_read(job, rank) for rank in range(ranks) if job.error(rank).exists()]
    return _cause(left) if left else None


def is_explained(job: JobFolder, ranks: int) -> bool:
    """Return whether a rank has left more than that it has lost another one, or is about to."""
    try:
        return any(_read(job, rank).follows < _LOST_PEER for rank in range(ranks) if job.error(rank).exists())
    except ValueError:
        # Half-written.
        return True


def _read(job: JobFolder, rank: int) -> RankFailure:
    return RankFailure(**json.loads(job.error(rank).read_text()))


def _cause(left: Sequence[RankFailure]) -> Exception:
    cause = min(left, key=lambda words: (words.follows, words.time_s))
    if cause.wrong_input:
        return InputError(cause.message)
    error = RunError(cause.message)
    if cause.trace:
        error.add_note(cause.trace)
    return error
