"""Agents forked from one process that has loaded torch, each a child of the launcher as if the launcher had started it.

A new interpreter takes two seconds of a core for each of some hundred runs. The tests that start the command in a
process of its own start such an interpreter still.
"""

import ctypes
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Self

from executor.control.attachment import Survival
from executor.control.node_agent import main as run_agent
from executor.control.node_agent import start_agent
from executor.core.job import JobFolder
from executor.core.subprocesses import adopt_orphans, environment, python_environment, run_and_exit
from executor.wan.linux import leave_network
from experiments.benches.processes import MARK

_PR_SET_CHILD_SUBREAPER = 36
_MOST_BYTES = 1 << 20
_PATIENCE_S = 10.0


class WarmAgents:
    """Starts agents, from the first one on by a process that ends with the context."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._source = ExitStack()
        self._link: socket.socket | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._source.close()

    def start_agent(
        self, job: JobFolder, module: str, channel: socket.socket, interface: str, survival: Survival | None = None
    ) -> "Agent | subprocess.Popen[bytes]":
        """As `node_agent.start_agent`; a test that finds processes by their environment needs a new interpreter."""
        if MARK in os.environ or survival is not None:
            return start_agent(job, module, channel, interface, survival)
        request = [
            os.getpid(),
            str(job.path),
            module,
            job.read_config().emulator == "relay",
            environment(interface),
            str(Path.cwd()),
        ]
        with self._lock, job.log.open("wb") as log:
            link = self._link = self._link or self._source.enter_context(_source())
            # Until the agent is this process's child, orphans become children of this process.
            with adopting_orphans():
                socket.send_fds(link, [json.dumps(request).encode()], [channel.fileno(), log.fileno()])
                return Agent(int(link.recv(_MOST_BYTES)))


class Agent:
    """A child of this process that `subprocess` has not started, with what a launcher uses of its interface."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.poll() is None:
            with os.fdopen(os.pidfd_open(self.pid)) as end:
                if not select.select([end], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired("agent", timeout or 0.0)
        status = self.poll()
        assert status is not None
        return status

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """This process becomes the parent of descendants whose own parent ends meanwhile."""
    adopt_orphans()
    try:
        yield
    finally:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@contextmanager
def _source() -> Iterator[socket.socket]:
    """Start the process from which agents are forked; yield the connection to it."""
    own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with other:
        source = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.processes.warm_agents", str(other.fileno())],
            env={**python_environment(), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=(other.fileno(),),
        )
    with source, own:
        yield own
        own.close()


def main(descriptor: str) -> None:
    """Fork an agent for each request, until the connection is closed, also by the end of the process that asks.

    A signal at the death of the parent would come when the thread ends that has started this process.
    """
    link = socket.socket(fileno=int(descriptor))
    with suppress(KeyboardInterrupt):
        # Nothing that is loaded is garbage; agents enable the collector.
        gc.disable()
        while True:
            request, descriptors, _, _ = socket.recv_fds(link, _MOST_BYTES, 2)
            if not request:
                return
            arguments = json.loads(request)
            _preload(JobFolder(Path(arguments[1])))
            link.send(str(_fork_twice(arguments, *descriptors)).encode())
            for each in descriptors:
                os.close(each)


def _preload(job: JobFolder) -> None:
    """Load what the job's ranks need, which the agents of later jobs then find loaded."""
    from executor.rank.worker import preload
    from executor.training.models.loading import load_meta_device

    load_meta_device()
    # The agent tells what is wrong with the job.
    with suppress(Exception):
        preload(job)


def _fork_twice(request: list[object], channel: int, log: int) -> int:
    """Return the process id of the agent, once it is a child of the process that asked for it."""
    heard, said = os.pipe()
    child = os.fork()
    if not child:
        agent = os.fork()
        if not agent:
            run_and_exit(partial(_run_agent, channel, log, *request))
        os.write(said, str(agent).encode())
        os._exit(0)
    os.close(said)
    os.waitpid(child, 0)
    with os.fdopen(heard) as pipe:
        return int(pipe.read())


def _run_agent(
    channel: int, log: int, parent: int, folder: str, module: str, isolated: bool, variables: dict[str, str], cwd: str
) -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    while os.getppid() != parent and time.monotonic() < deadline_s:
        time.sleep(0.001)
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, standard in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(descriptor, standard)
    os.closerange(3, channel)
    os.closerange(channel + 1, os.sysconf("SC_OPEN_MAX"))
    os.environ.clear()
    os.environ.update(variables)
    sys.path[:] = variables["PYTHONPATH"].split(os.pathsep)
    os.chdir(cwd)
    if isolated:
        leave_network(parent)
    run_agent(str(parent), folder, module, str(channel))


if __name__ == "__main__":
    main(*sys.argv[1:])
