"""Deployment by Kubernetes with Kubeflow Trainer v2: a TrainJob for each host, since hosts differ and fail separately.

Each pod gets the job's folder, in which the job's key is, from a Kubernetes secret, and unpacks it in a volume of the
pod, or in the PersistentVolumeClaim ``claim`` of the hosts file, whose files remain after the pod's end. All pods are
in one Kubernetes cluster, where the head is reached by the name of its pod. Values of the user's secrets are in the
Kubernetes secret ``JOB-secrets``. Each pod asks for the GPUs of its host, and for a node with such GPUs if the hosts
file has ``gpu_label``.
"""

import base64
import io
import re
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from executor.deploy.deployment import Deployment
from executor.deploy.target import Target, render, run_program
from traces.common.errors import InputError, shown

_MANIFEST = "trainjobs.yaml"
_BUNDLE = "job.tar.gz"
_LABEL = "ropebridge/job"
# The resource of NVIDIA's device plugin.
_GPU = "nvidia.com/gpu"
# The largest size of a Kubernetes secret.
_MOST_BYTES = 1 << 20
# The longest name: with the suffix that the trainer appends for the pod, the name is a DNS label of at most 63 letters.
_MOST_NAME = 63 - len("-node-0-0")
_NAME = re.compile(rf"[a-z]([-a-z0-9]{{0,{_MOST_NAME - 2}}}[a-z0-9])?")


def files(deployment: Deployment) -> Mapping[str, str]:
    """Return the manifest of the TrainJobs; `submit` creates the secret with the job's folder."""
    _check_names(deployment)
    jobs = [_job(deployment, part.name, len(part.ranks)) for part in deployment.hosts.parts]
    return {_MANIFEST: render("kubernetes.yaml", deployment, jobs=jobs, bundle=_BUNDLE, label=_LABEL)}


def _check_shape(trainer: Mapping[str, Any], host: str) -> None:
    """Raise `InputError` if a value that the manifest adds to is not a mapping, or not a list."""
    pod = trainer.get("pod", {})
    shapes = [("pod", pod, dict), ("env", trainer.get("env", []), list)]
    shapes.append(("resourcesPerNode", trainer.get("resourcesPerNode", {}), dict))
    if isinstance(pod, dict):
        shapes += [("pod.nodeSelector", pod.get("nodeSelector", {}), dict)]
        shapes += [(f"pod.{name}", pod.get(name, []), list) for name in ("volumes", "containers")]
    for name, value, shape in shapes:
        if not isinstance(value, shape):
            raise InputError(
                f"{shown(value)} has the wrong form",
                where=f"hosts.{host}.kubernetes.{name}",
                valid="give a mapping of names to values" if shape is dict else "give a list",
            )


def _job(deployment: Deployment, host: str, ranks: int) -> dict[str, Any]:
    """Return the values of the template ``kubernetes.yaml`` that differ between hosts."""
    trainer = dict(deployment.entries[host].kubernetes or {})
    if "image" not in trainer:
        raise InputError(
            f"host '{host}' has no container image",
            where=f"hosts.{host}.kubernetes.image",
            valid="give the name of a container image in which ropebridge is installed",
        )
    _check_shape(trainer, host)
    pod = dict(trainer.pop("pod", {}))
    if deployment.gpus.count(host):
        trainer["resourcesPerNode"] = _with_gpus(deployment, host, trainer.get("resourcesPerNode", {}))
        if selector := _node_labels(deployment, host):
            pod["nodeSelector"] = {**selector, **pod.get("nodeSelector", {})}
    secret = f"{deployment.name}-secrets"
    variables: list[Any] = [{"name": name, "value": value} for name, value in deployment.environment.items()]
    variables += [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": name}}} for name in deployment.secrets
    ]
    variables += trainer.pop("env", [])
    head = _job_name(deployment, deployment.hosts.head)
    # The host name that Kubernetes' JobSet gives the head's pod.
    address = deployment.hosts.address or f"{head}-node-0-0.{head}"
    return {
        "host": host,
        "name": _job_name(deployment, host),
        "processes": max(1, ranks),
        "command": deployment.command(host, "job", head=address),
        "claim": trainer.pop("claim", None),
        "trainer": {**({"env": variables} if variables else {}), **trainer},
        "volumes": pod.pop("volumes", []),
        "containers": pod.pop("containers", []),
        "pod": pod,
    }


def _with_gpus(deployment: Deployment, host: str, resources: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a pod's resources with the GPUs of its host, unless the hosts file gives GPUs of any vendor."""
    if any("gpu" in name or "/mig-" in name for part in ("limits", "requests") for name in resources.get(part) or ()):
        return resources
    return {**resources, "limits": {**(resources.get("limits") or {}), _GPU: str(deployment.gpus.count(host))}}


def _node_labels(deployment: Deployment, host: str) -> dict[str, str]:
    """Return the label of nodes with the GPUs of a host; empty if the hosts file gives none, or selects nodes by it."""
    gpus, pod = deployment.gpus, (deployment.entries[host].kubernetes or {}).get("pod", {})
    if not gpus.label or gpus.label in pod.get("nodeSelector", {}):
        return {}
    for kind in gpus.kinds(host):
        if kind not in gpus.names:
            raise InputError(
                f"the value of the label '{gpus.label}' is unknown for GPUs of the kind '{kind}'",
                where="gpus",
                valid=f"give it, such as '{kind}: NVIDIA-A100-SXM4-40GB', or leave 'gpu_label' out",
            )
    value, *others = dict.fromkeys(gpus.names[kind] for kind in gpus.kinds(host))
    if others:
        raise InputError(
            f"host '{host}' has GPUs with the labels {', '.join([value, *others])}, and a node has one only",
            where="gpu_label",
            valid=f"leave it out, or give the label in hosts.{host}.kubernetes.pod.nodeSelector",
        )
    return {gpus.label: value}


def _check_names(deployment: Deployment) -> None:
    """Raise `InputError` for names that Kubernetes would refuse, possibly after a part of the job was created."""
    hosts: dict[str, str] = {}
    for part in deployment.hosts.parts:
        name = _job_name(deployment, part.name)
        if not _NAME.fullmatch(name):
            raise InputError(
                f"'{name}' is not a valid name of a job in Kubernetes",
                where=f"host {part.name}",
                valid="begin the name of the job's folder with a letter; the names of folder and host may have "
                f"{_MOST_NAME - 1} characters together",
            )
        if name in hosts:
            raise InputError(
                f"hosts '{hosts[name]}' and '{part.name}' have the same name in Kubernetes",
                where="hosts",
                valid="give them names that differ in more than case, dots and underscores",
            )
        hosts[name] = part.name


def _job_name(deployment: Deployment, host: str) -> str:
    return re.sub("[_.]", "-", f"{deployment.name}-{host}".lower())


def packed(folder: Path) -> bytes:
    """Return the job's folder as a tar archive; raise `InputError` if the archive does not fit into a secret."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        tar.add(folder / "job", "job")
    if len(base64.b64encode(archive.getvalue())) > _MOST_BYTES:
        raise InputError(
            f"the job's folder is {archive.tell() / 1e6:.1f} MB when packed, and a secret can hold 1 MB in base64",
            where=str(folder / "job"),
            valid="shorten the scenario's traces, or use '--target ssh'",
        )
    return archive.getvalue()


def submit(deployment: Deployment, folder: Path) -> str:
    """Create the secret, apply the manifest, and return kubectl's output."""
    path = folder / _BUNDLE
    path.write_bytes(packed(folder))
    if deployment.secrets:
        run_program(["kubectl", "get", "secret", f"{deployment.name}-secrets"], "the job's secrets")
    run_program(
        ["kubectl", "create", "secret", "generic", deployment.name, f"--from-file={path}"], "kubectl create secret"
    )
    run_program(["kubectl", "label", "secret", deployment.name, f"{_LABEL}={deployment.name}"], "kubectl label")
    return run_program(["kubectl", "apply", "-f", str(folder / _MANIFEST)], "kubectl apply").strip()


def status(deployment: Deployment, folder: Path) -> Mapping[str, str]:
    """Return the phases of each host's pods, such as ``Running``."""
    phases = {}
    for part in deployment.hosts.parts:
        command = ["kubectl", "get", "pods", "-l", _selector(deployment, part.name)]
        phase = run_program([*command, "-o", "jsonpath={.items[*].status.phase}"], "kubectl get")
        phases[part.name] = phase.strip() or "no pod"
    return phases


def logs(deployment: Deployment, folder: Path, host: str, lines: int, follow: bool) -> list[str]:
    """Return the command that shows a host's log."""
    command = ["kubectl", "logs", "-l", _selector(deployment, host), f"--tail={lines}"]
    return [*command, *(["--follow"] if follow else [])]


def _selector(deployment: Deployment, host: str) -> str:
    return f"jobset.sigs.k8s.io/jobset-name={_job_name(deployment, host)}"


def stop(deployment: Deployment, folder: Path) -> str:
    """Delete the TrainJobs and the secret with the job's folder."""
    kinds = "trainjobs.trainer.kubeflow.org,secrets"
    return run_program(["kubectl", "delete", kinds, "-l", f"{_LABEL}={deployment.name}"], "kubectl delete").strip()


TARGET = Target("kubernetes", files, submit, status, logs, stop)
