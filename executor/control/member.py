"""The ranks of a job on a machine that is not its head: they reach the head, which sends them what to do.

Started by `run_member` as ``python -m executor.control.member PARENT_PID JOB_FOLDER``.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from executor.control.keeper import ARRIVAL, CODE
from executor.control.launcher import cause_of_end
from executor.control.processes import run_ranks
from executor.core.clock import create_origin
from executor.core.hosts import Hosts, read_hosts
from executor.core.job import JobFolder
from executor.core.json_lines import AGENT_ADDRESS, JOB, SILENCE
from executor.core.subprocesses import die_with_parent, ended, environment

_NAME = "ROPEBRIDGE_HOST"


def run_member(hosts: Hosts, name: str, code: Path | None) -> None:
    """Run one machine's ranks to their end; its processes have all ended when this returns.

    Args:
        hosts: Of the job.
        name: This one's.
        code: The model's file on this machine; None for paced compute.

    Raises:
        RunError: A rank failed, or the head cannot be reached.
    """
    with tempfile.TemporaryDirectory(prefix="ropebridge-", ignore_cleanup_errors=True) as folder:
        job = JobFolder(Path(folder))
        hosts.write(job.hosts)
        create_origin(job.origin)
        known = {**member_environment(hosts, name, code), _NAME: name}
        command = [sys.executable, "-m", "executor.control.member", str(os.getpid()), folder]
        with job.log.open("wb") as log:
            process = subprocess.Popen(
                command,
                env=known,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            with ended(process):
                process.wait()
        if process.returncode != 0:
            raise cause_of_end(job, hosts.rank_count, process.returncode)


def member_environment(hosts: Hosts, name: str, code: Path | None) -> dict[str, str]:
    """Return the environment of the keepers of a machine, by which they find the head."""
    return {
        **environment(hosts.part(name).interface),
        AGENT_ADDRESS: f"{hosts.address}:{hosts.port}",
        JOB: hosts.job,
        SILENCE: str(hosts.silence_s),
        ARRIVAL: str(hosts.arrival_s),
        CODE: str(code or ""),
    }


def main(parent: str, folder: str) -> int:
    """Run the keepers of this machine; return the exit status."""
    die_with_parent(int(parent))
    job = JobFolder(Path(folder))
    hosts = read_hosts(job.hosts)
    assert hosts is not None, "the parent has written them"
    failed = run_ranks(job, "executor.control.keeper", hosts.part(os.environ[_NAME]).ranks, hosts.rank_count, {})
    return 1 if failed else 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main(*sys.argv[1:]))
