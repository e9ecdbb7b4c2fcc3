"""Deployment by Slurm: a script for ``sbatch`` in which each host is a component of one heterogeneous job.

Each component has the options ``slurm:`` of its host in the hosts file, so that components may be in different
partitions, and asks for the GPUs of its host unless these options do.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from executor.deploy.deployment import Deployment
from executor.deploy.target import Target, check_secrets, exports, render, run_program
from traces.common.errors import InputError, RunError

_SCRIPT = "job.sbatch"
_SUBMITTED = "submitted.json"

# The options of sbatch that say which generic resources a node has, and those that say how many GPUs a job has.
_RESOURCES = re.compile(r"--gres[= ]")
_GPUS = re.compile(r"-G|--gpus|--(gres|tres-per-[a-z]+)[= ]\s*(none$|.*\b(gpu|mps|shard)\b)")


def files(deployment: Deployment) -> Mapping[str, str]:
    """Return the script for sbatch."""
    commands = [deployment.command(part.name, "job", head='"$head"') for part in deployment.hosts.parts]
    options = {part.name: _options(deployment, part.name) for part in deployment.hosts.parts}
    values = {"commands": commands, "options": options, "exports": exports(deployment.environment)}
    return {_SCRIPT: render("slurm.sh", deployment, **values)}


def _options(deployment: Deployment, host: str) -> list[str]:
    """Return the options of sbatch for a host: those of the hosts file, and its GPUs unless they ask for any."""
    own, gpus = list(deployment.entries[host].slurm), deployment.gpus
    if not gpus.count(host) or any(map(_GPUS.match, own)):
        return own
    # Slurm refuses a mixture of GPUs with and without a type.
    if set(gpus.kinds(host)) <= set(gpus.names):
        by_type: Counter[str] = Counter()
        for kind, count in gpus.kinds(host).items():
            by_type[gpus.names[kind]] += count
        asked = ",".join(f"gpu:{name}:{count}" for name, count in by_type.items())
    else:
        asked = f"gpu:{gpus.count(host)}"
    # Of several options --gres only the last one counts; --gpus-per-node is no option of every scheduler plugin.
    if others := [option for option in own if _RESOURCES.match(option)]:
        return [f"{option},{asked}" if option is others[-1] else option for option in own]
    return [*own, f"--gres={asked}"]


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
