"""Starts the processes of a job and follows them to their end, from its folder on."""

import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress

from executor.control import node_agent
from executor.control.attachment import Attachment, Survival
from executor.control.control_server import ControlServer
from executor.control.coordinator import Coordinator
from executor.control.policy_driver import PolicyDriver
from executor.control.workers import WorkersCoordinator
from executor.core.clock import create_origin
from executor.core.control_channel import decode, new_key, read_key, write_key
from executor.core.failures import FULL_DISK
from executor.core.hosts import Hosts, read_hosts
from executor.core.job import JobFolder, RunConfig
from executor.core.subprocesses import NO_ROOM, ended
from executor.core.timeouts import timeouts
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from traces.common.atomic import scratch_folder
from traces.common.errors import RunError


@contextmanager
def prepared_job(
    scenario: Scenario,
    plan: Plan,
    config: RunConfig,
    hosts: Hosts | None = None,
    survival: Survival | Attachment | None = None,
) -> Iterator[JobFolder]:
    """Yield the folder of a job for `run_job`.

    Unless ranks outlive this process, it is a temporary one, which is removed after the block with its files.
    """
    if isinstance(survival, Attachment):
        yield survival.job
        return
    with scratch_folder() if survival is None else nullcontext(survival.folder) as folder:
        job = JobFolder(folder)
        job.write(scenario, plan, config)
        create_origin(job.origin)
        if hosts is None:
            write_key(job.key, new_key())
        else:
            hosts.write(job.hosts)
        yield job


def run_job(
    job: JobFolder,
    devices: Sequence[str],
    driver: PolicyDriver | None = None,
    survival: Survival | Attachment | None = None,
    module: str = node_agent.WORKER,
) -> None:
    """Run the processes of a job to their end.

    Args:
        job: The job's folder.
        devices: The names of the devices in rank order.
        driver: Calls the policy after each step; None in a job whose ranks receive no messages while they run.
        survival: How ranks outlive this process, or the ranks that have outlived an earlier one, to follow instead of
            new ones; None if ranks end with this process.
        module: Module whose function ``main`` each rank runs, called with the agent's process id and the job's
            folder, as strings; the function must first call `executor.rank.worker.join_job`.

    Raises:
        InputError: A rank reported wrong input.
        RunError: A rank failed or was killed; the message names the rank and the cause.
    """
    hosts = read_hosts(job.hosts)
    with _attached(job, module, hosts, survival) as attachment:
        server = ControlServer(attachment.listening, attachment.own, read_key(job.key), job, len(devices), hosts)
        try:
            kind = WorkersCoordinator if job.read_config().decoupled else Coordinator
            reached = job.first_unfinished() if attachment is survival else None
            coordinator = kind(job, devices, hosts, server, driver, reached)
            try:
                coordinator.run()
            except BaseException as error:
                coordinator.dismiss(1, str(error) or "it was interrupted")
                raise
            coordinator.dismiss(0)
        finally:
            server.close()
            # Wait, since the agent also ends the relay, which then writes its report.
            with suppress(subprocess.TimeoutExpired):
                attachment.agent.wait(timeouts().agent_exit_s)


@contextmanager
def _attached(
    job: JobFolder, module: str, hosts: Hosts | None, survival: Survival | Attachment | None
) -> Iterator[Attachment]:
    """Yield the connection to the agent of this host, which is started if there is none; it has ended afterwards."""
    if isinstance(survival, Attachment):
        with survival.own, ended(survival.agent):
            yield survival
        return
    own, agents = socket.socketpair()
    with own:
        with agents:
            interface = "lo" if hosts is None else hosts.part(hosts.head).interface
            agent = node_agent.start_agent(job, module, agents, interface, survival)
        with ended(agent), _naming_full_disk(agent):
            yield Attachment(job, agent, own, _listening(own, agent, job))


@contextmanager
def _naming_full_disk(agent: "subprocess.Popen[bytes]") -> Iterator[None]:
    """Return a context that gives the cause of a `RunError` where an agent that has ended could not write."""
    try:
        yield
    except RunError as error:
        if agent.returncode == NO_ROOM:
            raise RunError(f"the agent of this host: its files cannot be written: {FULL_DISK}") from error
        raise


def _listening(own: socket.socket, agent: "subprocess.Popen[bytes]", job: JobFolder) -> socket.socket:
    """Return the listening socket that the agent passes over ``own``; raise `RunError` if the agent cannot listen."""
    said, descriptors, _, _ = socket.recv_fds(own, 1, 1)
    if descriptors:
        return socket.socket(fileno=descriptors[0])
    if said:
        with own.makefile("rb") as rest:
            message = decode(said + rest.readline()) or {}
        raise RunError(str(message.get("reason")))
    status = agent.wait()
    raise RunError(f"the agent of this host ended with status {status}: {job.last_printed() or 'no message'}")
