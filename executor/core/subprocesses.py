"""Functions for the processes of a job: their environment, forks, and how they end together with their parent."""

import ctypes
import gc
import os
import signal
import stat
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Never, Protocol

from executor.core.timeouts import timeouts
from traces.common.errors import unwritable

# Exit status of a process that cannot write to a full disk, so that its log may not say why; as in sysexits(3).
NO_ROOM = os.EX_IOERR

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_TIMERSLACK = 29
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent, process ``parent``, ends for any reason.

    Works on Linux only; on other systems this process ends only by its parent's clean-up.
    """
    _prctl(_PR_SET_PDEATHSIG, by)
    # The parent may have ended before the call took effect.
    if os.getppid() != parent:
        os.kill(os.getpid(), by)


def end_with_ancestor(parent: int, ancestor: int) -> None:
    """Have this process end by `SystemExit` when an ancestor does that has called `adopt_orphans`.

    It outlives its parent, whose place the ancestor then takes. Works on Linux only, as `die_with_parent`.
    """

    def end_alone(*_: object) -> None:
        if os.getppid() not in (parent, ancestor):
            sys.exit(1)

    signal.signal(signal.SIGUSR1, end_alone)
    # The kernel sends the signal when the parent ends, and again when the ancestor does (prctl(2)).
    _prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1)
    end_alone()


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent ends: of the agents that `end_with_ancestor` speaks of."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_sleeps_in_time() -> None:
    """Have the kernel end the sleeps of this process on time; by default it delays them by up to 50 µs (prctl(2)).

    Threads that start later inherit this.
    """
    _prctl(_PR_SET_TIMERSLACK, 1)


def name_process(name: str) -> None:
    """Give this process a name in `ps` and `top`, of up to 15 characters."""
    _prctl(_PR_SET_NAME, ctypes.create_string_buffer(name.encode()))


# Longest path of a folder in which Python's `multiprocessing` can make sockets: addresses have up to 107 characters,
# of which it adds 32.
_LONGEST_FOLDER = 75


def short_path(folder: str) -> str:
    """Return a path of a folder in which processes of this host can make sockets, for as long as this process lives.

    If the folder's own path is too long for the address of a socket, this is one through a descriptor of this process.
    """
    if len(os.fsencode(folder)) <= _LONGEST_FOLDER or not os.path.isdir("/proc/self/fd"):
        return folder
    return f"/proc/{os.getpid()}/fd/{os.open(folder, os.O_RDONLY | os.O_DIRECTORY)}"


def close_inherited_sockets() -> None:
    """Close the sockets that this process has inherited from its parent, so that peers see when the parent ends.

    Their numbers stay taken: a copy of a Python object that closes one later then closes no other file.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(descriptor)).st_mode):
                os.dup2(nothing, int(descriptor))
    os.close(nothing)


def environment(interface: str) -> dict[str, str]:
    """Return the environment of an agent and its ranks, whose connections use the network interface ``interface``."""
    # Without the interface gloo would use the address to which the host's name resolves.
    # NCCL takes names as prefixes, unless they begin with "=".
    names = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    return {**python_environment(), **names, "OMP_NUM_THREADS": "1"}


def python_environment() -> dict[str, str]:
    """Return the environment with which a new Python process imports the same modules as this process.

    The current directory is not searched, so that a folder there with the name of a package is not imported.
    """
    return {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _prctl(option: int, argument: object) -> None:
    """Call prctl(2) for this process; do nothing on systems without it."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(option, argument)


class Process(Protocol):
    """What `subprocess.Popen` has to end a process."""

    def poll(self) -> int | None:
        """Return None if the process runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process; raise `subprocess.TimeoutExpired` after ``timeout`` seconds."""

    def terminate(self) -> None:
        """Send SIGTERM."""

    def kill(self) -> None:
        """Send SIGKILL."""


@contextmanager
def ended(process: Process) -> Iterator[None]:
    """Return a context at whose end an agent's process is ended if it still runs."""
    try:
        yield
    finally:
        if process.poll() is None:
            end(process, timeouts().agent_exit_s)


def end(process: Process, grace_s: float) -> None:
    """End a process by SIGTERM, on which it ends its own children, and after ``grace_s`` seconds by SIGKILL."""
    process.terminate()
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class ForkedProcess:
    """A process forked from this one, which shares the modules that this process has loaded.

    Otherwise each rank would have to load torch, which takes seconds of processor time. During the fork the other
    threads of this process must wait in the kernel, and hold no lock that the new process needs.

    Args:
        name: Name of the process in `ps` and `top`, up to 15 characters.
        main: Function that the process runs; the exit status is 0 if it returns, 1 if it raises.
        log: File to which standard output and standard error are appended.

    Attributes:
        returncode: Exit status after `wait`, the negative number of the signal if one ended the process; None before.
    """

    def __init__(self, name: str, main: Callable[[], None], variables: Mapping[str, str], log: Path) -> None:
        self.returncode: int | None = None
        self._ending = threading.Lock()
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            # Python warns of every fork of a process with several threads.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if not self.pid:
            run_and_exit(partial(_begin, name, main, variables, log))

    def wait(self) -> int:
        """Wait for the end of the process; return its exit status."""
        with self._ending:
            if self.returncode is None:
                _, status = os.waitpid(self.pid, 0)
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        # Another thread may have waited for its end, and not have set the exit status yet.
        with suppress(ProcessLookupError):
            if self.returncode is None:
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _begin(name: str, main: Callable[[], None], variables: Mapping[str, str], log: Path) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    name_process(name)
    nothing = os.open(os.devnull, os.O_RDONLY)
    written = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for descriptor, standard in ((nothing, 0), (written, 1), (written, 2)):
        os.dup2(descriptor, standard)
    # Files of the other process that nothing refers to any more must never be collected here: each would close the
    # descriptor of its number, which by then belongs to another file.
    gc.freeze()
    # Otherwise the agent's connections would stay open after the agent's end.
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.environ.update(variables)
    main()


def run_and_exit(main: Callable[[], None]) -> Never:
    """Run ``main``, and end the process without Python's clean-up.

    The status is 0; `NO_ROOM` if a full disk has ended ``main``; or 1, with a traceback, after any other error.
    """
    status = 1
    try:
        main()
        status = 0
    except Exception as error:
        status = NO_ROOM if unwritable(error) else 1
        with suppress(OSError):
            traceback.print_exc()
    finally:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
