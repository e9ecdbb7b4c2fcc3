"""Reads measured runs, with clusters that have a host for each replica and a link for each pair of hosts."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import permutations
from math import ceil, inf
from pathlib import Path

import pydantic.dataclasses
from pydantic import PositiveFloat, PositiveInt, TypeAdapter

from experiments.benches.sailor.measured_files import Node, SailorNetwork
from planner.files.importers import pick, read_file
from planner.files.importers.sailor import KINDS
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.scenario.cluster import Cluster, Device, Link
from planner.scenario.profile import ModelProfile
from planner.scenario.scenario import Scenario
from planner.scenario.training import Optimizer, Training
from traces.common.errors import InputError

# Memory of a device, large enough for any run: measured runs fitted, even if ropebridge's memory model disagrees.
UNLIMITED_BYTES = 2**60


def gpus_of(host: str, node: Node) -> tuple[str, ...]:
    """Return the names of the GPUs of a host."""
    return tuple(f"{host}-gpu-{number}" for number in range(node.gpus))


def cluster_of(hosts: Mapping[str, Node], network: SailorNetwork) -> Cluster:
    """Return the cluster of hosts, given by name, each with one tensor-parallel group.

    A message has the rate measured for one GPU at each end, and the shards that all GPUs of a group send at once have
    at most the rate measured for whole nodes. Links inside a host are free, since the layers' times include them.

    Raises:
        InputError: There is no measured rate between two of the nodes.
    """
    devices = tuple(
        Device(gpu, KINDS[node.kind], node.zone, UNLIMITED_BYTES, host=name)
        for name, node in hosts.items()
        for gpu in gpus_of(name, node)
    )
    inside = [Link(name, name, inf, latency_s=0.0) for name in hosts]
    between = [_link(*pair, hosts, network) for pair in permutations(hosts, 2)]
    return Cluster(devices, (*inside, *between))


def _link(source: str, target: str, hosts: Mapping[str, Node], network: SailorNetwork) -> Link:
    sender, receiver = hosts[source], hosts[target]
    curve = network.curve(Node(sender.zone, sender.kind, 1), Node(receiver.zone, receiver.kind, 1))
    # The latency is 0, since the rate curve includes it as the time of small messages.
    return Link(source, target, network.curve(sender, receiver).ceiling_bps, latency_s=0.0, size_curve=curve)


_Group = tuple[list[tuple[str, int, str]], PositiveInt]


@pydantic.dataclasses.dataclass(frozen=True)
class _PipelineEntry:
    layers_per_stage: list[list[int]]
    tmp_per_stage: list[list[_Group]]
    dp: list[PositiveInt]


@pydantic.dataclasses.dataclass(frozen=True)
class _RunEntry:
    pipeline_list: list[_PipelineEntry]
    mbs: PositiveInt
    gbs: PositiveInt
    real: PositiveFloat
    max_mem: PositiveInt


@dataclass(frozen=True, eq=False)
class MeasuredRun:
    """A measured run, named after its file, with its step time and the memory that the fullest GPU's driver showed."""

    name: str
    scenario: Scenario
    plan: Plan
    step_s: float
    peak_bytes: int


def read_sailor_runs(folder: Path, model: ModelProfile, network: SailorNetwork) -> list[MeasuredRun]:
    """Return the runs in a folder and its subfolders, in the order of their paths.

    Raises:
        InputError: There is no run, or one is malformed.
    """
    paths = sorted(folder.rglob("*.json"))
    if not paths:
        raise InputError(
            "there are no measured runs", where=str(folder), valid="give a folder with one JSON file for each run"
        )
    return [read_sailor_run(path, model, network) for path in paths]


def read_sailor_run(path: Path, model: ModelProfile, network: SailorNetwork) -> MeasuredRun:
    """Return the run in a file; ``model`` must have times for the run's degrees of tensor parallelism.

    Raises:
        InputError: The file is missing or malformed, or has a node that the network lacks.
    """
    entry = read_file(path, TypeAdapter(_RunEntry), __name__)
    where = str(path)
    for index, pipeline in enumerate(entry.pipeline_list):
        _check_stages(pipeline, f"{where}: pipeline_list[{index}]")
    hosts: dict[str, Node] = {}
    count = ceil(entry.gbs / (entry.mbs * sum(pipeline.dp[0] for pipeline in entry.pipeline_list)))
    pipelines = tuple(
        Pipeline(_stages(pipeline, index, count, hosts, where), (entry.mbs * pipeline.dp[0],) * count)
        for index, pipeline in enumerate(entry.pipeline_list)
    )
    plan = Plan(path.stem, model.name, "measured", "1f1b", pipelines)
    training = Training(plan.global_batch, entry.mbs, Optimizer("adamw"))
    scenario = Scenario(path.stem, cluster_of(hosts, network), model, training)
    return MeasuredRun(path.stem, scenario, plan, entry.real, entry.max_mem)


def _check_stages(pipeline: _PipelineEntry, where: str) -> None:
    replicas = [len(groups) for groups in pipeline.tmp_per_stage]
    if not pipeline.dp or replicas != pipeline.dp or len(pipeline.layers_per_stage) != len(replicas):
        raise InputError(
            f"{len(pipeline.layers_per_stage)} stages have {replicas} replicas, but 'dp' is {pipeline.dp}",
            where=where,
            valid="give at least one stage, with 'layers_per_stage', 'tmp_per_stage' and 'dp' for each",
        )


def _stages(
    pipeline: _PipelineEntry, index: int, microbatches: int, hosts: dict[str, Node], where: str
) -> tuple[Stage, ...]:
    """Return the stages of a pipeline, and add their hosts to ``hosts``."""
    stages = []
    for number, (layers, groups) in enumerate(zip(pipeline.layers_per_stage, pipeline.tmp_per_stage, strict=True)):
        replicas = []
        for replica, group in enumerate(groups):
            host = f"pipeline-{index}-stage-{number}-replica-{replica}"
            hosts[host] = _node(group, where)
            gpus = gpus_of(host, hosts[host])
            replicas.append(Replica(gpus[0], partners=gpus[1:]))
        depth = min(len(pipeline.layers_per_stage) - number, microbatches)
        stages.append(Stage(min(layers, default=0), max(layers, default=-1) + 1, tuple(replicas), depth))
    return tuple(stages)


def _node(group: _Group, where: str) -> Node:
    machines, degree = group
    if len(machines) != 1 or machines[0][1] < degree:
        raise InputError(
            f"a tensor-parallel group of {degree} GPUs is on {machines}",
            where=where,
            valid=f"give one machine with {degree} GPUs or more",
        )
    ((kind, _, zone),) = machines
    pick(KINDS, kind, "GPU kind", where=where)
    return Node(zone, kind, degree)
