"""How the TCP of a device's network is set: as on hosts that are made ready for wide-area links."""

import contextlib
from pathlib import Path

_SETTINGS = Path("/proc/sys/net/ipv4")

# The first congestion control that may be chosen: Linux' own default, then its ancestor, which every user may choose.
# Both grow a window until something is lost, as `sim.send_window` assumes; others pace by what they measure, BBR with a
# pause of 200 ms every ten seconds, so that the same run would differ from one machine to the next.
_CONGESTION_CONTROLS = ("cubic", "reno")


def set_tcp() -> None:
    """Set the TCP of this process's network namespace; what may not be set stays as it is on the machine.

    A pipeline's links rest for part of every step. Windows stay open meanwhile: otherwise Linux halves them for every
    retransmission timeout of rest, and each step begins with a slow start.
    """
    for name in _CONGESTION_CONTROLS:
        if _set("tcp_congestion_control", name):
            break
    _set("tcp_slow_start_after_idle", "0")


def _set(name: str, value: str) -> bool:
    with contextlib.suppress(OSError):
        (_SETTINGS / name).write_text(value)
        return True
    return False
