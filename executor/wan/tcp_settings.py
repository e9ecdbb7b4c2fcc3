"""How the TCP of a device's network is set: as on hosts that are made ready for wide-area links, or as on this machine.

Free of anything that starts a thread: also loaded by who is about to make a namespace.
"""

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

# In the environment of who has left this machine's own network: a JSON object of what `read_tcp` returned there.
HOST_TCP = "ROPEBRIDGE_HOST_TCP"

_FOLDER = Path("/proc/sys/net/ipv4")

# What decides how fast a connection's window opens, and how far; each network namespace has its own.
_NAMES = ("tcp_congestion_control", "tcp_slow_start_after_idle", "tcp_wmem", "tcp_rmem")

# Each setting's values that will do, the best first.
#
# A pipeline's links rest for part of every step. Windows stay open meanwhile: otherwise Linux halves them for every
# retransmission timeout of rest, and each step begins with a slow start.
#
# The first congestion control that may be chosen: Linux' own default, then its ancestor, which every user may choose.
# Both grow a window until something is lost, as `sim.network.tcp_window` assumes; others pace by what they measure, BBR
# with a pause of 200 ms every ten seconds, so that the same run would differ from one machine to the next.
WIDE_AREA: Mapping[str, Sequence[str]] = {
    "tcp_congestion_control": ("cubic", "reno"),
    "tcp_slow_start_after_idle": ("0",),
}


def as_on(host: Mapping[str, str]) -> Mapping[str, Sequence[str]]:
    """Return the settings of a host as the only ones that will do: a new network namespace has the kernel's instead."""
    return {name: (value,) for name, value in host.items()}


def read_tcp() -> dict[str, str]:
    """Return what is in effect in this thread's network namespace, by the kernel's names; nothing of what is hidden."""
    found = {}
    for name in _NAMES:
        with contextlib.suppress(OSError):
            found[name] = " ".join((_FOLDER / name).read_text().split())
    return found


def set_tcp(wanted: Mapping[str, Sequence[str]]) -> list[str]:
    """Set the TCP of this thread's network namespace; what may not be set stays as it is.

    Args:
        wanted: Each setting's values that will do, the best first.

    Returns:
        What is otherwise than wanted, and why: a phrase for each setting.
    """
    misses = []
    for name, values in wanted.items():
        reason = _set_first(name, values)
        found = read_tcp().get(name)
        if found not in values:
            misses.append(f"{name} is {found or 'unknown'}, not {' or '.join(values)} ({reason})")
    return misses


def _set_first(name: str, values: Sequence[str]) -> str:
    """Set the first value that the kernel takes; return why it did not take the last one that was tried."""
    reason = "it did not take effect"
    for value in values:
        try:
            (_FOLDER / name).write_text(value)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
        else:
            break
    return reason
