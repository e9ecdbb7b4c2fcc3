"""Kubernetes with Kubeflow Trainer v2: a TrainJob for each host, since hosts may be unlike and must fail alone.

The job's folder travels as a ConfigMap, and is unpacked in a volume of the pod, or in one that outlives it: ``claim``
names it. All hosts are in one cluster, where the head is known by its pod's name. Secrets are those of the Kubernetes
secret ``JOB-secrets``.
"""

import base64
import io
import re
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from executor.deploy.deployment import Deployment
from executor.deploy.target import Target, asked
from traces.common.errors import InputError

_MANIFEST = "trainjobs.yaml"
_RUNTIME = "torch-distributed"
_MOST_BYTES = 1 << 20
_BUNDLE = "job.tar.gz"
_LABEL = "ropebridge/job"
# Where the job's folder is unpacked, and with it what the run writes.
_PLACE = "/ropebridge-run"
# What all hosts with the same claim see.
_SHARED = "/ropebridge-shared"
# With "-node-0-0", which the trainer appends for the pod, it is a label of the domain name system.
_MOST_NAME = 63 - len("-node-0-0")
_NAME = re.compile(rf"[a-z]([-a-z0-9]{{0,{_MOST_NAME - 2}}}[a-z0-9])?")


def files(deployment: Deployment) -> Mapping[str, str]:
    """Return the manifest of the TrainJobs; the ConfigMap with the folder is made when it is submitted."""
    _check_names(deployment)
    jobs = [_train_job(deployment, part.name, len(part.ranks)) for part in deployment.hosts.parts]
    note = f"# The folder 'job' goes ahead: kubectl create configmap {deployment.name} --from-file={_BUNDLE}\n"
    if deployment.secrets:
        values = "; ".join(f'echo "{name}=${name}"' for name in deployment.secrets)
        create = f"kubectl create secret generic {deployment.name}-secrets --from-env-file=/dev/stdin"
        note += f"# And the secrets: ({values}) | {create}\n"
    return {_MANIFEST: note + yaml.safe_dump_all(jobs, sort_keys=False)}


def _train_job(deployment: Deployment, host: str, ranks: int) -> dict[str, Any]:
    settings = dict(deployment.entries[host].kubernetes or {})
    if "image" not in settings:
        raise InputError(
            f"nothing is said of the container of host '{host}'",
            where=f"hosts.{host}.kubernetes.image",
            valid="name an image that has ropebridge",
        )
    pod, claim = dict(settings.pop("pod", {})), settings.pop("claim", None)
    run = deployment.command(host, "job", head=_head(deployment))
    variables: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in deployment.environment.items()]
    secret = f"{deployment.name}-secrets"
    variables += [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": name}}} for name in deployment.secrets
    ]
    name = _job_name(deployment, host)
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": name, "labels": {_LABEL: deployment.name}},
        "spec": {
            "runtimeRef": {"name": _RUNTIME},
            "trainer": {
                "numNodes": 1,
                "numProcPerNode": max(1, ranks),
                "command": ["bash", "-c"],
                "args": [f"cd {_PLACE} && tar xzf /ropebridge/{_BUNDLE} && exec {run}"],
                **({"env": variables} if (variables := [*variables, *settings.pop("env", [])]) else {}),
                **settings,
            },
            "runtimePatches": [
                {
                    "manager": "ropebridge.deploy/bundle",
                    "trainingRuntimeSpec": _with_folder(deployment, host, pod, claim),
                }
            ],
        },
    }


def _with_folder(deployment: Deployment, host: str, pod: dict[str, Any], claim: str | None) -> dict[str, Any]:
    """What a runtime's node needs to have the job's folder, and what else is asked of its pod."""
    mounts = [{"name": "ropebridge", "mountPath": "/ropebridge"}]
    volumes: list[dict[str, Any]] = [{"name": "ropebridge", "configMap": {"name": deployment.name}}]
    if claim is None:
        mounts.append({"name": "run", "mountPath": _PLACE})
        volumes.append({"name": "run", "emptyDir": {}})
    else:
        mounts.append({"name": "run", "mountPath": _PLACE, "subPath": f"{deployment.name}/{host}"})
        mounts.append({"name": "run", "mountPath": _SHARED, "subPath": f"{deployment.name}/shared"})
        volumes.append({"name": "run", "persistentVolumeClaim": {"claimName": claim}})
    volumes += pod.pop("volumes", [])
    containers = [{"name": "node", "volumeMounts": mounts}, *pod.pop("containers", [])]
    spec = {"volumes": volumes, "containers": containers, **pod}
    return {
        "template": {"spec": {"replicatedJobs": [{"name": "node", "template": {"spec": {"template": {"spec": spec}}}}]}}
    }


def _check_names(deployment: Deployment) -> None:
    """Refuse names that Kubernetes would, after it has made half of the job."""
    seen: dict[str, str] = {}
    for part in deployment.hosts.parts:
        name = _job_name(deployment, part.name)
        if not _NAME.fullmatch(name):
            raise InputError(
                f"'{name}' is no name for a job in Kubernetes",
                where=f"host {part.name}",
                valid=f"begin the folder's name with a letter, and keep it and the host's to {_MOST_NAME} together",
            )
        if name in seen:
            raise InputError(
                f"hosts '{seen[name]}' and '{part.name}' have one name in Kubernetes",
                where="hosts",
                valid="let them differ in more than case and dots",
            )
        seen[name] = part.name


def _job_name(deployment: Deployment, host: str) -> str:
    # As names in Kubernetes are.
    return f"{deployment.name}-{host}".lower().replace("_", "-").replace(".", "-")


def _head(deployment: Deployment) -> str:
    """The head's pod, as the trainer's job sets name it."""
    name = _job_name(deployment, deployment.hosts.head)
    return deployment.hosts.address or f"{name}-node-0-0.{name}"


def packed(folder: Path) -> bytes:
    """Return the job's folder as an archive that a ConfigMap can hold.

    Raises:
        InputError: It is too large.
    """
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        tar.add(folder / "job", "job")
    if len(base64.b64encode(archive.getvalue())) > _MOST_BYTES:
        raise InputError(
            f"the job's folder is {archive.tell() / 1e6:.1f} MB, packed, and a ConfigMap holds 1 MB",
            where=str(folder / "job"),
            valid="shorten the scenario's traces, or use '--target ssh'",
        )
    return archive.getvalue()


def submit(deployment: Deployment, folder: Path) -> str:
    """Create the ConfigMap, and apply the manifest."""
    path = folder / _BUNDLE
    path.write_bytes(packed(folder))
    if deployment.secrets:
        asked(["kubectl", "get", "secret", f"{deployment.name}-secrets"], "the job's secrets")
    asked(["kubectl", "create", "configmap", deployment.name, f"--from-file={path}"], "kubectl create configmap")
    asked(["kubectl", "label", "configmap", deployment.name, f"{_LABEL}={deployment.name}"], "kubectl label")
    return asked(["kubectl", "apply", "-f", str(folder / _MANIFEST)], "kubectl apply").strip()


def status(deployment: Deployment, folder: Path) -> Mapping[str, str]:
    """Ask for the pods' phases."""
    found = {}
    for part in deployment.hosts.parts:
        selector = f"jobset.sigs.k8s.io/jobset-name={_job_name(deployment, part.name)}"
        phase = ["kubectl", "get", "pods", "-l", selector, "-o", "jsonpath={.items[*].status.phase}"]
        found[part.name] = asked(phase, "kubectl get").strip() or "no pod"
    return found


def logs(deployment: Deployment, folder: Path, host: str, lines: int, follows: bool) -> list[str]:
    """Return the command that shows a host's log."""
    selector = f"jobset.sigs.k8s.io/jobset-name={_job_name(deployment, host)}"
    return ["kubectl", "logs", "-l", selector, f"--tail={lines}", *(["--follow"] if follows else [])]


def stop(deployment: Deployment, folder: Path) -> str:
    """Delete the TrainJobs and the ConfigMap."""
    kinds = "trainjobs.trainer.kubeflow.org,configmaps"
    return asked(["kubectl", "delete", kinds, "-l", f"{_LABEL}={deployment.name}"], "kubectl delete").strip()


KUBERNETES = Target("kubernetes", files, submit, status, logs, stop)
