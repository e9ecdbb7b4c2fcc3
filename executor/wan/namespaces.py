"""Linux namespaces for an ordinary process: a network of its own, without privileges and without any program."""

import ctypes
import os
import sys
from pathlib import Path

_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000


def isolate() -> None:
    """Move this process into a network namespace of its own in which it may do everything.

    A process that may not do this as it is does it in a new user namespace, where it is root and its files stay
    its user's. The process must have a single thread: load nothing that starts one before.

    Raises:
        OSError: The kernel forbids it.
    """
    try:
        _unshare(_CLONE_NEWNET)
    except PermissionError:
        user, group = os.getuid(), os.getgid()
        _unshare(_CLONE_NEWUSER | _CLONE_NEWNET)
        # Without this the kernel lets nobody map a group.
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")


def enter_new_network() -> int:
    """Move this thread into a new, empty network namespace; return a file descriptor that keeps it alive."""
    _unshare(_CLONE_NEWNET)
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def enter_network(path: str) -> None:
    """Move this thread, and all that it starts from now on, into the network namespace at ``path``.

    Raises:
        OSError: There is none, or this process may not enter it.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(_libc().setns(descriptor, _CLONE_NEWNET), "setns")
    finally:
        os.close(descriptor)


def _unshare(flags: int) -> None:
    _check(_libc().unshare(flags), "unshare")


def _libc() -> ctypes.CDLL:
    assert sys.platform == "linux", "the caller has checked this"
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, call: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
