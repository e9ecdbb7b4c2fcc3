"""Deployment by SkyPilot: a task for each host, possibly on different clouds; the head's task is launched first.

Each task asks for the accelerators of its host, unless its resources in the hosts file do.

A port on a public address can be reached from anywhere, so hosts in different clouds should connect over WireGuard,
which the commands of ``setup:`` in the hosts file can start.
"""

import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from executor.deploy.deployment import Deployment
from executor.deploy.target import Target, check_program, check_secrets, render, run_program
from traces.common.errors import InputError, RunError

_SCRIPT = "submit.sh"
# Environment variable of a task: the address of the head, which the script passes to the tasks of the other hosts.
_HEAD = "ROPEBRIDGE_HEAD"

# The names of kinds of the datasheet in SkyPilot's catalogue, as `sky show-gpus -a` prints them (SkyPilot's
# documentation, "GPUs and Accelerators", 2025). Kinds that no cloud of the catalogue rents are absent.
ACCELERATORS: Mapping[str, str] = MappingProxyType(
    {
        "p100": "P100",
        "v100-16": "V100",
        "v100-32": "V100-32GB",
        "t4": "T4",
        "a100-40": "A100",
        "a100-80": "A100-80GB",
        "a10g": "A10G",
        "l4": "L4",
        "l40s": "L40S",
        "h100-80": "H100",
        "h200": "H200",
        "gh200-96": "GH200",
        "p4000": "P4000",
        "rtx-6000": "RTX6000",
        "a4000": "A4000",
        "a5000": "RTXA5000",
        "a6000": "A6000",
        "rtx-3090": "RTX3090",
        "rtx-4090": "RTX4090",
    }
)

# The keys of resources that give accelerators, or an instance type that has them.
_GIVE_GPUS = ("accelerators", "instance_type", "any_of", "ordered")


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
            valid="give the 'resources' of a SkyPilot task, such as 'infra: gcp/us-central1'",
        )
    resources = {**resources, **_accelerators(deployment, host, resources)}
    # The head is launched before its address is known, so by default its task finds the address itself.
    own = "$(hostname -I | cut -d ' ' -f 1)"
    head = f'"${{{_HEAD}:-{own}}}"' if host == deployment.hosts.head else f'"${_HEAD}"'
    return {
        "name": _cluster(deployment, host),
        "resources": resources,
        "num_nodes": 1,
        "file_mounts": {"~/ropebridge-job/job": "./job"},
        "envs": {_HEAD: deployment.hosts.address, **deployment.environment},
        **({"secrets": dict.fromkeys(deployment.secrets)} if deployment.secrets else {}),
        **({"setup": deployment.setup} if deployment.setup else {}),
        "run": f"cd ~/ropebridge-job\nexec {deployment.command(host, 'job', head=head)}\n",
    }


def _accelerators(deployment: Deployment, host: str, resources: Mapping[str, Any]) -> dict[str, str]:
    """Return the key for the GPUs of a host; empty if it needs none, or its resources give them."""
    gpus = deployment.gpus
    if not gpus.count(host) or any(key in resources for key in _GIVE_GPUS):
        return {}
    valid = f"give 'accelerators' in hosts.{host}.skypilot"
    for kind in gpus.kinds(host):
        if kind not in gpus.names and kind not in ACCELERATORS:
            raise InputError(
                f"SkyPilot's name for GPUs of the kind '{kind}' is unknown",
                where="gpus",
                valid=f"give a name that 'sky show-gpus -a' prints, such as '{kind}: A100', or {valid}",
            )
    name, *others = dict.fromkeys(gpus.names.get(kind) or ACCELERATORS[kind] for kind in gpus.kinds(host))
    if others:
        raise InputError(
            f"host '{host}' has GPUs of the kinds {', '.join([name, *others])}, and a task can ask for one only",
            where=f"hosts.{host}",
            valid=valid,
        )
    return {"accelerators": f"{name}:{gpus.count(host)}"}


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
