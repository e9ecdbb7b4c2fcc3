"""Connects the ranks of a session with each other by gloo, through torch's process groups.

gloo's listening sockets authenticate nobody. As soon as all ranks are connected the kernel therefore drops whatever
comes to them: a stranger can disturb the moment of connecting, but not the training that follows.
"""

import ctypes
import os
import socket
import stat
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, distributed_c10d  # type: ignore[attr-defined]

from executor.core.failures import PeerLostError, first_line
from executor.core.timeouts import timeouts
from traces.common.errors import RunError

_INTERFACE = "GLOO_SOCKET_IFNAME"

# SO_ATTACH_FILTER of Linux, which Python does not name, and the filter of one instruction that drops every packet.
_ATTACH_FILTER = 26
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)


class ProcessGroups:
    """Several process groups of all ranks of a session: each has connections of its own between every two ranks.

    All ranks must create this object, and call `use`, at the same time.
    """

    def __init__(self, count: int) -> None:
        all_ranks = dist.group.WORLD
        assert all_ranks is not None
        self._groups = [all_ranks]
        self.use(count)

    def use(self, count: int) -> None:
        """Set the number of parallel connections, creating missing groups."""
        while len(self._groups) < count:
            with deaf_afterwards():
                self._groups.append(dist.new_group(backend="gloo", timeout=_connect_timeout()))
        self.count = count

    def __getitem__(self, index: int) -> dist.ProcessGroup:
        return self._groups[index]


# NCCL for tensors on GPUs, gloo for those on the CPU.
WITH_NCCL = "cpu:gloo,cuda:nccl"


def form_pair(one: int, other: int, backend: str = WITH_NCCL) -> dist.ProcessGroup | None:
    """Return a process group of two ranks on these, and None on others; all ranks form all pairs in the same order.

    Ranks cannot form pairs on their own: torch puts the number of a process's groups into the name of such a group, and
    two ranks with different numbers would wait for each other for ever.
    """
    timeout = timedelta(seconds=timeouts().recv_s)
    with deaf_afterwards():
        formed = dist.new_group([one, other], timeout=timeout, backend=backend)
    return formed if isinstance(formed, dist.ProcessGroup) else None


def _connect_timeout() -> timedelta:
    """Return how long gloo waits for a connection; the waits for messages have other timeouts."""
    return timedelta(seconds=timeouts().connect_s)


@contextmanager
def deaf_afterwards() -> Iterator[None]:
    """Return a context at whose end no more connections are accepted by the TCP sockets that began to listen in it."""
    before = _listening()
    yield
    instructions = ctypes.create_string_buffer(_DROP_ALL)
    program = struct.pack("HP", 1, ctypes.addressof(instructions))
    for number, descriptor in _listening().items():
        if number not in before:
            with socket.socket(fileno=os.dup(descriptor)) as listening:
                listening.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)


def _listening() -> dict[int, int]:
    """Return the listening TCP sockets of this process: descriptors by number of the socket; none but on Linux."""
    found = {}
    for descriptor in map(int, os.listdir("/proc/self/fd")) if sys.platform == "linux" else ():
        # The descriptor of the listing itself is closed, and other threads may close theirs.
        with suppress(OSError):
            state = os.fstat(descriptor)
            if not stat.S_ISSOCK(state.st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as each:
                if each.family != socket.AF_UNIX and each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found[state.st_ino] = descriptor
    return found


def check_interface() -> None:
    """Raise `RunError` if this host lacks a network interface that gloo is to use."""
    present = [name for _, name in socket.if_nameindex()]
    for name in filter(None, os.environ.get(_INTERFACE, "").split(",")):
        if name not in present:
            raise RunError(f"{_INTERFACE}: there is no network interface '{name}'; there are {', '.join(present)}")


def connect(store: Store, rank: int, ranks: int, name: str) -> None:
    """Create torch's default process group of a session's ranks; raise `PeerLostError` if some cannot be reached."""
    timeout = _connect_timeout()
    try:
        with deaf_afterwards():
            dist.init_process_group(
                "gloo", store=PrefixStore(name, store), rank=rank, world_size=ranks, timeout=timeout
            )
    except RuntimeError as error:
        # torch names groups by a counter, which it resets only when it destroys a group. After this failure the next
        # group must have the same name as on ranks whose processes are new.
        distributed_c10d._world.group_count = 0
        interface = os.environ.get(_INTERFACE)
        place = f"'{interface}' ({_INTERFACE})" if interface else f"of its host name (set {_INTERFACE} to choose one)"
        raise PeerLostError(
            f"cannot connect to the other ranks through the network interface {place}: {first_line(error)}"
        ) from error
