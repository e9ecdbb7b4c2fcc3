"""Checks of the stages of a plan: devices, layers, microbatches and placement on workers."""

from collections.abc import Callable, Mapping
from itertools import pairwise

from planner.check.types import LARGEST_INTEGER
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.scenario.cluster import Cluster
from planner.scenario.profile import ModelProfile
from traces.common.errors import InputError, find_by_name

# Limit on a share, above which sums in float64 would lose small shares.
LARGEST_SHARE = 1e9


def check_devices(plan: Plan, cluster: Cluster) -> None:
    """Refuse unknown devices, devices used twice, and tensor-parallel groups of several hosts or device kinds.

    A device may hold several stages of a pipeline only if these stages have the same replicas, which make one worker.
    """
    seen: dict[str, str] = {}
    for p, pipeline in enumerate(plan.pipelines):
        if not pipeline.stages:
            raise InputError("the pipeline has no stages", where=f"pipelines[{p}]", valid="give at least one")
        workers: dict[tuple[tuple[str, ...], ...], tuple[str, Stage]] = {}
        for s, stage in enumerate(pipeline.stages):
            where = f"pipelines[{p}].stages[{s}]"
            if not stage.replicas:
                raise InputError("the stage has no replicas", where=where, valid="give at least one")
            for r, replica in enumerate(stage.replicas):
                _check_replica(replica, cluster, f"{where}.replicas[{r}]")
            groups = tuple(replica.devices for replica in stage.replicas)
            if groups in workers:
                _check_same_shares(stage, *workers[groups], where)
                continue
            workers[groups] = (where, stage)
            for r, replica in enumerate(stage.replicas):
                _claim(replica, f"{where}.replicas[{r}]", seen)


def _claim(replica: Replica, where: str, seen: dict[str, str]) -> None:
    """Add the devices of a replica to ``seen``, and refuse a device that is already in ``seen``."""
    for position, device in enumerate(replica.devices):
        if device in seen:
            raise InputError(
                f"device '{device}' is used twice",
                where=f"{where}.device" if position == 0 else f"{where}.partners[{position - 1}]",
                valid=f"it already works in {seen[device]}; stages of one pipeline share all of their devices, in the "
                "same order, or none",
            )
        seen[device] = where


def _check_same_shares(stage: Stage, other_where: str, other: Stage, where: str) -> None:
    shares, others = ([replica.share for replica in each.replicas] for each in (stage, other))
    if shares != others:
        raise InputError(
            f"the stage's shares are {', '.join(f'{share:g}' for share in shares)}",
            where=f"{where}.replicas",
            valid=f"it is on the same devices as {other_where}, so it takes the same samples: "
            f"{', '.join(f'{share:g}' for share in others)}",
        )


def _check_replica(replica: Replica, cluster: Cluster, where: str) -> None:
    leader = find_by_name(replica.device, cluster.by_name, "device", where=f"{where}.device")
    if not 0 < replica.share <= LARGEST_SHARE:
        raise InputError(
            f"share {replica.share:g} is not allowed",
            where=f"{where}.share",
            valid="a share is a number above zero, 1e9 at most",
        )
    for number, name in enumerate(replica.partners):
        place = f"{where}.partners[{number}]"
        partner = find_by_name(name, cluster.by_name, "device", where=place)
        if not cluster.same_host(name, leader.name):
            raise InputError(
                f"device '{name}' is in host '{partner.machine}', device '{leader.name}' in '{leader.machine}'",
                where=place,
                valid="the devices of a tensor-parallel group are in one host",
            )
        if partner.kind != leader.kind:
            raise InputError(
                f"device '{name}' is a {partner.kind}, device '{leader.name}' a {leader.kind}",
                where=place,
                valid="the devices of a tensor-parallel group are of one kind",
            )


# The schedule in which a stage runs as many forwards as its depth before its first backward.
_WAITS_FOR_ITS_DEPTH = "1f1b"


def check_layers(pipeline: Pipeline, model: ModelProfile, where: str) -> None:
    """Refuse a pipeline that leaves layers of the model out or has them twice."""
    expected = 0
    for number, stage in enumerate(pipeline.stages):
        if stage.first_layer != expected or stage.end_layer <= stage.first_layer:
            raise InputError(
                f"the stage holds layers {stage.first_layer} to {stage.end_layer} (exclusive)",
                where=f"{where}.stages[{number}]",
                valid=f"stages cover every layer once and in order: this one starts at layer {expected}",
            )
        expected = stage.end_layer
    count = len(model.layers)
    if expected != count:
        raise InputError(
            f"the stages end at layer {expected}",
            where=f"{where}.stages",
            valid=f"model '{model.name}' has {count} layers: the last stage ends at {count}",
        )


def check_microbatches(pipeline: Pipeline, plan: Plan, where: str) -> None:
    """Refuse microbatches without samples, and depths at which 1F1B deadlocks."""
    if not pipeline.microbatches or min(pipeline.microbatches) < 1:
        raise InputError(
            f"microbatches {list(pipeline.microbatches)} are not allowed",
            where=f"{where}.microbatches",
            valid="give at least one, each with at least one sample",
        )
    depths = [stage.in_flight for stage in pipeline.stages]
    if min(depths) < 1 or max(depths) > LARGEST_INTEGER:
        valid = "every depth is at least 1, and at most 2**53"
        raise InputError(f"in-flight depths {depths} are not allowed", where=f"{where}.stages", valid=valid)
    reached = [min(depth, len(pipeline.microbatches)) for depth in depths]
    waits = plan.schedule == _WAITS_FOR_ITS_DEPTH and plan.order == "scheduled"
    if waits and any(later > earlier for earlier, later in pairwise(reached)):
        raise InputError(
            f"in-flight depths {depths} would deadlock",
            where=f"{where}.stages",
            valid="a stage waits for as many forwards as its depth before its first backward, so depths may not "
            "grow from stage to stage",
        )


# A function from the numbers of stages and of workers to the worker of each stage, and its rule in words for messages.
_Placement = tuple[Callable[[int, int], list[int]], str]

_ONE_EACH: _Placement = (lambda stages, workers: list(range(stages)), "every stage is on devices of its own")
_PLACEMENTS: Mapping[str, _Placement] = {
    "gpipe": _ONE_EACH,
    "1f1b": _ONE_EACH,
    "zb-h1": _ONE_EACH,
    "zb-h2": _ONE_EACH,
    "interleaved-1f1b": (
        lambda stages, workers: [stage % workers for stage in range(-(-stages // workers) * workers)],
        "stages go round the workers, all of them equally often",
    ),
    "zb-v": (
        lambda stages, workers: [*range(workers), *reversed(range(workers))],
        "stages go down the workers and back up, two on each",
    ),
}


def check_placement(pipeline: Pipeline, plan: Plan, where: str) -> None:
    """Refuse stages that are not placed on workers as the plan's schedule needs them."""
    if plan.order != "scheduled" or plan.schedule not in _PLACEMENTS:
        return
    expect, rule = _PLACEMENTS[plan.schedule]
    workers = list(pipeline.workers)
    expected = expect(len(workers), max(workers) + 1)
    if workers != expected:
        devices = ", ".join(stage.replicas[0].device for stage in pipeline.stages)
        raise InputError(
            f"schedule '{plan.schedule}' cannot have its stages on workers {', '.join(map(str, workers))} "
            f"(devices {devices})",
            where=f"{where}.stages",
            valid=f"{rule}: {', '.join(map(str, expected))}; stages with the same devices are on one worker",
        )
