"""Processes of a job: their environment, how they are started or forked, and that they end whatever happens."""

import ctypes
import os
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Never

from executor.core.timeouts import timeouts

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the process ``parent``, which started it, ends for whatever reason.

    Linux only; elsewhere the launcher's own clean-up is all there is.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
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


def _prctl(option: int, argument: object) -> None:
    """Set something of this process, where the system is Linux."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(option, argument)


@contextmanager
def ended(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """End an agent after the block if it goes on."""
    try:
        yield
    finally:
        if process.poll() is None:
            end(process, timeouts().agent_exit_s)


def end(process: "subprocess.Popen[Any]", grace_s: float) -> None:
    """End a process by a signal on which it ends what it has started, and after some seconds by the kernel's."""
    process.terminate()
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class ForkedProcess:
    """A process that goes on from this one's memory: what is loaded here need not be loaded again.

    Loading torch takes seconds of a processor core, for each rank. The other threads of this process may only wait in
    the kernel while it forks, holding no lock that the new process needs.

    Args:
        name: What `ps` and `top` call the process, up to 15 characters.
        main: What the process does; it ends with status 0 when this returns, with 1 when it raises.
        log: The file to which its output and errors are appended.

    Attributes:
        returncode: Its status after `wait`, negative if a signal ended it; None before.
    """

    def __init__(self, name: str, main: Callable[[], None], variables: Mapping[str, str], log: Path) -> None:
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            # Python warns of every fork beside other threads.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if not self.pid:
            run_and_exit(partial(_begin, name, main, variables, log))

    def wait(self) -> int:
        """Wait for the end of the process; return its status. Only one thread may wait."""
        if self.returncode is None:
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process is known to have ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End the process, which cannot refuse."""
        self.send_signal(signal.SIGKILL)


def _begin(name: str, main: Callable[[], None], variables: Mapping[str, str], log: Path) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _prctl(_PR_SET_NAME, ctypes.create_string_buffer(name.encode()))
    nothing = os.open(os.devnull, os.O_RDONLY)
    written = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for descriptor, standard in ((nothing, 0), (written, 1), (written, 2)):
        os.dup2(descriptor, standard)
    # A connection of the agent must end with the agent.
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.environ.update(variables)
    main()


def run_and_exit(main: Callable[[], None]) -> Never:
    """Run ``main``, and end the process at once: with status 0, or 1 and a traceback if it raises."""
    status = 1
    try:
        main()
        status = 0
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
