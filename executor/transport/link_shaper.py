"""Emulates links inside the processes of the ranks, which share a ledger: a file with the time until each link is busy.

The time in which this machine delivers a message is measured before the run, and subtracted from emulated latencies.
"""

import fcntl
import mmap
import os
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from executor.core.clock import RunClock
from planner.scenario.cluster import LONGEST_OUTAGE_S, Cluster, Link
from traces.common.errors import RunError

# Messages are sent in chunks that take this time on their link, so that several senders share the link by turns.
CHUNK_S = 0.005

# The smallest chunk: it takes longer to reserve a smaller one than to send it.
LEAST_CHUNK_BITS = 8 * 16 * 1024

_RECORD = struct.Struct("d")

# The exchange of messages that measures this machine's delivery time.
_ROUNDS = 20
_PAUSE_S = 0.003
_SIZE_BYTES = 32 * 1024
_TAG = 1


class LinkShaper:
    """One process's access to the emulated links.

    Args:
        ledger: Path of the file that all processes share; the first process creates it.

    Attributes:
        local_delivery_s: Time in which this machine delivers a message, subtracted from emulated latencies.
    """

    def __init__(self, ledger: Path, cluster: Cluster, clock: RunClock) -> None:
        self._cluster = cluster
        self._clock = clock
        self.local_delivery_s = 0.0
        self._index = {link.name: index for index, link in enumerate((*cluster.links, *cluster.interfaces))}
        self._file = os.open(ledger, os.O_RDWR | os.O_CREAT, 0o600)
        # A new file gets zeros; the file of another process has this size already.
        os.ftruncate(self._file, _RECORD.size * max(1, len(self._index)))
        self._taken_until = mmap.mmap(self._file, 0)
        # POSIX file locks exclude other processes, but not other threads of this one.
        self._lock = threading.Lock()

    def close(self) -> None:
        """Release the ledger."""
        self._taken_until.close()
        os.close(self._file)

    def between(self, source: str, target: str) -> "ShapedPath":
        """Return the emulated path from one device to another."""
        return ShapedPath(self, self._cluster.path(source, target))

    def transmit(self, path: Sequence[Link], bits: float, ready_s: float) -> float:
        """Wait while the links of ``path`` carry ``bits``; return the run second at which the last bit departed."""
        cursor_s = max(ready_s, 0.0)
        while bits > 0:
            chunk_bits = min(bits, max(LEAST_CHUNK_BITS, min(_bits_soon(link, cursor_s) for link in path)))
            cursor_s = self._reserve(path, chunk_bits, cursor_s)
            bits -= chunk_bits
            self._clock.sleep_until(cursor_s)
        return cursor_s

    def delivery_s(self, path: Sequence[Link], departed_s: float) -> float:
        """Return the run second at which gloo must send a message, so that it arrives as over the links of ``path``."""
        latency_s = sum(link.latency_at_s(departed_s) for link in path)
        return departed_s + max(0.0, latency_s - self.local_delivery_s)

    def _reserve(self, path: Sequence[Link], bits: float, earliest_s: float) -> float:
        """Reserve the links for one chunk; return the run second at which the chunk has departed from all of them.

        Each link carries the chunk as soon as the link is free, so that a fast link does not wait for a slow one.
        """
        with self._lock:
            fcntl.lockf(self._file, fcntl.LOCK_EX)
            try:
                return max(self._take(link, bits, earliest_s) for link in path)
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN)

    def _take(self, link: Link, bits: float, earliest_s: float) -> float:
        """Record in the ledger that a link carries another chunk; return the run second at which the chunk has left."""
        offset = _RECORD.size * self._index[link.name]
        start_s = max(earliest_s, _RECORD.unpack_from(self._taken_until, offset)[0])
        end_s = start_s + _seconds_for(link, bits, start_s)
        if end_s - start_s > LONGEST_OUTAGE_S:
            raise RunError(
                f"link {link.name} carries nothing for {LONGEST_OUTAGE_S:g} s from {start_s:.3f} s of the run on; its "
                "trace must rise above zero again"
            )
        _RECORD.pack_into(self._taken_until, offset, end_s)
        return float(end_s)


@dataclass(frozen=True, slots=True)
class ShapedPath:
    """The emulated links of a path, for the messages from one device to another."""

    _shaper: LinkShaper
    _path: tuple[Link, ...]

    def transmit(self, bits: float, ready_s: float, flows: int) -> float:
        """Wait while the links carry ``bits``, whose rate does not depend on the number of flows; return the end."""
        return self._shaper.transmit(self._path, bits, ready_s)

    def delivery_s(self, departed_s: float) -> float:
        """Return the run second at which gloo must send a message, so that it arrives as over the links."""
        return self._shaper.delivery_s(self._path, departed_s)


def _bits_soon(link: Link, start_s: float) -> float:
    if link.trace is None:
        return link.bandwidth_bps * CHUNK_S
    return float(link.trace.bits_between(start_s, start_s + CHUNK_S))


def _seconds_for(link: Link, bits: float, start_s: float) -> float:
    if link.trace is None:
        return bits / link.bandwidth_bps
    return float(link.trace.time_to_send(bits, start_s))


def measure_local_delivery_s(rank: int, ranks: int) -> float:
    """Return the time in seconds from a message's due time at the sender until a waiting rank has received it.

    The time includes late wake-ups of sender and receiver. Ranks measure in pairs, all pairs at the same time; the
    result is the mean of the pairs' medians. All ranks of one machine must call this together.
    """
    partner = rank ^ 1
    result = torch.zeros(2, dtype=torch.float64)
    if partner < ranks:
        if rank < partner:
            _send(partner)
        else:
            result[0], result[1] = median(_receive(partner) for _ in range(_ROUNDS)), 1.0
    dist.all_reduce(result)
    return float(result[0] / result[1]) if result[1] else 0.0


def _send(partner: int) -> None:
    message = torch.zeros(_SIZE_BYTES // 8, dtype=torch.float64)
    for _ in range(_ROUNDS):
        due_s = time.monotonic() + _PAUSE_S
        message[0] = due_s
        time.sleep(_PAUSE_S)
        dist.send(message, partner, tag=_TAG)


def _receive(partner: int) -> float:
    message = torch.empty(_SIZE_BYTES // 8, dtype=torch.float64)
    dist.recv(message, partner, tag=_TAG)
    return time.monotonic() - float(message[0])
