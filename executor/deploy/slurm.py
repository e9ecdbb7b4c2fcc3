"""Deployment by Slurm: a script for ``sbatch`` in which each host is a component of one heterogeneous job.

Each component has the options ``slurm:`` of its host in the hosts file, so that components may be in different
partitions with different GPUs.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from executor.deploy.deployment import Deployment
from executor.deploy.target import Target, check_secrets, exports, render, run_program
from traces.common.errors import InputError, RunError

_SCRIPT = "job.sbatch"
_SUBMITTED = "submitted.json"


def files(deployment: Deployment) -> Mapping[str, str]:
    """Return the script for sbatch."""
    commands = [deployment.command(part.name, "job", head='"$head"') for part in deployment.hosts.parts]
    return {_SCRIPT: render("slurm.sh", deployment, commands=commands, exports=exports(deployment.environment))}


def submit(deployment: Deployment, folder: Path) -> str:
    """Submit the script to Slurm."""
    check_secrets(deployment.secrets)
    script = folder.resolve() / _SCRIPT
    number = run_program(["sbatch", "--parsable", f"--chdir={script.parent}", str(script)], "sbatch")
    job = number.strip().split(";")[0]
    (folder / _SUBMITTED).write_text(json.dumps({"job": job}) + "\n")
    return f"Slurm job {job}"


def status(deployment: Deployment, folder: Path) -> Mapping[str, str]:
    """Return the state of each component from ``squeue``; a job that Slurm no longer knows has ended."""
    job = _job(folder)
    command = ["squeue", "--noheader", "--format=%i %T %r", "--jobs", job, "--states=all"]
    try:
        lines = run_program(command, "squeue").splitlines()
    except RunError as error:
        # squeue fails with this message for a job that ended some time ago.
        if "Invalid job id" not in str(error):
            raise
        lines = []
    return dict(line.split(" ", 1) for line in lines if line) or {job: "ended"}


def logs(deployment: Deployment, folder: Path, host: str, lines: int, follow: bool) -> list[str]:
    """Return the command that shows the job's log, which all hosts share."""
    return ["tail", *(["-F"] if follow else []), "-n", str(lines), str(folder / "slurm.log")]


def stop(deployment: Deployment, folder: Path) -> str:
    """Cancel the job; its processes first get SIGTERM, on which they end the processes that they have started."""
    job = _job(folder)
    run_program(["scancel", "--full", "--signal=TERM", job], "scancel")
    run_program(["scancel", job], "scancel")
    return f"Slurm job {job}: cancelled"


def _job(folder: Path) -> str:
    try:
        return str(json.loads((folder / _SUBMITTED).read_text())["job"])
    except (OSError, ValueError, KeyError):
        raise InputError(
            "the folder has no number of a Slurm job: the job was not submitted from here",
            where=str(folder),
            valid="submit the job with 'ropebridge deploy ... --submit'",
        ) from None


TARGET = Target("slurm", files, submit, status, logs, stop)
