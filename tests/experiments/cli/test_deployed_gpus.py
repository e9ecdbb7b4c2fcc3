"""What a deployment asks of its scheduler: the GPUs that the job's devices need, and no others."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from executor.core.job import ComputeMode
from executor.deploy.deployment import Deployment, read_deployment
from executor.deploy.gpus import gpus_of
from executor.deploy.hosts_file import HostEntry, HostsFile, hosts_of
from executor.deploy.skypilot import ACCELERATORS
from executor.deploy.target import find_target
from planner.scenario.cluster import Cluster, Device
from planner.scenario.datasheet import DATASHEET, is_gpu
from tests.helpers.processes.command import ropebridge
from traces.common.errors import InputError

CPUS = ("cpu", "cpu-epyc", "raspberry-pi-4")
SCHEDULERS = ("slurm", "kubernetes", "skypilot")


def entry(**changes: Any) -> HostEntry:
    given: dict[str, Any] = {"interface": "wg0", "kubernetes": {"image": "i"}, "skypilot": {"infra": "aws"}, **changes}
    return HostEntry(**given)


def deployed(
    kinds: dict[str, list[str]],
    target: str,
    compute: ComputeMode = "real",
    gpus: dict[str, str] | None = None,
    label: str | None = None,
    **own: Any,
) -> Deployment:
    """A job on hosts with devices of these kinds; each host's entry has what is its own."""
    cluster = Cluster(
        tuple(
            Device(f"{host}-{place}", kind, "here", 1, host=host)
            for host, each in kinds.items()
            for place, kind in enumerate(each)
        ),
        (),
    )
    devices = [device.name for device in cluster.devices]
    described = HostsFile({host: entry(**own) for host in kinds}, gpus=gpus or {}, gpu_label=label)
    hosts = hosts_of(described, cluster, devices, "hosts.yaml")
    asked = gpus_of(described, cluster, devices, compute, "hosts.yaml")
    return Deployment("job-1", target, hosts, described.hosts, {}, (), (), "", asked)


def sbatch_options(deployment: Deployment) -> dict[str, list[str]]:
    """The options of each host's component."""
    script = find_target("slurm").files(deployment)["job.sbatch"]
    parts = [re.findall(r"^#SBATCH (.*)$", part, re.MULTILINE) for part in script.split("#SBATCH hetjob")]
    return dict(zip((part.name for part in deployment.hosts.parts), parts, strict=True))


def trainjobs(deployment: Deployment) -> dict[str, Any]:
    text = find_target("kubernetes").files(deployment)["trainjobs.yaml"]
    return dict(zip((part.name for part in deployment.hosts.parts), yaml.safe_load_all(text), strict=True))


def pod_of(job: Any) -> Any:
    spec = job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]
    return spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def resources(deployment: Deployment) -> dict[str, Any]:
    files = find_target("skypilot").files(deployment)
    return {part.name: yaml.safe_load(files[f"sky-{part.name}.yaml"])["resources"] for part in deployment.hosts.parts}


def asked_of_slurm(deployment: Deployment) -> Counter[str]:
    """The numbers of GPUs by their type; the type of those without one is the empty string."""
    found: Counter[str] = Counter()
    for options in sbatch_options(deployment).values():
        (*others, last) = [option for option in options if option.startswith("--gres=")] or ["--gres="]
        assert not others
        for each in filter(None, last.removeprefix("--gres=").split(",")):
            name, *kind, count = each.split(":")
            assert name == "gpu"
            found["".join(kind)] += int(count)
    return found


def asked(deployment: Deployment) -> int:
    if deployment.target == "slurm":
        return asked_of_slurm(deployment).total()
    if deployment.target == "kubernetes":
        trainers = [job["spec"]["trainer"] for job in trainjobs(deployment).values()]
        return sum(
            int(each.get("resourcesPerNode", {}).get("limits", {}).get("nvidia.com/gpu", 0)) for each in trainers
        )
    wanted = [each["accelerators"] for each in resources(deployment).values() if "accelerators" in each]
    return sum(int(each.partition(":")[2]) for each in wanted)


def host_kinds(kinds: list[str], *, mixed: bool) -> st.SearchStrategy[list[str]]:
    """Devices of a host: of any kinds if mixed, or of one kind of GPU and of CPUs."""
    if mixed:
        return st.lists(st.sampled_from([*kinds, *CPUS]), min_size=1, max_size=8)
    return st.sampled_from(kinds).flatmap(lambda kind: st.lists(st.sampled_from([kind, *CPUS]), min_size=1, max_size=8))


@pytest.mark.parametrize("target", SCHEDULERS)
@given(data=st.data(), compute=st.sampled_from(["real", "paced"]))
def test_all_hosts_together_ask_for_the_gpus_of_the_job(target: str, data: st.DataObject, compute: ComputeMode) -> None:
    kinds = list(ACCELERATORS) if target == "skypilot" else [*DATASHEET, "my-own"]
    each = host_kinds(kinds, mixed=target != "skypilot")
    hosts = data.draw(st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), each, min_size=1))
    needed = Counter(kind for host in hosts.values() for kind in host if is_gpu(kind))
    deployment = deployed(hosts, target, compute)
    assert asked(deployment) == (needed.total() if compute == "real" else 0)
    if target == "slurm" and compute == "real":
        named = deployed(hosts, target, compute, {kind: f"type-{kind}" for kind in needed})
        assert asked_of_slurm(named) == {f"type-{kind}": count for kind, count in needed.items()}


@pytest.mark.parametrize("target", ["torchrun", "ssh"])
def test_without_a_scheduler_nothing_is_asked(target: str) -> None:
    needy, modest = (deployed({"a": [kind]}, target) for kind in ("t4", "cpu"))
    assert find_target(target).files(needy) == find_target(target).files(modest)


@pytest.mark.parametrize(
    "own",
    [
        *("--gres=gpu:1", "--gres gpu:v100:2", "--gres=shard:5", "--gres=none"),
        *("--gpus=3", "--gpus-per-node=a100:1", "-G 2", "-G2", "--tres-per-task=cpu:4,gres/gpu:1"),
    ],
)
def test_gpus_by_hand_are_not_doubled_in_slurm(own: str) -> None:
    deployment = deployed({"a": ["t4", "t4"]}, "slurm", slurm=("--partition=p", own))
    assert sbatch_options(deployment)["a"][-2:] == ["--partition=p", own]


@pytest.mark.parametrize("own", ["--cpus-per-gpu=4", "--mem-per-gpu=8G", "--gpu-bind=closest", "--tres-per-task=cpu:4"])
def test_options_about_gpus_do_not_ask_for_them(own: str) -> None:
    assert sbatch_options(deployed({"a": ["t4", "t4"]}, "slurm", slurm=(own,)))["a"][-2:] == [own, "--gres=gpu:2"]


def test_other_resources_of_slurm_stay() -> None:
    """Of two options --gres Slurm takes the last one only."""
    options = sbatch_options(deployed({"a": ["t4"]}, "slurm", slurm=("--gres=tmp:50G", "--time=60")))
    assert options["a"][-2:] == ["--gres=tmp:50G,gpu:1", "--time=60"]


def test_a_name_is_given_for_all_kinds_of_a_host_or_for_none() -> None:
    deployment = deployed({"a": ["t4", "l4", "l4"], "b": ["l4"]}, "slurm", gpus={"l4": "ada"})
    assert asked_of_slurm(deployment) == {"": 3, "ada": 1}


@pytest.mark.parametrize(
    "own",
    [{"limits": {"nvidia.com/gpu": 8}}, {"limits": {"nvidia.com/mig-1g.10gb": 1}}, {"requests": {"amd.com/gpu": "1"}}],
)
def test_gpus_by_hand_are_not_doubled_in_kubernetes(own: dict[str, Any]) -> None:
    job = trainjobs(deployed({"a": ["t4", "t4"]}, "kubernetes", kubernetes={"image": "i", "resourcesPerNode": own}))
    assert job["a"]["spec"]["trainer"]["resourcesPerNode"] == own


def test_other_resources_of_a_pod_stay() -> None:
    own = {"image": "i", "resourcesPerNode": {"limits": {"cpu": "4"}, "requests": {"memory": "8Gi"}}}
    job = trainjobs(deployed({"a": ["t4", "t4", "cpu"]}, "kubernetes", kubernetes=own))["a"]
    wanted = {"limits": {"cpu": "4", "nvidia.com/gpu": "2"}, "requests": {"memory": "8Gi"}}
    assert job["spec"]["trainer"]["resourcesPerNode"] == wanted


def test_nodes_are_chosen_by_the_label_of_their_gpus() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    label, names = "nvidia.com/gpu.product", {"t4": "Tesla-T4", "l4": "NVIDIA-L4"}
    kubernetes = {"image": "i", "pod": {"nodeSelector": {"disk": "fast"}}}
    hosts = {"a": ["t4", "t4"], "b": ["cpu"], "c": ["l4"]}
    jobs = trainjobs(deployed(hosts, "kubernetes", gpus=names, label=label, kubernetes=kubernetes))
    assert {host: pod_of(job)["nodeSelector"] for host, job in jobs.items()} == {
        "a": {label: "Tesla-T4", "disk": "fast"},
        "b": {"disk": "fast"},
        "c": {label: "NVIDIA-L4", "disk": "fast"},
    }
    for job in jobs.values():
        read = models.TrainerV1alpha1TrainJob.from_dict(job).to_dict()
        assert read["spec"]["trainer"].get("resourcesPerNode") == job["spec"]["trainer"].get("resourcesPerNode")
        assert pod_of(read)["nodeSelector"] == pod_of(job)["nodeSelector"]
    own = {"image": "i", "pod": {"nodeSelector": {label: "mine"}}}
    (job,) = trainjobs(deployed({"a": ["t4", "l4"]}, "kubernetes", label=label, kubernetes=own)).values()
    assert pod_of(job)["nodeSelector"] == {label: "mine"}


@pytest.mark.parametrize(
    "own",
    [
        {"accelerators": "V100:4"},
        {"accelerators": None},
        {"instance_type": "p3.8xlarge"},
        {"any_of": [{"infra": "aws", "accelerators": "T4:2"}]},
        {"ordered": [{"infra": "gcp", "accelerators": "L4:2"}]},
    ],
)
def test_accelerators_by_hand_are_not_doubled_in_skypilot(own: dict[str, Any]) -> None:
    assert resources(deployed({"a": ["t4", "t4"]}, "skypilot", skypilot=own))["a"] == own


def test_a_name_of_the_file_wins_over_that_of_the_catalogue() -> None:
    deployment = deployed(
        {"a": ["a6000"] * 2, "b": ["my-own"]}, "skypilot", gpus={"a6000": "RTXA6000", "my-own": "A40"}
    )
    assert [each["accelerators"] for each in resources(deployment).values()] == ["RTXA6000:2", "A40:1"]


def test_the_catalogue_has_kinds_of_the_datasheet_under_different_names() -> None:
    assert set(ACCELERATORS) <= {kind for kind in DATASHEET if is_gpu(kind)}
    assert len(set(ACCELERATORS.values())) == len(ACCELERATORS)


@pytest.mark.parametrize(
    ("target", "kinds", "given", "problem"),
    [
        ("skypilot", ["my-own"], {}, "SkyPilot's name for GPUs of the kind 'my-own' is unknown; give a name that 'sky"),
        ("skypilot", ["t4", "l4"], {}, "host 'a' has GPUs of the kinds T4, L4, and a task can ask for one only"),
        ("kubernetes", ["t4"], {"label": "gpu"}, "the value of the label 'gpu' is unknown for GPUs of the kind 't4'"),
        (
            "kubernetes",
            ["t4", "l4"],
            {"label": "gpu", "gpus": {"t4": "one", "l4": "two"}},
            "host 'a' has GPUs with the labels one, two, and a node has one only",
        ),
        ("slurm", ["t4"], {"gpus": {"a100": "a100"}}, "hosts.yaml: gpus: unknown device kind 'a100'; did you mean"),
    ],
)
def test_what_cannot_be_asked_is_refused(target: str, kinds: list[str], given: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError) as refused:
        find_target(target).files(deployed({"a": kinds}, target, **given))
    assert problem in str(refused.value)


SCENARIO = """
name: two-hosts
cluster:
  hosts:
    - {name: big, kind: a100-80, region: cloud, devices: 4, interconnect: nvlink-3}
    - {name: small, kind: l4, region: attic, devices: 2, interconnect: pcie-4}
  devices:
    - {name: board, kind: raspberry-pi-4, region: attic}
  links:
    - {between: [cloud, attic], bandwidth: 1 Gbit/s, latency: 20 ms}
    - {inside: attic, bandwidth: 1 Gbit/s, latency: 0.1 ms}
model:
  name: blocks
  code: model.py
  layers:
    - {name: block, repeat: 12, parameters: 7 MB, output: 0.4 MB, activation: 6 MB, forward: 1 GFLOP}
training: {global_batch: 84, microbatch: 1, optimizer: {name: sgd, learning_rate: 0.1}}
"""


@pytest.mark.parametrize("target", SCHEDULERS)
def test_the_command_asks_for_the_gpus_of_its_plan(target: str, tmp_path: Path) -> None:
    (tmp_path / "two-hosts.yaml").write_text(SCENARIO)
    (tmp_path / "model.py").write_text("def build(): ...\n")
    hosts = {
        name: {"interface": "wg0", "kubernetes": {"image": "i"}, "skypilot": {"infra": "aws"}}
        for name in ("big", "small", "board")
    }
    (tmp_path / "hosts.yaml").write_text(yaml.safe_dump({"hosts": hosts, "gpus": {"a100-80": "A100-80GB"}}))
    command = ["deploy", tmp_path / "two-hosts.yaml", "--target", target, "--hosts", tmp_path / "hosts.yaml"]
    for compute, gpus in (("real", 6), ("paced", 0)):
        done = ropebridge(*command, "--strategy", "ddp", "--compute", compute, "-o", tmp_path / compute)
        assert done.returncode == 0, done.stderr
        deployment = read_deployment(tmp_path / compute)
        assert asked(deployment) == gpus
        for file, text in find_target(target).files(deployment).items():
            assert (tmp_path / compute / file).read_text() == text
