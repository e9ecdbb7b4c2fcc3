"""What `ropebridge deploy` writes for each target, and what it refuses, through the real command."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.processes.command import ropebridge

SCENARIO = "digits"

HOSTS: dict[str, Any] = {
    "hosts": {
        "north-worker": {
            "address": "10.7.0.1",
            "interface": "wg0",
            "ssh": "me@north",
            "slurm": ["--partition=a", "--gres=gpu:1"],
            "kubernetes": {"image": "registry.example/ropebridge:1", "resourcesPerNode": {"limits": {"cpu": "4"}}},
            "skypilot": {"infra": "gcp/us-central1", "accelerators": "A100:1"},
        },
        "south-worker": {
            "interface": "wg0",
            "folder": "/data/jobs",
            "command": "venv/bin/ropebridge",
            "kubernetes": {
                "image": "registry.example/ropebridge:1",
                "claim": "runs",
                "pod": {"nodeSelector": {"disk": "fast"}},
            },
            "skypilot": {"infra": "aws/us-east-1", "cpus": "8+"},
        },
    },
    "environment": {"GREETING": "it's $HOME"},
    "secrets": ["MY_TOKEN"],
}


def described(folder: Path, **changes: Any) -> Path:
    path = folder / "hosts.yaml"
    path.write_text(yaml.safe_dump({**HOSTS, **changes}))
    return path


def deployed(folder: Path, target: str, *options: object) -> "subprocess.CompletedProcess[str]":
    hosts = described(folder) if not (folder / "hosts.yaml").exists() else folder / "hosts.yaml"
    arguments = (
        "deploy",
        SCENARIO,
        "--strategy=megatron",
        "--target",
        target,
        "--hosts",
        hosts,
        "-o",
        folder / "job-1",
    )
    return ropebridge(*arguments, *options)


@pytest.mark.parametrize(
    ("target", "files"),
    [
        ("torchrun", ["commands.sh"]),
        ("ssh", ["submit.sh"]),
        ("slurm", ["job.sbatch"]),
        ("kubernetes", ["trainjobs.yaml"]),
        ("skypilot", ["sky-north-worker.yaml", "sky-south-worker.yaml", "submit.sh"]),
    ],
)
def test_each_target_writes_what_it_shows(target: str, files: list[str], tmp_path: Path) -> None:
    done = deployed(tmp_path, target, "--steps", 7, "--policy", "depth")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "job-1"
    assert sorted(path.name for path in folder.iterdir()) == sorted([*files, "deployment.json", "job"])
    for file in files:
        text = (folder / file).read_text()
        assert text in done.stdout
        if file.endswith(("sh", "sbatch")):
            subprocess.run(["bash", "-n", folder / file], check=True)
        else:
            assert all(isinstance(each, dict) for each in yaml.safe_load_all(text))
    job = sorted(path.name for path in (folder / "job").iterdir())
    documents = ["plan.json", "run.json", "scenario.json"]
    assert job == ["checksums.json", "environment.sh", "hosts.json", "key", "model.py", *documents]
    assert json.loads((folder / "job" / "run.json").read_text())["steps"] == 7
    greeting = ["bash", "-c", f'. {folder}/job/environment.sh; printf %s "$GREETING"']
    assert subprocess.run(greeting, capture_output=True, text=True, check=True).stdout == "it's $HOME"


def test_secrets_are_written_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "hunter2-hunter2")
    for number, target in enumerate(("torchrun", "ssh", "slurm", "kubernetes", "skypilot")):
        folder = tmp_path / str(number)
        folder.mkdir()
        done = deployed(folder, target)
        assert done.returncode == 0, done.stderr
        written = [path.read_text() for path in (folder / "job-1").rglob("*") if path.is_file()]
        assert not any("hunter2" in text for text in [*written, done.stdout, done.stderr])
        assert any("MY_TOKEN" in text for text in written)


def test_what_deploy_writes_is_for_its_owner_alone(tmp_path: Path) -> None:
    """The environment is in scripts and in the files of schedulers too, and users call secret what they like."""
    for number, target in enumerate(("torchrun", "ssh", "slurm", "kubernetes", "skypilot")):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert deployed(folder, target).returncode == 0
        folder /= "job-1"
        private = [path for path in folder.iterdir() if path.is_file()]
        private += [folder / "job" / name for name in ("key", "hosts.json", "environment.sh")]
        assert len(private) >= 5
        for path in private:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


POLICY = """
def build(scenario):
    raise AssertionError("a policy that was changed is not executed")
"""


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("model.py", "raise AssertionError", "it is not the file that was written with the job"),
        ("policy.py", POLICY, "it is not the file that was written with the job"),
        ("dataset.py", "raise AssertionError", "it is not the file that was written with the job"),
        ("weights/evil.safetensors", "", "it is not the file that was written with the job"),
        ("plan.json", None, "it is missing"),
        ("model.py", None, "it is missing"),
        ("checksums.json", None, "the checksums cannot be read"),
        ("checksums.json", "[", "the checksums cannot be read"),
        ("checksums.json", "[]", "the checksums cannot be read"),
        ("checksums.json", "{}", "it is not the file that was written with the job"),
    ],
)
def test_a_job_of_other_files_is_refused(name: str, content: str | None, problem: str, tmp_path: Path) -> None:
    assert deployed(tmp_path, "torchrun").returncode == 0
    path = tmp_path / "job-1" / "job" / name
    if content is None:
        path.unlink()
    else:
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    done = ropebridge("host", tmp_path / "job-1" / "job", "south-worker")
    assert done.returncode == 2
    if name == "plan.json":
        assert "plan.json" in done.stderr
    else:
        assert problem in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        (
            {"hosts": {"north-worker": HOSTS["hosts"]["north-worker"]}},
            [],
            "host 'south-worker', which has the device south-worker, is not",
        ),
        ({"hosts": {}}, [], "there is no host"),
        ({"head": "nort-worker"}, [], "did you mean 'north-worker'"),
        ({"prot": 3}, [], "did you mean 'port'"),
        ({"hosts": {"north-worker": {"interface": "lo", "adress": "::1"}}}, [], "did you mean 'address'"),
        ({"hosts": {"north-worker": {"interface": "lo", "address": "a b"}}}, [], "hosts.north-worker.address"),
        ({"hosts": [{"interface": "lo"}]}, [], "hosts: a list is not valid; give keys"),
        ({"port": 70000}, [], "hosts.yaml:"),
        ({"secrets": ["not a name"]}, [], "secrets[0]"),
        ({}, ["--policy", "depht"], "did you mean 'depth'"),
        ({}, ["-o", "Job_1"], "is no name for a job"),
        ({}, ["--target", "sssh"], "did you mean 'ssh'"),
    ],
)
def test_wrong_input_is_refused_and_nothing_is_written(
    changes: dict[str, Any], options: list[str], message: str, tmp_path: Path
) -> None:
    described(tmp_path, **changes)
    done = deployed(tmp_path, "ssh", *options)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["hosts.yaml"]


def test_the_other_verbs_name_what_they_need(tmp_path: Path) -> None:
    for verb in ("status", "logs", "stop"):
        done = ropebridge(verb, tmp_path)
        assert done.returncode == 2
        assert "there is no deployment" in done.stderr
    done = ropebridge("host", tmp_path, "north-worker")
    assert done.returncode == 2
    assert "there is no such file" in done.stderr
    assert deployed(tmp_path, "torchrun").returncode == 0
    done = ropebridge("status", tmp_path / "job-1")
    assert done.returncode == 2
    assert "does not manage processes" in done.stderr
    done = ropebridge("host", tmp_path / "job-1" / "job", "sout-worker")
    assert done.returncode == 2
    assert "did you mean 'south-worker'" in done.stderr


def test_names_that_kubernetes_would_refuse_are_refused_before(tmp_path: Path) -> None:
    hosts = described(tmp_path)
    # Others take it.
    for target, status in (("kubernetes", 2), ("ssh", 0)):
        done = ropebridge(
            "deploy", SCENARIO, "--strategy=megatron", "--target", target, "--hosts", hosts, "-o", tmp_path / "1-job"
        )
        assert done.returncode == status
    refused = ropebridge(
        "deploy", SCENARIO, "--strategy=megatron", "--target", "kubernetes", "--hosts", hosts, "-o", tmp_path / "2-job"
    )
    assert "the names of folder and host may have 53 characters together" in refused.stderr


def test_what_a_pod_writes_outlives_it_where_a_claim_says_so(tmp_path: Path) -> None:
    assert deployed(tmp_path, "kubernetes").returncode == 0
    jobs = yaml.safe_load_all((tmp_path / "job-1" / "trainjobs.yaml").read_text())
    pods = [
        job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]["template"][
            "spec"
        ]["template"]["spec"]
        for job in jobs
    ]
    runs = [next(volume for volume in pod["volumes"] if volume["name"] == "run") for pod in pods]
    assert runs == [{"name": "run", "emptyDir": {}}, {"name": "run", "persistentVolumeClaim": {"claimName": "runs"}}]
    mounts = [
        [(each["mountPath"], each.get("subPath")) for each in pod["containers"][0]["volumeMounts"]] for pod in pods
    ]
    assert mounts[0] == [("/ropebridge", None), ("/ropebridge-run", None)]
    assert ("/ropebridge-run", "job-1/south-worker") in mounts[1]
    assert ("/ropebridge-shared", "job-1/shared") in mounts[1]
    assert pods[1]["nodeSelector"] == {"disk": "fast"}


def test_kubernetes_has_words_for_all_that_is_said(tmp_path: Path) -> None:
    """The published types of Kubeflow Trainer keep every key: none is unknown to them."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    assert deployed(tmp_path, "kubernetes").returncode == 0
    written = list(yaml.safe_load_all((tmp_path / "job-1" / "trainjobs.yaml").read_text()))
    assert len(written) == 2
    for each in written:
        assert lost(each, models.TrainerV1alpha1TrainJob.from_dict(each).to_dict()) == []


def lost(written: Any, read: Any, place: str = "") -> list[str]:
    """The places of what was written and is not read."""
    if isinstance(written, dict) and isinstance(read, dict):
        return [each for key in written for each in lost(written[key], read.get(key), f"{place}.{key}")]
    if isinstance(written, list) and isinstance(read, list) and len(written) == len(read):
        pairs = enumerate(zip(written, read, strict=True))
        return [each for number, pair in pairs for each in lost(*pair, f"{place}[{number}]")]
    return [] if written == read else [place]


PARSE = """
import os, sys
os.chdir(sys.argv[1])
import sky
for name in sys.argv[2:]:
    task = sky.Task.from_yaml(name)
    assert task.num_nodes == 1
    print(*((str(each), each.region) for each in task.resources))
"""


@pytest.mark.slow
def test_skypilot_reads_its_tasks(tmp_path: Path) -> None:
    """By its own package, which has too many dependencies for the tests' environment."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "sky"], check=True)
    installed = subprocess.run(
        [tmp_path / "sky" / "bin" / "pip", "install", "-q", "skypilot"], capture_output=True, text=True, check=False
    )
    if installed.returncode != 0:
        pytest.skip(f"skypilot cannot be installed: {installed.stderr.strip().splitlines()[-1]}")
    assert deployed(tmp_path, "skypilot").returncode == 0
    done = subprocess.run(
        [
            tmp_path / "sky" / "bin" / "python",
            "-c",
            PARSE,
            tmp_path / "job-1",
            *(f"sky-{name}.yaml" for name in HOSTS["hosts"]),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "HOME": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "A100" in done.stdout
    assert "us-east-1" in done.stdout


@pytest.mark.parametrize(("target", "message"), [("ssh", "'MY_TOKEN' is not set"), ("slurm", "no program 'sbatch'")])
def test_what_cannot_be_submitted_leaves_no_folder(
    target: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MY_TOKEN", raising=False)
    if target == "slurm":
        monkeypatch.setenv("MY_TOKEN", "hunter2-hunter2")
    else:
        for program in ("ssh", "scp"):
            (tmp_path / program).write_text("#!/bin/sh\n")
            (tmp_path / program).chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    done = deployed(tmp_path, target, "--submit")
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    assert not (tmp_path / "job-1").exists()
