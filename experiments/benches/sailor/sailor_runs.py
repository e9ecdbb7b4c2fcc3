"""Measured training runs as eth-easl/sailor publishes them: one JSON file each.

    {"pipeline_list": [{"layers_per_stage": [[0, 1], [2, 3]],
                        "tmp_per_stage": [[replica, ...], ...],
                        "dp": [replicas of each stage]}],
     "mbs": samples of a microbatch of one replica, "gbs": samples of a step over all,
     "real": measured seconds of a step, "max_mem": measured bytes of the fullest GPU}
    replica: [[[GPU kind, GPUs, zone]], degree of tensor parallelism]

They were trained in 32 bits with Adam, in 1F1B order with as many microbatches in flight as stages are left.
"""

from dataclasses import dataclass
from math import ceil
from pathlib import Path

import pydantic.dataclasses
from pydantic import PositiveFloat, PositiveInt, TypeAdapter

from experiments.benches.sailor.network import Node, SailorNetwork
from experiments.benches.sailor.sailor_cluster import cluster_of, gpus_of
from planner.files.importers.json_file import pick, read_file
from planner.files.importers.sailor_files import KINDS
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.scenario.profile import ModelProfile
from planner.scenario.scenario import Optimizer, Scenario, Training
from traces.common.errors import InputError

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
    """A plan, what it ran on, and what was measured.

    Attributes:
        name: The file's, without its ending.
        scenario: Cluster, model and training.
        plan: What ran.
        step_s: Seconds of a training step.
        peak_bytes: Of the fullest GPU, all that its driver counts as used.
    """

    name: str
    scenario: Scenario
    plan: Plan
    step_s: float
    peak_bytes: int


def read_sailor_runs(folder: Path, model: ModelProfile, network: SailorNetwork) -> list[MeasuredRun]:
    """Return the runs of a folder and the folders in it, in the order of their paths.

    Raises:
        InputError: There is none, or one is malformed.
    """
    paths = sorted(folder.rglob("*.json"))
    if not paths:
        raise InputError("no measured runs", where=str(folder), valid="give a folder with one JSON file for each run")
    return [read_sailor_run(path, model, network) for path in paths]


def read_sailor_run(path: Path, model: ModelProfile, network: SailorNetwork) -> MeasuredRun:
    """Return one run; each replica gets a host of its own.

    Args:
        path: The file.
        model: Profile of the model that was trained, with the degrees of tensor parallelism of the run.
        network: Rates between nodes.

    Raises:
        InputError: The file is missing or malformed, or names what the network does not have.
    """
    entry = read_file(path, TypeAdapter(_RunEntry), __name__)
    where = str(path)
    for index, pipeline in enumerate(entry.pipeline_list):
        _check_stages(pipeline, f"{where}: pipeline_list[{index}]")
    nodes: dict[str, Node] = {}
    count = ceil(entry.gbs / (entry.mbs * sum(pipeline.dp[0] for pipeline in entry.pipeline_list)))
    pipelines = tuple(
        Pipeline(_stages(pipeline, index, count, nodes, where), (entry.mbs * pipeline.dp[0],) * count)
        for index, pipeline in enumerate(entry.pipeline_list)
    )
    plan = Plan(path.stem, model.name, "measured", "1f1b", pipelines)
    training = Training(plan.global_batch, entry.mbs, Optimizer("adamw"))
    scenario = Scenario(path.stem, cluster_of(nodes, network), model, training)
    return MeasuredRun(path.stem, scenario, plan, entry.real, entry.max_mem)


def _check_stages(pipeline: _PipelineEntry, where: str) -> None:
    replicas = [len(groups) for groups in pipeline.tmp_per_stage]
    if not pipeline.dp or replicas != pipeline.dp or len(pipeline.layers_per_stage) != len(replicas):
        raise InputError(
            f"{len(pipeline.layers_per_stage)} stages, with {replicas} replicas where 'dp' says {pipeline.dp}",
            where=where,
            valid="give layers, replicas and their number for each stage, one at least",
        )


def _stages(
    pipeline: _PipelineEntry, index: int, microbatches: int, nodes: dict[str, Node], where: str
) -> tuple[Stage, ...]:
    """Stages of a pipeline, whose hosts are added to ``nodes``."""
    stages = []
    for number, (layers, groups) in enumerate(zip(pipeline.layers_per_stage, pipeline.tmp_per_stage, strict=True)):
        replicas = []
        for replica, group in enumerate(groups):
            host = f"pipeline-{index}-stage-{number}-replica-{replica}"
            nodes[host] = _node(group, where)
            gpus = gpus_of(host, nodes[host])
            replicas.append(Replica(gpus[0], partners=gpus[1:]))
        depth = min(len(pipeline.layers_per_stage) - number, microbatches)
        stages.append(Stage(min(layers, default=0), max(layers, default=-1) + 1, tuple(replicas), depth))
    return tuple(stages)


def _node(group: _Group, where: str) -> Node:
    machines, degree = group
    if len(machines) != 1 or machines[0][1] < degree:
        raise InputError(
            f"{degree} GPUs share each layer, on {machines}",
            where=where,
            valid="the GPUs of a tensor-parallel group are in one machine",
        )
    ((kind, _, zone),) = machines
    pick(KINDS, kind, "GPU kind", where=where)
    return Node(zone, kind, degree)
