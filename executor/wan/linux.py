"""TUN devices: network interfaces whose packets a process reads and writes.

The constants are those of the kernel's if_tun.h, sockios.h and if.h.
"""

import ctypes
import fcntl
import os
import socket
import struct
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


TUN_FILE = Path("/dev/net/tun")

# What an Ethernet of the internet carries.
MTU_BYTES = 1500

# Every packet read or written starts with a struct virtio_net_hdr of this size.
HEADER_BYTES = 10

_TUNSETIFF = 0x400454CA
_TUNSETOFFLOAD = 0x400454D0
_TUNSETVNETHDRSZ = 0x400454D8
_IFF_TUN = 0x0001
_IFF_NO_PI = 0x1000
_IFF_VNET_HDR = 0x4000
_TUN_F_CSUM = 0x01
_TUN_F_TSO4 = 0x02
_TUN_F_TSO6 = 0x04

_SIOCGIFFLAGS = 0x8913
_SIOCSIFFLAGS = 0x8914
_SIOCSIFADDR = 0x8916
_SIOCSIFNETMASK = 0x891C
_SIOCSIFMTU = 0x8922
_IFF_UP = 0x1

# struct ifreq: a name, then what the call is about.
_NAME_BYTES = 16
_REQUEST_BYTES = 40


def open_tun(name: str, address: str, netmask: str) -> int:
    """Make a TUN device in this thread's network namespace and set it up; return its file descriptor, non-blocking.

    The device goes when the descriptor is closed. TCP hands over up to 64 KiB as one packet, which whoever reads it
    takes for the segments that it stands for: this is what makes an interpreted relay fast enough.

    Args:
        name: Of the interface.
        address: IPv4.
        netmask: Of the network that is reached through it.

    Raises:
        OSError: The device file is not there or not accessible, or the kernel refuses.
    """
    descriptor = os.open(TUN_FILE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(descriptor, _TUNSETIFF, _request(name, struct.pack("H", _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR)))
        fcntl.ioctl(descriptor, _TUNSETVNETHDRSZ, struct.pack("i", HEADER_BYTES))
        fcntl.ioctl(descriptor, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4 | _TUN_F_TSO6)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            fcntl.ioctl(control, _SIOCSIFMTU, _request(name, struct.pack("i", MTU_BYTES)))
            fcntl.ioctl(control, _SIOCSIFADDR, _request(name, _internet_address(address)))
            fcntl.ioctl(control, _SIOCSIFNETMASK, _request(name, _internet_address(netmask)))
            _switch_on(control, name)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def switch_on_loopback() -> None:
    """Bring up the interface ``lo`` of this thread's network namespace.

    Raises:
        OSError: The namespace is not this process's own.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        _switch_on(control, "lo")


def _switch_on(control: socket.socket, name: str) -> None:
    (flags,) = struct.unpack_from("H", fcntl.ioctl(control, _SIOCGIFFLAGS, _request(name, b"")), _NAME_BYTES)
    fcntl.ioctl(control, _SIOCSIFFLAGS, _request(name, struct.pack("H", flags | _IFF_UP)))


def _request(name: str, argument: bytes) -> bytes:
    return struct.pack(f"{_NAME_BYTES}s", name.encode()) + argument.ljust(_REQUEST_BYTES - _NAME_BYTES, b"\0")


def _internet_address(address: str) -> bytes:
    """A struct sockaddr_in without a port."""
    return struct.pack("HH4s", socket.AF_INET, 0, socket.inet_aton(address))
