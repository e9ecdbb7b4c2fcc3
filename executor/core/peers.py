"""Telling the cause of a failure from what follows from it on the other ranks."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from traces.common.errors import InputError, RunError


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
