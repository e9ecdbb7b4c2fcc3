"""Deployment by SkyPilot: a task for each host, possibly on different clouds; the head's task is launched first.

A port on a public address can be reached from anywhere, so hosts in different clouds should connect over WireGuard,
which the commands of ``setup:`` in the hosts file can start.
"""

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from executor.deploy.deployment import Deployment
from executor.deploy.target import Target, check_program, check_secrets, render, run_program
from traces.common.errors import InputError, RunError

_SCRIPT = "submit.sh"
# Environment variable of a task: the address of the head, which the script passes to the tasks of the other hosts.
_HEAD = "ROPEBRIDGE_HEAD"


def files(deployment: Deployment) -> Mapping[str, str]:
    """Return a task for each host, and the script that launches them."""
    tasks = {
        f"sky-{part.name}.yaml": yaml.safe_dump(_task(deployment, part.name), sort_keys=False)
        for part in deployment.hosts.parts
    }
    return {**tasks, _SCRIPT: render("skypilot.sh", deployment)}


def _task(deployment: Deployment, host: str) -> dict[str, Any]:
    resources = deployment.entries[host].skypilot
    if resources is None:
        raise InputError(
            f"host '{host}' has no resources for SkyPilot",
            where=f"hosts.{host}.skypilot",
            valid="give the 'resources' of a SkyPilot task, such as 'accelerators: A100:1'",
        )
    # The head is launched before its address is known, so by default its task finds the address itself.
    own = "$(hostname -I | cut -d ' ' -f 1)"
    head = f'"${{{_HEAD}:-{own}}}"' if host == deployment.hosts.head else f'"${_HEAD}"'
    return {
        "name": _cluster(deployment, host),
        "resources": dict(resources),
        "num_nodes": 1,
        "file_mounts": {"~/ropebridge-job/job": "./job"},
        "envs": {_HEAD: deployment.hosts.address, **deployment.environment},
        **({"secrets": dict.fromkeys(deployment.secrets)} if deployment.secrets else {}),
        **({"setup": deployment.setup} if deployment.setup else {}),
        "run": f"cd ~/ropebridge-job\nexec {deployment.command(host, 'job', head=head)}\n",
    }


def _cluster(deployment: Deployment, host: str) -> str:
    return f"{deployment.name}-{host}"


def submit(deployment: Deployment, folder: Path) -> str:
    """Run the script that launches all tasks."""
    for program in ("sky", "bash"):
        check_program(program)
    check_secrets(deployment.secrets)
    done = subprocess.run(["bash", str(folder / _SCRIPT)], stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        raise RunError(f"{folder / _SCRIPT} ended with status {done.returncode}; SkyPilot's messages above say why")
    return "launched"


def status(deployment: Deployment, folder: Path) -> Mapping[str, str]:
    """Return, for each host, the last line that ``sky queue`` prints for its cluster."""
    states = {}
    for part in deployment.hosts.parts:
        queue = run_program(["sky", "queue", _cluster(deployment, part.name)], f"host {part.name}")
        states[part.name] = queue.strip().splitlines()[-1]
    return states


def logs(deployment: Deployment, folder: Path, host: str, lines: int, follow: bool) -> list[str]:
    """Return the command that shows a host's log."""
    option = "--follow" if follow else "--no-follow"
    return ["sky", "logs", _cluster(deployment, host), option, "--tail", str(lines)]


def stop(deployment: Deployment, folder: Path) -> str:
    """Take the clusters of all hosts down, since a running cluster costs money."""
    clusters = [_cluster(deployment, part.name) for part in deployment.hosts.parts]
    run_program(["sky", "down", "--yes", *clusters], "sky down")
    return f"taken down: {', '.join(clusters)}"


TARGET = Target("skypilot", files, submit, status, logs, stop)
