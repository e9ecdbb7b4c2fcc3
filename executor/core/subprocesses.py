"""The environment of the processes that a launcher starts, and their end whatever happens."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from executor.core.timeouts import timeouts

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


def environment(interface: str) -> dict[str, str]:
    """Return the environment of an agent and its ranks, which connect over a network interface."""
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
                process.wait(timeouts().agent_exit_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
