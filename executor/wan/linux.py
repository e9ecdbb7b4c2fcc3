"""Functions for network namespaces, TUN devices and TCP settings of Linux.

As a program, ``python -m executor.wan.linux run PARENT_PID COMMAND...`` runs a command in a network namespace of its
own, ``... enter NETWORK USERS COMMAND...`` in an existing one, and ``... probe`` prints what this machine lacks for the
test bed. All need a process with a single thread, as the kernel demands of a process that makes or enters a user
namespace: this module imports nothing that starts threads. Constants are those of the kernel's sched.h, if_tun.h,
sockios.h and if.h.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from executor.core.subprocesses import die_with_parent

# Environment variable of a process in a new network namespace: the result of `read_tcp` in the previous one, as JSON.
HOST_TCP = "ROPEBRIDGE_HOST_TCP"

_FOLDER = Path("/proc/sys/net/ipv4")

# The settings that decide how fast and how far TCP enlarges a window; each network namespace has its own values.
_NAMES = ("tcp_congestion_control", "tcp_slow_start_after_idle", "tcp_wmem", "tcp_rmem")

# Acceptable values of each setting, the preferred one first.
#
# Congestion control: Linux' default, or Reno, which every user may choose. Both enlarge a window until a packet is
# lost, as `sim.network.connection` assumes. BBR, for example, paces by measurements, with a pause of 200 ms every ten
# seconds, so that the same run would take different times on different machines.
#
# Slow start after idle: a pipeline's links are idle for a part of every step. By default Linux halves the window for
# every retransmission timeout without traffic, so that each step would begin with a slow start.
WIDE_AREA: Mapping[str, Sequence[str]] = {
    "tcp_congestion_control": ("cubic", "reno"),
    "tcp_slow_start_after_idle": ("0",),
}


def as_on(host: Mapping[str, str]) -> Mapping[str, Sequence[str]]:
    """Return the settings of a host in the form of `WIDE_AREA`, with one acceptable value each."""
    return {name: (value,) for name, value in host.items()}


def read_tcp() -> dict[str, str]:
    """Return the settings of this thread's network namespace, without those that cannot be read."""
    found = {}
    for name in _NAMES:
        with contextlib.suppress(OSError):
            found[name] = " ".join((_FOLDER / name).read_text().split())
    return found


def set_tcp(wanted: Mapping[str, Sequence[str]]) -> list[str]:
    """Set each TCP setting of this thread's network namespace to the first of its wanted values that is allowed.

    Returns:
        A phrase for each setting that has none of its wanted values, with the reason.
    """
    misses = []
    for name, values in wanted.items():
        reason = _set_first(name, values)
        found = read_tcp().get(name)
        if found not in values:
            misses.append(f"{name} is {found or 'unknown'}, not {' or '.join(values)} ({reason})")
    return misses


def _set_first(name: str, values: Sequence[str]) -> str:
    """Set a setting to the first value that the kernel accepts; return why the last other value was refused."""
    reason = "it did not take effect"
    for value in values:
        try:
            (_FOLDER / name).write_text(value)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
        else:
            break
    return reason


TUN_FILE = Path("/dev/net/tun")

# The MTU of Ethernet.
MTU_BYTES = 1500

# Packets that a TUN device holds until they are read; it drops further ones without an error. A sender whose
# acknowledgements arrive all at once sends a whole window at once, in packets of a few segments each: with the kernel's
# 500, windows of a megabyte were cut in half again and again (measured: 1.4 times the time of a step).
_QUEUED_PACKETS = 1 << 16

# Every packet read or written starts with a struct virtio_net_hdr of this size.
HEADER_BYTES = 10

_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000

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
_SIOCSIFTXQLEN = 0x8943
_IFF_UP = 0x1

# Sizes in struct ifreq: of an interface name, and of the whole struct, which also contains the request's argument.
_NAME_BYTES = 16
_REQUEST_BYTES = 40

# Settings that can forbid user namespaces to ordinary users: sysctl, the value that forbids, and one that allows them.
_SYSCTLS = (
    ("kernel/unprivileged_userns_clone", "0", "1"),
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "0"),
    ("user/max_user_namespaces", "0", "10000"),
)


def isolate() -> None:
    """Move this process, which must have a single thread, into a new network namespace that it may configure.

    Without the privilege for this, the process also enters a new user namespace, in which it is root; its files still
    belong to its user outside.

    Raises:
        OSError: The kernel forbids it.
    """
    try:
        _unshare(_CLONE_NEWNET)
    except PermissionError:
        user, group = os.getuid(), os.getgid()
        _unshare(_CLONE_NEWUSER | _CLONE_NEWNET)
        # The kernel accepts a mapping of groups only after this.
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")


def enter_new_network() -> int:
    """Move this thread into a new network namespace; return a file descriptor that keeps the namespace alive."""
    _unshare(_CLONE_NEWNET)
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def enter_network(path: str) -> None:
    """Move this thread, and threads that it starts later, into the network namespace at ``path``."""
    _enter(path, _CLONE_NEWNET)


def enter_users(path: str) -> None:
    """Move this process, which must have a single thread, into the user namespace at ``path``, unless it is in it."""
    if os.readlink(path) == os.readlink("/proc/self/ns/user"):
        return
    _enter(path, _CLONE_NEWUSER)


def _enter(path: str, kind: int) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(_libc().setns(descriptor, kind), "setns")
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


def open_tun(name: str, address: str, netmask: str) -> int:
    """Create and configure a TUN device in this thread's network namespace; it exists until its descriptor is closed.

    The kernel writes up to 64 KiB of TCP segments to the device as one packet (see executor/wan/packets.py): otherwise
    a relay in Python would be too slow.

    Returns:
        A non-blocking file descriptor.

    Raises:
        OSError: The device file is missing or not accessible, or the kernel refuses.
    """
    descriptor = os.open(TUN_FILE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(descriptor, _TUNSETIFF, _request(name, struct.pack("H", _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR)))
        fcntl.ioctl(descriptor, _TUNSETVNETHDRSZ, struct.pack("i", HEADER_BYTES))
        fcntl.ioctl(descriptor, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4 | _TUN_F_TSO6)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            fcntl.ioctl(control, _SIOCSIFMTU, _request(name, struct.pack("i", MTU_BYTES)))
            fcntl.ioctl(control, _SIOCSIFADDR, _request(name, _socket_address(address)))
            fcntl.ioctl(control, _SIOCSIFNETMASK, _request(name, _socket_address(netmask)))
            fcntl.ioctl(control, _SIOCSIFTXQLEN, _request(name, struct.pack("i", _QUEUED_PACKETS)))
            _switch_on(control, name)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_traffic_counts() -> TextIO:
    """Open the kernel's counts of the interfaces in this thread's network namespace, for `dropped_packets`."""
    return Path("/proc/thread-self/net/dev").open()


def dropped_packets(counts: TextIO, name: str) -> int:
    """Return how many packets the interface ``name`` has dropped since they were not read in time."""
    counts.seek(0)
    (line,) = (line for line in counts if line.strip().startswith(f"{name}:"))
    # Eight fields on received packets, and then of sent ones: bytes, packets, errors, drops.
    return int(line.split(":")[1].split()[11])


def switch_on_loopback() -> None:
    """Bring up the interface ``lo`` of this thread's network namespace, which must be this process's own."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        _switch_on(control, "lo")


def _switch_on(control: socket.socket, name: str) -> None:
    (flags,) = struct.unpack_from("H", fcntl.ioctl(control, _SIOCGIFFLAGS, _request(name, b"")), _NAME_BYTES)
    fcntl.ioctl(control, _SIOCSIFFLAGS, _request(name, struct.pack("H", flags | _IFF_UP)))


def _request(name: str, argument: bytes) -> bytes:
    return struct.pack(f"{_NAME_BYTES}s", name.encode()) + argument.ljust(_REQUEST_BYTES - _NAME_BYTES, b"\0")


def _socket_address(address: str) -> bytes:
    """Return a struct sockaddr_in without a port."""
    return struct.pack("HH4s", socket.AF_INET, 0, socket.inet_aton(address))


def leave_network(parent: int) -> None:
    """Call `isolate`, set `HOST_TCP` in the environment, and let this process end with the process ``parent``."""
    os.environ[HOST_TCP] = json.dumps(read_tcp())
    isolate()
    # After `isolate`, since the kernel may drop this setting when the namespace changes; exec keeps it.
    die_with_parent(parent)
    switch_on_loopback()


def run_isolated(parent: str, *command: str) -> None:
    """Isolate this process, and run ``command`` in its place."""
    leave_network(int(parent))
    os.execv(command[0], command)


def run_in_network(network: str, users: str, *command: str) -> None:
    """Run ``command`` in place of this process, in the network namespace and the user namespace at these paths."""
    enter_users(users)
    enter_network(network)
    os.execv(command[0], command)


def find_missing() -> str | None:
    """Try what the relay needs; return a sentence on what the kernel or its configuration forbids; None if nothing."""
    try:
        isolate()
        switch_on_loopback()
    except OSError as error:
        return f"the kernel refuses a user and network namespace ({error.strerror}); {_remedy()}"
    try:
        open_tun("tun0", "10.99.0.1", "255.255.0.0")
        namespace = enter_new_network()
        open_tun("tun0", "10.99.0.2", "255.255.0.0")
    except FileNotFoundError:
        return f"{TUN_FILE} is missing: load the kernel module 'tun', or pass the device file into the container"
    except OSError as error:
        return f"no TUN device can be made through {TUN_FILE}: {error.strerror}"
    try:
        enter_network(f"/proc/{os.getpid()}/fd/{namespace}")
    except OSError as error:
        return f"the kernel does not allow entering an existing network namespace ({error.strerror})"
    return None


def _remedy() -> str:
    for name, forbidding, allowing in _SYSCTLS:
        path = Path("/proc/sys") / name
        if path.exists() and path.read_text().strip() == forbidding:
            return f"set {name.replace('/', '.')} to {allowing}"
    return "a container has to allow it, for example by its seccomp profile"


if __name__ == "__main__":
    if sys.argv[1] == "run":
        run_isolated(*sys.argv[2:])
    elif sys.argv[1] == "enter":
        run_in_network(*sys.argv[2:])
    else:
        print(find_missing() or "")
