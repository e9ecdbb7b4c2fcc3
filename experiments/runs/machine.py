"""The machine that something was measured on, in words."""

import os
import platform
from importlib.metadata import version
from typing import Any

from executor.wan.tcp_settings import read_tcp


def describe_machine() -> dict[str, Any]:
    """Return what a reader of measurements asks about the machine."""
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": version("torch"),
        # What links emulated with TCP "as-is" have.
        **read_tcp(),
    }


def usable_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
