"""Tries what the test bed needs, in a process of its own: ``python -m executor.wan.probe``; prints what is missing."""

import os
import sys
from pathlib import Path

from executor.wan.linux import TUN_FILE, enter_network, enter_new_network, isolate, open_tun, switch_on_loopback
from executor.wan.testbed import INTERFACE, NETMASK, control_address, device_address

# What can forbid an ordinary user's namespaces, beside the filter of a container: sysctl, value, and one that allows.
_SYSCTLS = (
    ("kernel/unprivileged_userns_clone", "0", "1"),
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "0"),
    ("user/max_user_namespaces", "0", "10000"),
)


def find_missing() -> str | None:
    """Return what the kernel or this machine's administrator withholds, in one sentence; None if nothing."""
    try:
        isolate()
        switch_on_loopback()
    except OSError as error:
        return f"the kernel refuses a user and network namespace ({error.strerror}); {_remedy()}"
    try:
        open_tun(INTERFACE, control_address(), NETMASK)
        namespace = enter_new_network()
        open_tun(INTERFACE, device_address(0), NETMASK)
    except FileNotFoundError:
        return f"{TUN_FILE} is not there: load the kernel module 'tun', or pass the device file into the container"
    except OSError as error:
        return f"no TUN device can be made through {TUN_FILE}: {error.strerror}"
    try:
        enter_network(f"/proc/{os.getpid()}/fd/{namespace}")
    except OSError as error:
        return f"the kernel lets nobody enter a network namespace that is there ({error.strerror})"
    return None


def _remedy() -> str:
    for name, forbidding, allowing in _SYSCTLS:
        path = Path("/proc/sys") / name
        if path.exists() and path.read_text().strip() == forbidding:
            return f"set {name.replace('/', '.')} to {allowing}"
    return "a container has to allow it, for example by its seccomp profile"


if __name__ == "__main__":
    missing = find_missing()
    print(missing or "")
    sys.exit(0)
