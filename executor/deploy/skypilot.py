"""SkyPilot: a task for each host, which may be on another cloud; the head's comes first, others learn its address.

What listens on a public address is open to all: let the hosts meet over WireGuard, which ``setup:`` can bring up.
"""

import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from executor.deploy.deployment import Deployment
from executor.deploy.target import Target, asked, check_script
from traces.common.errors import InputError, RunError

_SCRIPT = "submit.sh"
_HEAD = "ROPEBRIDGE_HEAD"


def files(deployment: Deployment) -> Mapping[str, str]:
    """Return a task for each host, and the script that launches them."""
    found = {}
    for part in deployment.hosts.parts:
        found[_task_file(part.name)] = yaml.safe_dump(_task(deployment, part.name), sort_keys=False)
    return {**found, _SCRIPT: _script(deployment)}


def _task(deployment: Deployment, host: str) -> dict[str, Any]:
    resources = deployment.entries[host].skypilot
    if resources is None:
        raise InputError(
            f"nothing is said of what host '{host}' needs",
            where=f"hosts.{host}.skypilot",
            valid="give resources as in a task of SkyPilot, such as 'accelerators: A100:1'",
        )
    return {
        "name": _cluster(deployment, host),
        "resources": dict(resources),
        "num_nodes": 1,
        "file_mounts": {"~/ropebridge-job/job": "./job"},
        "envs": {_HEAD: deployment.hosts.address, **deployment.environment},
        **({"secrets": dict.fromkeys(deployment.secrets)} if deployment.secrets else {}),
        **({"setup": deployment.setup} if deployment.setup else {}),
        "run": f"cd ~/ropebridge-job\nexec {deployment.command(host, 'job', head=_head(deployment, host))}\n",
    }


def _head(deployment: Deployment, host: str) -> str:
    """Shell words for the head's address; the head itself, launched first, takes its own."""
    own = "$(hostname -I | cut -d ' ' -f 1)"
    return f'"${{{_HEAD}:-{own}}}"' if host == deployment.hosts.head else f'"${_HEAD}"'


def _script(deployment: Deployment) -> str:
    secrets = "".join(f" --secret {name}" for name in deployment.secrets)
    head = _cluster(deployment, deployment.hosts.head)
    lines = [
        "#!/usr/bin/env bash",
        f"# Launches the job '{deployment.name}': a cluster of one node for each host.",
        "set -euo pipefail",
        'cd "$(dirname "$0")"',
        _launch(deployment, deployment.hosts.head, secrets),
    ]
    known = shlex.quote(deployment.hosts.address) if deployment.hosts.address else f'"$(sky status --ip {head})"'
    lines.append(f"head={known}")
    lines += [_launch(deployment, host, f'{secrets} --env {_HEAD}="$head"') for host in deployment.others]
    return "\n".join([*lines, ""])


def _launch(deployment: Deployment, host: str, options: str) -> str:
    return f"sky launch --yes --detach-run --cluster {_cluster(deployment, host)}{options} {_task_file(host)}"


def _task_file(host: str) -> str:
    return f"sky-{host}.yaml"


def _cluster(deployment: Deployment, host: str) -> str:
    return f"{deployment.name}-{host}"


def submit(deployment: Deployment, folder: Path) -> str:
    """Run the script."""
    check_script(("sky",), deployment.secrets)
    done = subprocess.run(["bash", str(folder / _SCRIPT)], stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        raise RunError(f"{folder / _SCRIPT} ended with status {done.returncode}: SkyPilot has said above why")
    return "launched"


def status(deployment: Deployment, folder: Path) -> Mapping[str, str]:
    """Ask for each cluster's queue."""
    return {
        part.name: asked(["sky", "queue", _cluster(deployment, part.name)], f"host {part.name}")
        .strip()
        .splitlines()[-1]
        for part in deployment.hosts.parts
    }


def logs(deployment: Deployment, folder: Path, host: str, lines: int, follows: bool) -> list[str]:
    """Return the command that shows a host's log."""
    follow = "--follow" if follows else "--no-follow"
    return ["sky", "logs", _cluster(deployment, host), follow, "--tail", str(lines)]


def stop(deployment: Deployment, folder: Path) -> str:
    """Take the clusters down: what runs costs money."""
    clusters = [_cluster(deployment, part.name) for part in deployment.hosts.parts]
    asked(["sky", "down", "--yes", *clusters], "sky down")
    return f"taken down: {', '.join(clusters)}"


SKYPILOT = Target("skypilot", files, submit, status, logs, stop)
