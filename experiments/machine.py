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
