"""Starts a job's processes on this machine, watches them, and ends them whatever happens."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from executor.core.clock import create_origin
from executor.core.failures import rank_name, read_cause
from executor.core.hosts import read_hosts
from executor.core.job import JobFolder, RunConfig
from executor.core.subprocesses import ended, environment
from executor.transport.link_shaper import create_ledger
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from traces.common.errors import RunError


@contextmanager
def prepared_job(scenario: Scenario, plan: Plan, orders: RunConfig) -> Iterator[JobFolder]:
    """Give the folder of a job, for `run_job`; it is gone afterwards, with what the job left there."""
    folder = Path(tempfile.mkdtemp(prefix="ropebridge-"))
    try:
        job = JobFolder(folder)
        job.write(scenario, plan, orders)
        create_ledger(job.ledger, scenario.cluster)
        create_origin(job.origin)
        yield job
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# How the lines of torch's own log start, which tell that a rank failed and not why.
_TORCHS_OWN = re.compile(r"\[?[EWI]\d{4} ")

_TRACE = "Traceback (most recent call last):"


def run_job(
    job: JobFolder,
    devices: Sequence[str],
    answer: Callable[[str], str] | None = None,
    module: str = "executor.rank.worker",
) -> None:
    """Run the workers of a job to their end.

    Args:
        job: Holds their orders.
        devices: In rank order.
        answer: Called with the telemetry of each step, a line, while they run; returns the line that goes back to
            them. None in a job that does not adapt.
        module: What each rank runs, as ``python -m MODULE AGENT_PID JOB_FOLDER``; it calls `enter_device_network`
            first of all.

    Raises:
        InputError: A worker found the input wrong.
        RunError: A worker failed or was killed; says which and why.
    """
    hosts = read_hosts(job.hosts)
    telemetry, agents_telemetry = os.pipe()
    agents_plans, plans = os.pipe()
    # An agent that has ended before an answer says why by its status.
    no_reader = contextlib.suppress(BrokenPipeError)
    with job.log.open("wb") as log, os.fdopen(telemetry) as inbound, no_reader, os.fdopen(plans, "w") as outbound:
        try:
            agent = subprocess.Popen(
                _command(job, module, agents_telemetry, agents_plans),
                env=environment("lo" if hosts is None else hosts.part(hosts.head).interface),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(agents_telemetry, agents_plans),
            )
        finally:
            os.close(agents_telemetry)
            os.close(agents_plans)
        with ended(agent):
            # The agent alone holds the other end: no line comes any more when it has ended.
            for line in inbound:
                assert answer is not None, "only ranks that adapt send telemetry"
                outbound.write(f"{answer(line)}\n")
                outbound.flush()
            agent.wait()
    if agent.returncode != 0:
        raise _failure(job, devices, agent.returncode)


def _command(job: JobFolder, module: str, telemetry: int, plans: int) -> list[str]:
    _, _, orders = job.read()
    me = str(os.getpid())
    agent = [sys.executable, "-m", "executor.control.node_agent", me, str(job.path), module, str(telemetry), str(plans)]
    isolated = [sys.executable, "-m", "executor.wan.linux", "run", me]
    return [*isolated, *agent] if orders.emulator == "relay" else agent


def _failure(job: JobFolder, devices: Sequence[str], status: int) -> Exception:
    """What went wrong, from what the workers and the agent wrote down: the cause, not what followed from it."""
    exit_codes: dict[str, int] = json.loads(job.failure.read_text()) if job.failure.exists() else {}
    for rank, code in sorted(exit_codes.items()):
        # The agent itself ends the other ranks by SIGTERM.
        if code < 0 and -code != signal.SIGTERM:
            return RunError(f"{rank_name(int(rank), devices[int(rank)])} was ended by {_signal_name(-code)}")
    if job.run_failure.exists():
        return RunError(job.run_failure.read_text())
    return cause_of_end(job, len(devices), status)


def cause_of_end(job: JobFolder, ranks: int, status: int) -> Exception:
    """Return why the workers of this machine have ended, by what they wrote down, or else by what they printed.

    Args:
        job: Its folder here.
        ranks: Of the job.
        status: How who started them ended.
    """
    cause = read_cause(job, ranks)
    if cause is not None:
        return cause
    logs = [job.log, *sorted(job.workers_logs.rglob("stderr.log"))]
    return _unforeseen([log.read_text(errors="replace").strip().splitlines() for log in logs if log.exists()], status)


def _unforeseen(logs: Sequence[Sequence[str]], status: int) -> RunError:
    """What a process said that could write nothing down: the end of its log, and the last stack in it.

    Args:
        logs: The lines of each process. The first that holds a stack says why, or else all together do.
        status: How the agent ended.
    """
    everything = [line for log in logs for line in log]
    log = next((log for log in logs if _TRACE in log), everything)
    said = [line for line in log if not _TORCHS_OWN.match(line)] or log
    error = RunError(f"the workers ended with status {status}: {' | '.join(map(str.strip, said[-3:])) or 'no message'}")
    if _TRACE in said:
        error.add_note("\n".join(said[len(said) - 1 - said[::-1].index(_TRACE) :]))
    return error


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
