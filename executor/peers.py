"""Telling the cause of a failure from what follows from it on the other ranks."""

from collections.abc import Iterator
from contextlib import contextmanager

from traces.errors import RunError


class PeerLostError(RunError):
    """The other end of a transfer is gone; the cause lies there."""


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
        raise PeerLostError(f"lost the connection to device '{peer}': {error}") from error
