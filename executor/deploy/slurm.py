"""Slurm: a script for ``sbatch``, in which each host is a component of one heterogeneous job.

Kinds of GPUs that one partition does not have, several components do: each asks for what its host's ``slurm:`` says.
"""

import json
import os
import shlex
from collections.abc import Mapping
from pathlib import Path

from executor.deploy.deployment import Deployment
from executor.deploy.target import Target, asked, exports, need_secrets
from traces.common.errors import InputError, RunError

_SCRIPT = "job.sbatch"
_SUBMITTED = "submitted.json"


def files(deployment: Deployment) -> Mapping[str, str]:
    """Return the script."""
    hosts = [part.name for part in deployment.hosts.parts]
    components = [[f"#SBATCH {option}" for option in _options(deployment, host)] for host in hosts]
    lines = [
        "#!/usr/bin/env bash",
        f"#SBATCH --job-name={deployment.name}",
        "#SBATCH --output=slurm.log",
        *(line for first, rest in [(components[0], components[1:])] for line in _joined(first, rest)),
        "set -euo pipefail",
        "# Where nothing else is said, the head is reached at the first node's name.",
        f"head={shlex.quote(deployment.hosts.address)}",
        'nodes="${SLURM_JOB_NODELIST_HET_GROUP_0:-$SLURM_JOB_NODELIST}"',
        'head="${head:-$(scontrol show hostnames "$nodes" | head -n 1)}"',
        "# Secrets come with the environment that sbatch hands on.",
        *exports(deployment.environment).splitlines(),
        _run(deployment, hosts),
        "",
    ]
    return {_SCRIPT: "\n".join(lines)}


def _options(deployment: Deployment, host: str) -> list[str]:
    return ["--nodes=1", "--ntasks=1", *deployment.entries[host].slurm]


def _joined(first: list[str], rest: list[list[str]]) -> list[str]:
    return [*first, *(line for component in rest for line in ("#SBATCH hetjob", *component))]


def _run(deployment: Deployment, hosts: list[str]) -> str:
    """One srun, whose components are the hosts."""
    commands = [deployment.command(host, "job", head='"$head"') for host in hosts]
    if len(hosts) == 1:
        return f"srun {commands[0]}"
    parts = [f"--het-group={number} {command}" for number, command in enumerate(commands)]
    # A host that is lost must not take the others with it.
    return "srun --kill-on-bad-exit=0 " + " : \\\n  ".join(parts)


def submit(deployment: Deployment, folder: Path) -> str:
    """Hand the script to sbatch."""
    need_secrets(deployment.secrets, os.environ)
    number = asked(["sbatch", "--parsable", f"--chdir={folder.resolve()}", str(folder.resolve() / _SCRIPT)], "sbatch")
    identity = number.strip().split(";")[0]
    (folder / _SUBMITTED).write_text(json.dumps({"job": identity}) + "\n")
    return f"Slurm job {identity}"


def status(deployment: Deployment, folder: Path) -> Mapping[str, str]:
    """Ask Slurm; a job that it knows no more has ended."""
    job = _job(folder)
    try:
        command = ["squeue", "--noheader", "--format=%i %T %r", "--jobs", job, "--states=all"]
        found = asked(command, "squeue").split("\n")
    except RunError as error:
        # What it says of a job that it has forgotten.
        if "Invalid job id" not in str(error):
            raise
        found = []
    return dict(line.split(" ", 1) for line in found if line) or {job: "ended"}


def logs(deployment: Deployment, folder: Path, host: str, lines: int, follows: bool) -> list[str]:
    """Return the command that shows the job's log, which all hosts share."""
    return ["tail", *(["-F"] if follows else []), "-n", str(lines), str(folder / "slurm.log")]


def stop(deployment: Deployment, folder: Path) -> str:
    """Cancel the job: its processes get the signal on which they end what they have started."""
    job = _job(folder)
    asked(["scancel", "--full", "--signal=TERM", job], "scancel")
    asked(["scancel", job], "scancel")
    return f"Slurm job {job}: cancelled"


def _job(folder: Path) -> str:
    try:
        return str(json.loads((folder / _SUBMITTED).read_text())["job"])
    except (OSError, ValueError, KeyError):
        raise InputError(
            "this job was never submitted from here", where=str(folder), valid="'ropebridge deploy ... --submit'"
        ) from None


SLURM = Target("slurm", files, submit, status, logs, stop)
