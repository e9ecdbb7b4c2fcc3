"""How the ranks of a run outlive its launcher, and how another launcher attaches to them.

The agent keeps what would end with its launcher: the ranks, the socket at which they connect, and a lock that says that
they train. It waits for another launcher at a Unix socket in the job's folder, and sends it the socket and the lock.
Ranks train on meanwhile as far as they know the plan: to the end if no policy can change it. They keep what they
publish until a launcher has heard it. Agent and ranks end with the process that would start the other launcher, or if
none attaches in time.
"""

import os
import select
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from executor.core.clock import read_origin
from executor.core.control_channel import Channel
from executor.core.job import JobFolder
from executor.core.subprocesses import short_path

_SOCKET, _PROCESS = "launchers.sock", "agent-process"

# Process, user and group at the other end of a Unix socket: unix(7).
_CREDENTIALS = struct.Struct("3i")

_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Survival:
    """How the ranks of a run outlive its launcher.

    Attributes:
        folder: Folder of the job's files, of this host alone; it outlives the launcher.
        guardian: Process that has called `executor.core.subprocesses.adopt_orphans`, and with which the ranks end.
        lock: Descriptor that stays open as long as ranks train.
    """

    folder: Path
    guardian: int
    lock: int


class AttachedAgent:
    """The process of an agent that another launcher has started; with the methods of `subprocess.Popen` used here."""

    def __init__(self, pid: int) -> None:
        self._process = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Return 0 if the process has ended, whatever its status; None if it runs."""
        return 0 if select.select([self._process], [], [], 0.0)[0] else None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process; raise `subprocess.TimeoutExpired` after ``timeout`` seconds."""
        if not select.select([self._process], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("agent", timeout or 0.0)
        return 0

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, number)


@dataclass(frozen=True, slots=True)
class Attachment:
    """The connection of a launcher to the agent of its host.

    Attributes:
        job: The job's folder.
        agent: The agent's process.
        own: The launcher's end of the connection to the agent.
        listening: The socket at which ranks connect.
        lock: The descriptor of `Survival.lock`, from an agent that has outlived an earlier launcher.
    """

    job: JobFolder
    agent: "subprocess.Popen[bytes] | AttachedAgent"
    own: socket.socket
    listening: socket.socket
    lock: int | None = None


def await_launchers(job: JobFolder, kept: Sequence[int], attach: Callable[[Channel], None]) -> None:
    """Wait in a thread for launchers of this user that attach to this process, an agent.

    Args:
        job: The folder of the job.
        kept: Descriptors that each of them gets.
        attach: Called with the connection to each of them.
    """
    place = Path(short_path(str(job.path)))
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(place / _SOCKET))
    listening.listen()
    (job.path / _PROCESS).write_text(str(os.getpid()))

    def accept() -> None:
        while True:
            connection, _ = listening.accept()
            if _other_end(connection)[1] != os.geteuid():
                connection.close()
                continue
            with suppress(OSError):
                socket.send_fds(connection, [b"!"], kept)
                attach(Channel(connection))

    threading.Thread(target=accept, name="launchers", daemon=True).start()


def attach(job: JobFolder) -> Attachment | None:
    """Return a connection to the agent of a job whose launcher has ended; None if its ranks do not train."""
    if _process(job) is None or not job.origin.exists() or read_origin(job.origin) is None:
        return None
    own = socket.socket(socket.AF_UNIX)
    try:
        own.connect(str(Path(short_path(str(job.path))) / _SOCKET))
        _, descriptors, _, _ = socket.recv_fds(own, 1, 2)
        listening, lock = descriptors
        pid, user, _ = _other_end(own)
        if user != os.geteuid():
            raise PermissionError
        agent = AttachedAgent(pid)
    except (OSError, ValueError):
        own.close()
        return None
    return Attachment(job, agent, own, socket.socket(fileno=listening), lock)


def is_orphaned(job: JobFolder) -> bool:
    """Return whether the agent of a job, whose launcher has ended, is now a child of this process and runs."""
    pid = _process(job)
    with suppress(ChildProcessError):
        return pid is not None and os.waitpid(pid, os.WNOHANG) == (0, 0)
    return False


def end_orphan(job: JobFolder, grace_s: float) -> None:
    """End the agent of a job if it is a child of this process: by SIGTERM, and after ``grace_s`` by SIGKILL."""
    pid = _process(job)
    if pid is None or not is_orphaned(job):
        return
    os.kill(pid, signal.SIGTERM)
    until_s = time.monotonic() + grace_s
    while is_orphaned(job):
        if time.monotonic() > until_s:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return
        time.sleep(_POLL_S)


def _process(job: JobFolder) -> int | None:
    """Return the process id of the agent; None if the job has none that waits for launchers."""
    try:
        return int((job.path / _PROCESS).read_text())
    except (OSError, ValueError):
        return None


def _other_end(connection: socket.socket) -> tuple[int, int, int]:
    """Return the process, the user and the group at the other end of a Unix socket."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, group = _CREDENTIALS.unpack(found)
    return process, user, group
