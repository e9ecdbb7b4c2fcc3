"""Starts a job's processes, steers them, and ends them whatever happens."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from executor.control.control_server import ControlServer
from executor.control.coordinator import Coordinator
from executor.control.node_agent import WORKER
from executor.control.policy_driver import PolicyDriver
from executor.core.clock import create_origin
from executor.core.control_channel import decode, new_key, read_key, write_key
from executor.core.hosts import Hosts, read_hosts
from executor.core.job import JobFolder, RunConfig
from executor.core.subprocesses import ended, environment
from executor.core.timeouts import timeouts
from executor.transport.link_shaper import create_ledger
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from traces.common.errors import RunError


@contextmanager
def prepared_job(scenario: Scenario, plan: Plan, config: RunConfig, hosts: Hosts | None = None) -> Iterator[JobFolder]:
    """Give the folder of a job, for `run_job`; it is gone afterwards, with what the job left there."""
    folder = Path(tempfile.mkdtemp(prefix="ropebridge-"))
    try:
        job = JobFolder(folder)
        job.write(scenario, plan, config)
        create_ledger(job.ledger, scenario.cluster)
        create_origin(job.origin)
        if hosts is None:
            write_key(job.key, new_key())
        else:
            hosts.write(job.hosts)
        yield job
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_job(job: JobFolder, devices: Sequence[str], driver: PolicyDriver | None = None, module: str = WORKER) -> None:
    """Run the processes of a job to their end.

    Args:
        job: The job's folder.
        devices: The names of the devices in rank order.
        driver: Hears of every step and answers what later ones run; None in a job that is not steered.
        module: What each rank runs, as ``python -m MODULE AGENT_PID JOB_FOLDER``; it calls
            `executor.rank.worker.join_job` first of all.

    Raises:
        InputError: A rank found the input wrong.
        RunError: A rank failed or was killed; says which and why.
    """
    hosts = read_hosts(job.hosts)
    own, agents = socket.socketpair()
    with own, job.log.open("wb") as log:
        with agents:
            agent = subprocess.Popen(
                _command(job, module, agents.fileno()),
                env=environment("lo" if hosts is None else hosts.part(hosts.head).interface),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(agents.fileno(),),
            )
        with ended(agent):
            server = ControlServer(
                _listening(own, agent, job),
                own,
                read_key(job.key),
                job,
                len(devices),
                hosts,
            )
            try:
                coordinator = Coordinator(job, devices, hosts, server, driver)
                try:
                    coordinator.run()
                except BaseException as error:
                    coordinator.dismiss(1, str(error) or "it was interrupted")
                    raise
                coordinator.dismiss(0)
            finally:
                server.close()
                # It ends the relay too, whose report is wanted.
                with suppress(subprocess.TimeoutExpired):
                    agent.wait(timeouts().agent_exit_s)


def _command(job: JobFolder, module: str, channel: int) -> list[str]:
    _, _, config = job.read()
    me = str(os.getpid())
    agent = [sys.executable, "-m", "executor.control.node_agent", me, str(job.path), module, str(channel)]
    isolated = [sys.executable, "-m", "executor.wan.linux", "run", me]
    return [*isolated, *agent] if config.emulator == "relay" else agent


def _listening(own: socket.socket, agent: "subprocess.Popen[bytes]", job: JobFolder) -> socket.socket:
    """Return the socket that an agent listens at, in whichever network it is.

    Raises:
        RunError: It cannot.
    """
    said, descriptors, _, _ = socket.recv_fds(own, 1, 1)
    if descriptors:
        return socket.socket(fileno=descriptors[0])
    if said:
        with own.makefile("rb") as rest:
            message = decode(said + rest.readline()) or {}
        raise RunError(str(message.get("reason")))
    status = agent.wait()
    printed = job.log.read_text(errors="replace").strip().splitlines()[-3:]
    raise RunError(f"the agent of this host ended with status {status}: {' | '.join(printed) or 'no message'}")
