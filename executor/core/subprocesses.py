"""The process that starts the ranks of a machine: its environment, and its end whatever happens."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the process ``parent``, which started it, ends for whatever reason.

    Linux only; elsewhere the launcher's own clean-up is all there is.
    """
    try:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):
        return
    # The parent may have ended before the call took effect.
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


# How long it may take to end its ranks before the kernel does.
GRACE_S = 5.0


def environment(interface: str) -> dict[str, str]:
    """Return its environment, and so that of the ranks; they meet over a network interface."""
    # gloo must not look the host's name up.
    return {**python_environment(), "GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": "1"}


def python_environment() -> dict[str, str]:
    """Return the environment of a process of ours, with which it imports what this one does.

    That is never a folder of the same name where the user happens to stand.
    """
    return {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


@contextmanager
def ended(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """End a process after the block if it goes on: by a signal on which it ends its ranks, then by the kernel's."""
    try:
        yield
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
