"""TCP settings of a device's network: those of hosts prepared for wide-area links, or those of this machine.

Imports nothing that starts threads, since `executor.wan.linux` uses it before it makes a namespace.
"""

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

# Environment variable of a process that has left this machine's network: the result of `read_tcp` there, as JSON.
HOST_TCP = "ROPEBRIDGE_HOST_TCP"

_FOLDER = Path("/proc/sys/net/ipv4")

# The settings that decide how fast and how far a connection's window opens; each network namespace has its own.
_NAMES = ("tcp_congestion_control", "tcp_slow_start_after_idle", "tcp_wmem", "tcp_rmem")

# Acceptable values of each setting, the best first.
#
# Congestion control: Linux' default, then its predecessor, which every user may choose. Both grow a window until
# something is lost, as `sim.network.tcp_window` assumes. Others pace by measurements, as BBR does with a pause of
# 200 ms every ten seconds, so that the same run would differ from one machine to the next.
#
# Slow start after idle: a pipeline's links are idle for part of every step. By default Linux halves a window for every
# retransmission timeout of idleness, and each step would begin with a slow start.
WIDE_AREA: Mapping[str, Sequence[str]] = {
    "tcp_congestion_control": ("cubic", "reno"),
    "tcp_slow_start_after_idle": ("0",),
}


def as_on(host: Mapping[str, str]) -> Mapping[str, Sequence[str]]:
    """Return a host's settings as the only acceptable ones; a new network namespace has the kernel's instead."""
    return {name: (value,) for name, value in host.items()}


def read_tcp() -> dict[str, str]:
    """Return the settings in effect in this thread's network namespace, except those that the kernel hides."""
    found = {}
    for name in _NAMES:
        with contextlib.suppress(OSError):
            found[name] = " ".join((_FOLDER / name).read_text().split())
    return found


def set_tcp(wanted: Mapping[str, Sequence[str]]) -> list[str]:
    """Set the TCP of this thread's network namespace as far as that is allowed.

    Args:
        wanted: Acceptable values of each setting, the best first.

    Returns:
        A phrase for each setting that differs from the wanted ones, with the reason.
    """
    misses = []
    for name, values in wanted.items():
        reason = _set_first(name, values)
        found = read_tcp().get(name)
        if found not in values:
            misses.append(f"{name} is {found or 'unknown'}, not {' or '.join(values)} ({reason})")
    return misses


def _set_first(name: str, values: Sequence[str]) -> str:
    """Set the first value that the kernel accepts; return why it refused the last one that was tried."""
    reason = "it did not take effect"
    for value in values:
        try:
            (_FOLDER / name).write_text(value)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
        else:
            break
    return reason
