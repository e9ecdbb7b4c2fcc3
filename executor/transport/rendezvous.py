"""How ranks are connected with each other by gloo."""

import os
import socket
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from executor.core.failures import PeerLostError, first_line
from executor.core.timeouts import timeouts
from traces.common.errors import RunError

_INTERFACE = "GLOO_SOCKET_IFNAME"


class ProcessGroups:
    """Groups over all ranks of a session, which make them together.

    Args:
        count: How many to begin with.
    """

    def __init__(self, count: int) -> None:
        everybody = dist.group.WORLD
        assert everybody is not None
        self._groups = [everybody]
        self.use(count)

    def use(self, count: int) -> None:
        """Use so many from now on; those that there are not yet are made, which all ranks must do at the same point."""
        while len(self._groups) < count:
            self._groups.append(dist.new_group(backend="gloo", timeout=_patience()))
        self.count = count

    def __getitem__(self, index: int) -> dist.ProcessGroup:
        return self._groups[index]


def _patience() -> timedelta:
    """Return how long gloo waits for a connection; who waits for a message says how long."""
    return timedelta(seconds=timeouts().connect_s)


def check_interface() -> None:
    """Refuse a network interface for gloo that this host does not have.

    Raises:
        RunError: Names it, and those that there are.
    """
    present = [name for _, name in socket.if_nameindex()]
    for name in filter(None, os.environ.get(_INTERFACE, "").split(",")):
        if name not in present:
            raise RunError(f"there is no network interface '{name}' ({_INTERFACE}); there are {', '.join(present)}")


def connect(store: Store, rank: int, ranks: int, name: str) -> None:
    """Make torch's default process group, which connects every two ranks.

    Args:
        store: Where ranks find each other's addresses.
        rank: Number of this one among those that connect.
        ranks: How many connect.
        name: What no other group has been called in this store.

    Raises:
        PeerLostError: Some ranks cannot be reached; names the network interface.
    """
    patience = _patience()
    try:
        dist.init_process_group("gloo", store=PrefixStore(name, store), rank=rank, world_size=ranks, timeout=patience)
    except RuntimeError as error:
        interface = os.environ.get(_INTERFACE)
        place = f"'{interface}' ({_INTERFACE})" if interface else f"of its host name (set {_INTERFACE} to choose one)"
        raise PeerLostError(
            f"cannot connect to the other ranks through the network interface {place}: {first_line(error)}"
        ) from error
