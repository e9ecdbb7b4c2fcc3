"""Moves bytes between ranks: receives are posted ahead, sends never block, every message has its tag."""

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from executor.clock import RunClock
from executor.connection import Connection, EmulatedPath, Message
from executor.peers import blaming
from executor.shaper import LinkShaper
from planner.actions import Kind
from planner.cluster import Cluster
from planner.program import Transfer

# Neighbouring ranks are at most a step apart; four keep the tags of different steps apart with room to spare.
_STEPS_APART = 4
_MESSAGES_PER_STEP = 1 << 26
_CODES: Mapping[Kind, int] = {Kind.FORWARD: 0, Kind.BACKWARD: 1}
_SYNC_CODE = 2

# A ring of n devices takes 2(n - 1) rounds.
_MOST_ROUNDS = 1 << 10


class Receipt:
    """A receive that was posted."""

    def __init__(self, buffer: torch.Tensor, work: dist.Work, source: str) -> None:
        self._buffer = buffer
        self._work = work
        self._source = source

    def wait(self) -> torch.Tensor:
        """Return the bytes once they are there: uint8, one-dimensional.

        Raises:
            PeerLostError: The sender is gone.
        """
        with blaming(self._source):
            self._work.wait()
        return self._buffer


class Transport:
    """One rank's connections.

    Args:
        device: This rank's device.
        ranks: Device to rank.
        cluster: For the emulated links.
        clock: Of the run.
        shaper: Emulates the links; None leaves the network as it is.
        failed: Called from a sending thread that could not go on.
    """

    def __init__(
        self,
        device: str,
        ranks: Mapping[str, int],
        cluster: Cluster,
        clock: RunClock,
        shaper: LinkShaper | None,
        failed: Callable[[Exception], None],
    ) -> None:
        self._device = device
        self._ranks = ranks
        self._cluster = cluster
        self._clock = clock
        self._shaper = shaper
        self._failed = failed
        self._connections: dict[str, Connection] = {}

    def post(self, source: str, tag: int, size_bytes: int) -> Receipt:
        """Post a receive: gloo moves nothing before the receiver has said that it is ready."""
        buffer = torch.empty(size_bytes, dtype=torch.uint8)
        with blaming(source):
            work = dist.irecv(buffer, self._ranks[source], tag=tag)
        assert work is not None
        return Receipt(buffer, work, source)

    def send(
        self, target: str, tag: int, payload: torch.Tensor, ready_s: float, departed: Callable[[float], None]
    ) -> None:
        """Hand over ``payload`` (uint8, one-dimensional), which was ready at run second ``ready_s``.

        ``departed`` is told the run second at which its last byte has departed.
        """
        self._connection(target).send(Message(payload, tag, ready_s, departed))

    def close(self) -> None:
        """Wait until everything has been sent, and end all connections."""
        for connection in self._connections.values():
            connection.close()

    def _connection(self, target: str) -> Connection:
        if target not in self._connections:
            emulated = None
            if self._shaper is not None:
                emulated = EmulatedPath(self._shaper, self._cluster.path(self._device, target))
            self._connections[target] = Connection(target, self._ranks[target], self._clock, emulated, self._failed)
        return self._connections[target]


def transfer_tag(step: int, transfer: Transfer) -> int:
    """Return the tag of a transfer: unique between its two devices among all that can be under way."""
    return _tag(step, _CODES[transfer.kind], transfer.microbatch)


def sync_tag(step: int, first_layer: int, number: int) -> int:
    """Return the tag of round ``number`` of the sum of the gradients from ``first_layer`` on."""
    assert number < _MOST_ROUNDS
    return _tag(step, _SYNC_CODE, first_layer * _MOST_ROUNDS + number)


def _tag(step: int, code: int, index: int) -> int:
    assert index < _MESSAGES_PER_STEP
    return ((step % _STEPS_APART) * (len(_CODES) + 1) + code) * _MESSAGES_PER_STEP + index
