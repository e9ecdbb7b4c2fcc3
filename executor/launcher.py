"""Starts a job's processes on this machine, watches them, and ends them whatever happens."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from executor.job import JobFolder
from traces.errors import InputError, RunError

# How often the launcher looks whether the job has ended and whether the policy has something to decide.
POLL_S = 0.005

# How long torchrun may take to end its workers before the kernel does.
GRACE_S = 5.0


def run_job(job: JobFolder, devices: Sequence[str], meanwhile: Callable[[], None]) -> None:
    """Run the workers of a job to their end.

    Args:
        job: Holds their orders.
        devices: In rank order.
        meanwhile: Called every few milliseconds while they run.

    Raises:
        InputError: A worker found the input wrong.
        RunError: A worker failed or was killed; says which and why.
    """
    environment = {
        **os.environ,
        # All ranks are on this machine; gloo must not look its host name up.
        "GLOO_SOCKET_IFNAME": "lo",
        # Workers import ropebridge, never a folder of the same name where the user happens to stand.
        "PYTHONSAFEPATH": "1",
        "OMP_NUM_THREADS": "1",
        # Agent and workers find the packages where this process found them.
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    command = [sys.executable, "-m", "executor.agent", str(os.getpid()), str(job.path), str(len(devices))]
    with job.log.open("wb") as log:
        agent = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while agent.poll() is None:
                meanwhile()
                time.sleep(POLL_S)
            # What the workers published last.
            meanwhile()
        finally:
            _end(agent)
    if agent.returncode != 0:
        raise _failure(job, devices, agent.returncode)


def _end(agent: "subprocess.Popen[bytes]") -> None:
    """End torchrun, which ends its workers; the kernel ends those that outlive it."""
    if agent.poll() is not None:
        return
    agent.terminate()
    try:
        agent.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        agent.kill()
        agent.wait()


def _failure(job: JobFolder, devices: Sequence[str], status: int) -> Exception:
    """What went wrong, from what the workers and the agent wrote down: the cause, not what followed from it."""
    exit_codes: dict[str, int] = json.loads(job.failure.read_text()) if job.failure.exists() else {}
    for ended, code in sorted(exit_codes.items()):
        # torchrun itself ends the other ranks by SIGTERM.
        if code < 0 and -code != signal.SIGTERM:
            return RunError(f"rank {ended} (device '{devices[int(ended)]}') was ended by {_signal_name(-code)}")
    reports: dict[int, dict[str, Any]] = {
        rank: json.loads(job.error(rank).read_text()) for rank in range(len(devices)) if job.error(rank).exists()
    }
    if not reports:
        tail = job.log.read_text(errors="replace").strip().splitlines()[-3:]
        return RunError(f"the workers ended with status {status}: {' | '.join(tail) or 'no message'}")
    rank, report = min(reports.items(), key=lambda item: (item[1]["lost_peer"], item[1]["time_s"]))
    message = f"rank {rank} (device '{report['device']}'): {report['message']}"
    if report["input"]:
        return InputError(message)
    error = RunError(message)
    error.add_note("".join(report["traceback"]))
    return error


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
