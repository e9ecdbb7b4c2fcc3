"""Where the ranks of a run first meet: a store that all of them reach, and connections between every two of them.

To get there takes seconds or fails; only who is connected is patient with the network.
"""

import os
import socket
import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore  # type: ignore[attr-defined]

from executor.core.failures import first_line
from traces.common.errors import RunError


class ProcessGroups:
    """Groups over all ranks, which make them together.

    Args:
        count: How many to begin with.
        patience: How long a rank waits for another one.
    """

    def __init__(self, count: int, patience: timedelta) -> None:
        self._patience = patience
        everybody = dist.group.WORLD
        assert everybody is not None
        self._groups = [everybody]
        self.use(count)

    def use(self, count: int) -> None:
        """Use so many from now on; those that there are not yet are made, which all ranks must do at the same point."""
        while len(self._groups) < count:
            self._groups.append(dist.new_group(backend="gloo", timeout=self._patience))
        self.count = count

    def __getitem__(self, index: int) -> dist.ProcessGroup:
        return self._groups[index]


# For the store to answer, and for the connections between the ranks once all of them are there.
CONNECT_S = 15.0

_PAUSE_S = 0.1
_INTERFACE = "GLOO_SOCKET_IFNAME"


def holds_store(rank: int) -> bool:
    """Return whether this rank's own process holds the store; under torchrun its agent does."""
    return rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def reach_store(rank: int, connect_s: float = CONNECT_S) -> Store:
    """Return the store of the run, at MASTER_ADDR and MASTER_PORT.

    Args:
        rank: Who asks.
        connect_s: How long whoever holds it may take to start, seconds.

    Raises:
        RunError: It cannot be reached, or this rank should hold it and its port is in use.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    holds = holds_store(rank)
    if not holds:
        # torch says no more than that the time is over, and takes twice as long.
        _wait_for_listener(host, port, connect_s)
    try:
        store = TCPStore(
            host, port, is_master=holds, wait_for_workers=False, timeout=timedelta(seconds=connect_s), multi_tenant=True
        )
    except RuntimeError as error:
        if "EADDRINUSE" in str(error):
            raise RunError(f"cannot hold the rendezvous at {host}:{port}: the port is in use") from error
        raise RunError(f"cannot reach the rendezvous at {host}:{port}: {first_line(error)}") from error
    return PrefixStore("ropebridge", store)


def _wait_for_listener(host: str, port: int, connect_s: float) -> None:
    deadline_s = time.monotonic() + connect_s
    while True:
        try:
            socket.create_connection((host, port), timeout=connect_s).close()
            return
        except OSError as error:
            # A name that nobody knows will not be known in a moment.
            if isinstance(error, socket.gaierror) or time.monotonic() + _PAUSE_S > deadline_s:
                cause = error.strerror or str(error)
                raise RunError(f"cannot reach the rendezvous at {host}:{port}: {cause}") from error
        time.sleep(_PAUSE_S)


def check_interface() -> None:
    """Refuse a network interface for gloo that this host does not have.

    Raises:
        RunError: Names it, and those that there are.
    """
    present = [name for _, name in socket.if_nameindex()]
    for name in filter(None, os.environ.get(_INTERFACE, "").split(",")):
        if name not in present:
            raise RunError(f"there is no network interface '{name}' ({_INTERFACE}); there are {', '.join(present)}")


def try_connections(store: Store, rank: int, ranks: int, connect_s: float = CONNECT_S) -> ProcessGroupGloo:
    """Return connections to all other ranks, which must call this too.

    gloo waits as long for a connection as for a message on it: these only show that there is a way.

    Args:
        store: Of the run.
        rank: Who calls.
        ranks: Their number.
        connect_s: How long to wait for the others, seconds.

    Raises:
        RunError: Some cannot be reached; names the network interface.
    """
    try:
        return ProcessGroupGloo(PrefixStore("trial", store), rank, ranks, timedelta(seconds=connect_s))
    except RuntimeError as error:
        interface = os.environ.get(_INTERFACE)
        name = f"'{interface}' ({_INTERFACE})" if interface else f"of its host name (set {_INTERFACE} to choose one)"
        raise RunError(
            f"cannot connect to the other ranks through the network interface {name}: {first_line(error)}"
        ) from error


def connect(store: Store, rank: int, ranks: int, patience: timedelta, name: str) -> None:
    """Make torch's default process group, under a name that no other one has in this store.

    Who waits for something on it, without saying how long, waits as long as ``patience``; and so does who connects.
    """
    store.set_timeout(patience)
    dist.init_process_group("gloo", store=PrefixStore(name, store), rank=rank, world_size=ranks, timeout=patience)
