"""Deployment by SkyPilot: a task for each host, possibly on different clouds; the head's is launched first.

Whatever listens on a public address is open to all: let the hosts meet over WireGuard, which ``setup:`` can bring up.
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
# The address of the head, which the script passes to the other hosts' tasks.
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
            valid="give resources as in a task of SkyPilot, such as 'accelerators: A100:1'",
        )
    # The head is launched before its address is known, and takes its own.
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
    """Run the script."""
    for program in ("sky", "bash"):
        check_program(program)
    check_secrets(deployment.secrets)
    done = subprocess.run(["bash", str(folder / _SCRIPT)], stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        raise RunError(f"{folder / _SCRIPT} ended with status {done.returncode}; SkyPilot's messages above say why")
    return "launched"


def status(deployment: Deployment, folder: Path) -> Mapping[str, str]:
    """Return the last line of each cluster's queue."""
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
    """Take the clusters down: a running cluster costs money."""
    clusters = [_cluster(deployment, part.name) for part in deployment.hosts.parts]
    run_program(["sky", "down", "--yes", *clusters], "sky down")
    return f"taken down: {', '.join(clusters)}"


TARGET = Target("skypilot", files, submit, status, logs, stop)
