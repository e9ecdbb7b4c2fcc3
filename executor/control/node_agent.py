"""The agent of one host: it forks a process for each of the host's ranks, checks these processes, and ends them.

On the head's host the launcher starts the agent with `start_agent`. If a relay emulates the job's links, this agent
runs in a network namespace; so the agent opens the socket of the control server there, and passes the socket to the
launcher. On another host `run_member` is the agent, which connects to the head.
"""

import gc
import importlib
import json
import math
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from executor.control.attachment import Survival, await_launchers
from executor.core.clock import read_origin
from executor.core.control_channel import HEAD_ADDRESS, Channel, Message, listen, reach_head, read_key, write_key
from executor.core.failures import read_failure
from executor.core.hosts import Hosts, read_hosts
from executor.core.job import INCARNATION, JobFolder
from executor.core.liveness import LivenessProbe, beat_path
from executor.core.subprocesses import ForkedProcess, die_with_parent, end_with_ancestor, environment, run_and_exit
from executor.core.timeouts import timeouts
from executor.core.tls import context
from executor.wan.testbed import control_address, running_relay
from traces.common.atomic import scratch_folder
from traces.common.errors import RunError

WORKER = "executor.rank.worker"

# What a rank's process runs, called with the agent's process id and the job's folder.
RankFunction = Callable[[str, str], None]

# Number of bytes from the end of a rank's log that are sent to the head when the rank's process has ended.
_LOG_BYTES = 16_000

# Longest time from the end of the connection of a launcher that is killed to its end, seconds.
_LAUNCHER_EXIT_S = 5.0


@dataclass(eq=False)
class NodeAgent:
    """Runs the processes of one host's ranks on instructions from the head.

    Args:
        job: The job's folder on this host.
        run_rank: Function that each process runs, called with this process's id and the job's folder.
        own: The ranks of this host.
        count: Number of ranks of the whole job.
        variables: Environment variables of the ranks, in addition to those of this process.
    """

    _job: JobFolder
    _run_rank: RankFunction
    _own: Sequence[int]
    _count: int
    _variables: Mapping[str, str]

    def __post_init__(self) -> None:
        self._processes: dict[int, tuple[int, ForkedProcess]] = {}
        self._probes: dict[int, LivenessProbe] = {}
        # By rank, the reason for which this agent has killed the rank's process.
        self._stuck: dict[int, str] = {}
        # Messages of the head, None if the connection is closed, connections of other launchers, and pairs of a rank
        # and its process that has ended.
        self._events: queue.SimpleQueue[Message | Channel | tuple[int, ForkedProcess] | None] = queue.SimpleQueue()
        # The messages about processes that have ended, which another launcher gets again.
        self._ended: list[Message] = []
        self._outlives_launcher = False

    def outlive_launcher(self, kept: Sequence[int]) -> None:
        """Keep the ranks when the launcher ends; another one that attaches gets the descriptors ``kept``."""
        self._outlives_launcher = True
        await_launchers(self._job, kept, self._events.put)

    def serve(self, channel: Channel, *, replaces: bool) -> Message | None:
        """Carry out the head's messages until ``over``; end all processes.

        Args:
            channel: The connection to the head.
            replaces: Whether the run survives the loss of a rank, so that stopped processes are killed sooner.

        Returns:
            The message ``over``; None if the connection to the head was closed, and no launcher follows.
        """
        self._follow(channel)
        limits = timeouts()
        due_s = math.inf
        check_s = time.monotonic() + limits.probe_s
        stopped_s = limits.stopped_recovering_s if replaces else limits.stopped_s
        try:
            while True:
                try:
                    event = self._events.get(timeout=max(0.0, check_s - time.monotonic()))
                except queue.Empty:
                    check_s = time.monotonic() + limits.probe_s
                    self._end_stuck()
                    if time.monotonic() > due_s:
                        return None
                    continue
                if isinstance(event, tuple):
                    self._report_end(channel, *event)
                    if due_s < math.inf and self._ended[-1]["status"]:
                        # Ranks that have no launcher cannot go on without this one.
                        return None
                elif event is None:
                    if not self._trains_alone():
                        return None
                    due_s = time.monotonic() + limits.attach_s
                elif isinstance(event, Channel):
                    channel, due_s = event, math.inf
                    self._follow(channel)
                    for ended in self._ended:
                        channel.send_plain(ended)
                elif event["kind"] == "over":
                    return event
                elif event["kind"] == "start" and event["rank"] in self._own:
                    self._start(event["rank"], int(event["incarnation"]), stopped_s)
                elif event["kind"] == "signal" and event["rank"] in self._processes:
                    self._processes[event["rank"]][1].send_signal(event["number"])
        finally:
            self._end_all()

    def _trains_alone(self) -> bool:
        """Return whether the ranks train, or have done so, and need no launcher for now."""
        has_begun = self._outlives_launcher and read_origin(self._job.origin) is not None
        return has_begun and not any(ended["status"] for ended in self._ended)

    def _follow(self, channel: Channel) -> None:
        threading.Thread(target=self._receive, args=(channel,), name="head", daemon=True).start()

    def _receive(self, channel: Channel) -> None:
        while (message := channel.receive()) is not None:
            self._events.put(message)
        self._events.put(None)

    def _start(self, rank: int, incarnation: int, stopped_s: float) -> None:
        for path in (self._job.of_rank("error", rank), beat_path(self._job.path, rank)):
            path.unlink(missing_ok=True)
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": str(self._count),
            "LOCAL_RANK": str(self._own.index(rank)),
            "LOCAL_WORLD_SIZE": str(len(self._own)),
            INCARNATION: str(incarnation),
        }
        process = ForkedProcess(
            f"rank {rank}",
            partial(self._run_rank, str(os.getpid()), str(self._job.path)),
            {**self._variables, **variables},
            self._job.of_rank("log", rank),
        )
        limits = timeouts()
        self._processes[rank] = incarnation, process
        self._probes[rank] = LivenessProbe(
            process.pid, beat_path(self._job.path, rank), stopped_s, limits.silent_s, limits.probe_s
        )
        threading.Thread(target=self._await_end, args=(rank, process), name=f"rank {rank}", daemon=True).start()

    def _await_end(self, rank: int, process: ForkedProcess) -> None:
        process.wait()
        self._events.put((rank, process))

    def _report_end(self, channel: Channel, rank: int, process: ForkedProcess) -> None:
        incarnation, _ = self._processes.pop(rank)
        del self._probes[rank]
        failure = read_failure(self._job, rank)
        ended = {
            "kind": "ended",
            "rank": rank,
            "incarnation": incarnation,
            "status": process.returncode,
            "failure": asdict(failure) if failure is not None else None,
            "stuck": self._stuck.pop(rank, ""),
            "printed": self._printed(rank),
        }
        self._ended.append(ended)
        channel.send_plain(ended)

    def _printed(self, rank: int) -> str:
        try:
            with self._job.of_rank("log", rank).open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_BYTES))
                return log.read().decode(errors="replace")
        except FileNotFoundError:
            # A process can be killed before it opens its log.
            return ""

    def _end_stuck(self) -> None:
        for rank, probe in self._probes.items():
            if rank not in self._stuck and (reason := probe.check()):
                self._stuck[rank] = reason
                self._processes[rank][1].kill()

    def _end_all(self) -> None:
        for _, process in self._processes.values():
            process.kill()
        for _, process in self._processes.values():
            process.wait()
        self._processes.clear()
        self._probes.clear()


def load_rank(module: str, job: JobFolder, channel: Channel, host: str) -> RankFunction | None:
    """Return the function that each rank of the job runs, with all that ranks need already loaded.

    Loading torch takes seconds, which the ranks that are forked afterwards do not need. If the loading fails, the
    result is None, and the head gets the reason, with the name of the ``host``.
    """
    # Nothing that is loaded is garbage, and without the collector this takes a tenth less time.
    gc.disable()
    try:
        loaded = importlib.import_module(module)
        if module == WORKER:
            loaded.preload(job)
        run_rank: RankFunction = loaded.main
        # Otherwise each rank would derive the certificate again.
        context(read_key(job.key), is_server=False)
    except Exception as error:
        traceback.print_exc()
        channel.send("failed", reason=f"{host} cannot load what its ranks run: {type(error).__name__}: {error}")
        return None
    # The collector would write into the memory that the forked processes share.
    gc.freeze()
    gc.enable()
    return run_rank


def _answer_to_failure(channel: Channel) -> Message | None:
    """Wait until the head ends the job after a message ``failed``; return its message, or None if it has closed."""
    while (said := channel.receive()) is not None and said["kind"] != "over":
        pass
    return said


def head_address(address: tuple[str, int], silence_s: float) -> dict[str, str]:
    """Return the environment variable with the address of the control server, for ranks."""
    return {HEAD_ADDRESS: json.dumps([*address, silence_s])}


def run_member(hosts: Hosts, name: str, code: Path | None, checkpoints: str = "", data: Path | None = None) -> None:
    """Run the agent of a host in this process until the job is over and the host's ranks have ended.

    The head may start later than this host, or restart, so the agent retries to connect for `Hosts.arrival_s` seconds.

    Args:
        hosts: All hosts of the job.
        name: The name of this host.
        code: The model's file or weights on this host; None for paced compute.
        checkpoints: The folder for checkpoints on this host; empty if the job writes none.
        data: The data on this host, or its code; None if the scenario names none.

    Raises:
        RunError: A rank failed, or the head cannot be reached.
    """
    part, until_s = hosts.part(name), time.monotonic() + hosts.arrival_s
    address = (hosts.address, hosts.port)
    while True:
        channel = reach_head(address, hosts.key, hosts.silence_s, until_s - time.monotonic())
        with scratch_folder() as folder:
            job = JobFolder(folder)
            write_key(job.key, hosts.key)
            variables = {**environment(part.interface), **head_address(address, hosts.silence_s)}
            channel.send("hello", host=name)
            said = channel.receive()
            if said is not None and said["kind"] == "welcome":
                job.write_documents(said["documents"], code, checkpoints, data)
                count, run_rank = sum(len(each.ranks) for each in hosts.parts), load_rank(WORKER, job, channel, name)
                if run_rank is not None:
                    agent = NodeAgent(job, run_rank, part.ranks, count, variables)
                    said = agent.serve(channel, replaces=said["replaces"])
                else:
                    said = _answer_to_failure(channel)
                until_s = time.monotonic() + hosts.arrival_s
            channel.close()
        if said is not None and said["kind"] == "over":
            if said["status"]:
                raise RunError(f"the job has failed: {said['reason']}")
            return
        if time.monotonic() > until_s:
            raise RunError(
                f"the job's head at {hosts.address}:{hosts.port} has closed the connection, and has not accepted "
                f"another one within {hosts.arrival_s:.0f} s"
            )
        time.sleep(timeouts().retry_s)


def start_agent(
    job: JobFolder, module: str, channel: socket.socket, interface: str, survival: Survival | None = None
) -> "subprocess.Popen[bytes]":
    """Start the agent of the head's host; without ``survival`` it ends with this process.

    Args:
        job: The folder of the job, to whose log the agent writes.
        module: Module whose function ``main`` each rank runs.
        channel: The agent's end of a connection to this process.
        interface: The network interface of the ranks' connections.
        survival: How agent and ranks outlive this process; None if they do not.
    """
    me = str(os.getpid())
    command = [sys.executable, "-m", "executor.control.node_agent", me, str(job.path), module, str(channel.fileno())]
    kept = [channel.fileno()]
    if survival is not None:
        command += [str(survival.guardian), str(survival.lock)]
        kept.append(survival.lock)
    if job.read_config().emulator == "relay":
        command = [sys.executable, "-m", "executor.wan.linux", "run", me, *command]
    with job.log.open("wb") as log:
        return subprocess.Popen(
            command,
            env=environment(interface),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=kept,
        )


def main(parent: str, folder: str, module: str, descriptor: str, guardian: str = "", lock: str = "") -> None:
    """Run the agent on the head's host; the arguments are those of the command line in `start_agent`."""
    signal.signal(signal.SIGTERM, _end_once)
    job = JobFolder(Path(folder))
    if guardian:
        end_with_ancestor(int(parent), int(guardian))
        _serve_here(job, module, descriptor, lock)
        return
    is_told = False
    try:
        try:
            die_with_parent(int(parent), signal.SIGTERM)
            is_told = _serve_here(job, module, descriptor)
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    finally:
        # A launcher that is killed closes its connections before it has ended.
        until_s = time.monotonic() + (0.0 if is_told else _LAUNCHER_EXIT_S)
        while os.getppid() == int(parent) and time.monotonic() < until_s:
            time.sleep(0.01)
        until_s = time.monotonic() + _LAUNCHER_EXIT_S
        # Nobody else removes the files of a launcher that was killed. Ranks that end may still write some.
        while os.getppid() != int(parent) and job.path.exists() and time.monotonic() < until_s:
            shutil.rmtree(job.path, ignore_errors=True)
            time.sleep(0.01)


def _end_once(*_: object) -> None:
    """Raise `SystemExit`, so that `NodeAgent.serve` ends the ranks; from then on, SIGTERM does nothing."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(1)


def _serve_here(job: JobFolder, module: str, descriptor: str, lock: str = "") -> bool:
    """Run the agent on the head's host; return whether the launcher has said that the job is over.

    ``lock`` is the descriptor of `Survival.lock`; empty if the ranks end with their launcher.
    """
    hosts, config = read_hosts(job.hosts), job.read_config()
    connection = socket.socket(fileno=int(descriptor))
    channel = Channel(connection)
    with ExitStack() as stack:
        address = ("127.0.0.1", 0) if hosts is None else (hosts.address, hosts.port)
        failed = ""
        try:
            if config.emulator == "relay":
                address = (control_address(), 0)
                stack.enter_context(running_relay(job, config.tcp, lambda why: channel.send("failed", reason=why)))
            listening = listen(address)
        except RunError as error:
            failed = str(error)
        except OSError as error:
            failed = (
                f"the head cannot listen at {address[0]}, port {address[1]}: {error.strerror or error}; correct its "
                "'address' or 'port' in hosts.yaml, or end the process that uses the port"
            )
        if failed:
            channel.send("failed", reason=failed)
            return _answer_to_failure(channel) is not None
        kept = [listening.dup().detach(), int(lock)] if lock else []
        with listening:
            address = listening.getsockname()[:2]
            socket.send_fds(connection, [b"!"], [listening.fileno()])
        # Meanwhile the launcher starts its server.
        run_rank = load_rank(module, job, channel, "this host")
        if run_rank is None:
            return _answer_to_failure(channel) is not None
        said = channel.receive()
        if said is None or said["kind"] != "welcome":
            return said is not None
        agent = NodeAgent(job, run_rank, tuple(said["ranks"]), said["count"], head_address(address, 0.0))
        if kept:
            agent.outlive_launcher(kept)
        return agent.serve(channel, replaces=said["replaces"]) is not None


if __name__ == "__main__":
    run_and_exit(partial(main, *sys.argv[1:]))
