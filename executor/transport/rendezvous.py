"""Connections between ranks by gloo."""

import os
import socket
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, distributed_c10d  # type: ignore[attr-defined]

from executor.core.failures import PeerLostError, first_line
from executor.core.timeouts import timeouts
from traces.common.errors import RunError

_INTERFACE = "GLOO_SOCKET_IFNAME"


class ProcessGroups:
    """Process groups over all ranks of a session, each of which serves as one of several parallel connections.

    All ranks must create their object, and call `use`, together.
    """

    def __init__(self, count: int) -> None:
        all_ranks = dist.group.WORLD
        assert all_ranks is not None
        self._groups = [all_ranks]
        self.use(count)

    def use(self, count: int) -> None:
        """Set the number of parallel connections, creating missing groups."""
        while len(self._groups) < count:
            self._groups.append(dist.new_group(backend="gloo", timeout=_connect_timeout()))
        self.count = count

    def __getitem__(self, index: int) -> dist.ProcessGroup:
        return self._groups[index]


def _connect_timeout() -> timedelta:
    """Return how long gloo waits for a connection; waits for a message have timeouts of their own."""
    return timedelta(seconds=timeouts().connect_s)


def check_interface() -> None:
    """Check that this host has the network interfaces that gloo is to use.

    Raises:
        RunError: An interface is missing; the message lists those of this host.
    """
    present = [name for _, name in socket.if_nameindex()]
    for name in filter(None, os.environ.get(_INTERFACE, "").split(",")):
        if name not in present:
            raise RunError(f"there is no network interface '{name}' ({_INTERFACE}); there are {', '.join(present)}")


def connect(store: Store, rank: int, ranks: int, name: str) -> None:
    """Make torch's default process group, which connects every two ranks.

    Raises:
        PeerLostError: Some ranks cannot be reached; names the network interface.
    """
    timeout = _connect_timeout()
    try:
        dist.init_process_group("gloo", store=PrefixStore(name, store), rank=rank, world_size=ranks, timeout=timeout)
    except RuntimeError as error:
        # Torch names groups by a count that it resets only when it destroys a group: without this, a rank that fails
        # here would look for the others under another name than a new process does.
        distributed_c10d._world.group_count = 0
        interface = os.environ.get(_INTERFACE)
        place = f"'{interface}' ({_INTERFACE})" if interface else f"of its host name (set {_INTERFACE} to choose one)"
        raise PeerLostError(
            f"cannot connect to the other ranks through the network interface {place}: {first_line(error)}"
        ) from error
