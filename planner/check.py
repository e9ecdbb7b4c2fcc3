"""A plan held against its scenario, with messages a person can act on."""

from itertools import pairwise

from planner.memory import stage_bytes, state_bytes
from planner.plan import Pipeline, Plan, Stage
from planner.program import gradient_syncs
from planner.scenario import Scenario
from planner.schedules import HOLD_ALL, SCHEDULES
from traces.errors import InputError
from traces.naming import find_by_name

# Shares are relative; beyond this their sum loses the small ones.
LARGEST_SHARE = 1e9


def check_plan(plan: Plan, scenario: Scenario) -> None:
    """Refuse a plan that the scenario cannot carry out.

    Raises:
        InputError: It was made for another model, names devices that do not exist or two times,
            leaves layers out, changes the global batch, cannot be scheduled, does not fit into memory, or
            needs a link that is not there.
    """
    if plan.model != scenario.model.name:
        raise InputError(
            f"the plan is for model '{plan.model}'",
            where="model",
            valid=f"scenario '{scenario.name}' trains '{scenario.model.name}': make a plan with 'ropebridge plan'",
        )
    find_by_name(plan.schedule, SCHEDULES, "schedule", where="schedule")
    if not plan.pipelines:
        raise InputError("the plan has no pipelines", where="pipelines", valid="give at least one")
    _check_devices(plan, scenario)
    for index, pipeline in enumerate(plan.pipelines):
        where = f"pipelines[{index}]"
        _check_layers(pipeline, scenario, where)
        _check_microbatches(pipeline, plan.schedule, where)
        _check_paths(pipeline, scenario)
        for number, stage in enumerate(pipeline.stages):
            _check_memory(pipeline, stage, plan.schedule, scenario, f"{where}.stages[{number}]")
    for sync in gradient_syncs(plan, scenario):
        for position, device in enumerate(sync.devices):
            scenario.cluster.path(sync.devices[position - 1], device)
    if plan.global_batch != scenario.training.global_batch:
        raise InputError(
            f"the microbatches add up to {plan.global_batch} samples",
            where="pipelines",
            valid=f"scenario '{scenario.name}' trains with a global batch of {scenario.training.global_batch}",
        )


def _check_devices(plan: Plan, scenario: Scenario) -> None:
    seen: dict[str, str] = {}
    for p, pipeline in enumerate(plan.pipelines):
        if not pipeline.stages:
            raise InputError("the pipeline has no stages", where=f"pipelines[{p}]", valid="give at least one")
        for s, stage in enumerate(pipeline.stages):
            if not stage.replicas:
                raise InputError(
                    "the stage has no replicas",
                    where=f"pipelines[{p}].stages[{s}]",
                    valid="give at least one",
                )
            for r, replica in enumerate(stage.replicas):
                where = f"pipelines[{p}].stages[{s}].replicas[{r}]"
                find_by_name(replica.device, scenario.cluster.by_name, "device", where=f"{where}.device")
                if replica.device in seen:
                    raise InputError(
                        f"device '{replica.device}' is used twice",
                        where=f"{where}.device",
                        valid=f"it already works in {seen[replica.device]}; a device holds one stage",
                    )
                if not 0 < replica.share <= LARGEST_SHARE:
                    raise InputError(
                        f"share {replica.share:g}",
                        where=f"{where}.share",
                        valid="a share is a number above zero, 1e9 at most",
                    )
                seen[replica.device] = where


def _check_layers(pipeline: Pipeline, scenario: Scenario, where: str) -> None:
    expected = 0
    for number, stage in enumerate(pipeline.stages):
        if stage.first_layer != expected or stage.end_layer <= stage.first_layer:
            raise InputError(
                f"the stage holds layers {stage.first_layer} to {stage.end_layer} (exclusive)",
                where=f"{where}.stages[{number}]",
                valid=f"stages cover every layer once and in order: this one starts at layer {expected}",
            )
        expected = stage.end_layer
    count = len(scenario.model.layers)
    if expected != count:
        raise InputError(
            f"the stages end at layer {expected}",
            where=f"{where}.stages",
            valid=f"model '{scenario.model.name}' has {count} layers: the last stage ends at {count}",
        )


def _check_microbatches(pipeline: Pipeline, schedule: str, where: str) -> None:
    if not pipeline.microbatches or min(pipeline.microbatches) < 1:
        raise InputError(
            f"microbatches {list(pipeline.microbatches)}",
            where=f"{where}.microbatches",
            valid="give at least one, each with at least one sample",
        )
    depths = [stage.in_flight for stage in pipeline.stages]
    if min(depths) < 1:
        raise InputError(f"in-flight depths {depths}", where=f"{where}.stages", valid="every depth is at least 1")
    reached = [min(depth, len(pipeline.microbatches)) for depth in depths]
    if schedule not in HOLD_ALL and any(later > earlier for earlier, later in pairwise(reached)):
        raise InputError(
            f"in-flight depths {depths} would deadlock",
            where=f"{where}.stages",
            valid="a stage waits for as many forwards as its depth before its first backward, so depths may not "
            "grow from stage to stage",
        )


def _check_paths(pipeline: Pipeline, scenario: Scenario) -> None:
    for senders, receivers in zip(pipeline.stages, pipeline.stages[1:], strict=False):
        for sender in senders.replicas:
            for receiver in receivers.replicas:
                scenario.cluster.path(sender.device, receiver.device)
                scenario.cluster.path(receiver.device, sender.device)


def _check_memory(pipeline: Pipeline, stage: Stage, schedule: str, scenario: Scenario, where: str) -> None:
    count = len(pipeline.microbatches)
    in_flight = count if schedule in HOLD_ALL else min(stage.in_flight, count)
    for replica, samples in zip(stage.replicas, stage.most_samples(pipeline.microbatches), strict=True):
        device = scenario.cluster.by_name[replica.device]
        try:
            scenario.model.times(stage.first_layer, stage.end_layer, device.kind, max(1, samples))
        except InputError as error:
            raise error.within(where) from None
        needed = stage_bytes(scenario, stage.first_layer, stage.end_layer, samples, in_flight)
        if needed > device.memory_bytes:
            states = state_bytes(scenario, stage.first_layer, stage.end_layer)
            raise InputError(
                f"layers {stage.first_layer} to {stage.end_layer - 1} need {_size(needed)} on device "
                f"'{device.name}' ({_size(states)} of states, {_size(needed - states)} of activations of "
                f"{in_flight} microbatches in flight), which has {_size(device.memory_bytes)}",
                where=where,
                valid=f"free {needed - device.memory_bytes} bytes: fewer layers, smaller microbatches or less depth",
            )


def _size(size_bytes: int) -> str:
    if size_bytes < 2**20:
        return f"{size_bytes} B"
    return f"{size_bytes / 2**30:.2f} GiB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:.2f} MiB"
