"""Check that the memory which each worker of a plan needs fits into its devices."""

from collections.abc import Sequence

from planner.cost.memory import (
    largest_output_bytes,
    recomputed_bytes,
    saved_activation_bytes,
    split_workspace_bytes,
    state_bytes,
    workspace_bytes,
)
from planner.plan.actions import Kind
from planner.plan.plan import Pipeline, Plan
from planner.scenario.scenario import Scenario
from planner.schedules import HOLD_ALL, WHOLE
from planner.step.memory import peak_bytes
from traces.common.errors import InputError
from traces.common.units import size_text

# Schedules that hold a fixed number of microbatches whatever the memory: all of them, or in 1F1B the stage's depth.
_IGNORING_MEMORY = HOLD_ALL | {"1f1b"}


def check_memory(pipeline: Pipeline, plan: Plan, scenario: Scenario, where: str) -> None:
    """Refuse stages that do not fit into their devices, or whose layers have no profile for the device kind."""
    workers = pipeline.workers
    for worker in range(max(workers) + 1):
        held = [number for number, holder in enumerate(workers) if holder == worker]
        place = f"{where}.stages[{held[0]}]"
        most = [microbatches_held(pipeline, plan, each) for each in held]
        _check_worker(pipeline, held, most, scenario, place, splits=_splits(pipeline, plan))


def check_peaks(plan: Plan, scenario: Scenario) -> None:
    """Refuse a plan whose order of actions needs more memory at a time than a device has.

    The plan must have passed all other checks, because its step is compiled here.
    """
    if plan.schedule in _IGNORING_MEMORY and plan.order == "scheduled":
        return
    for leader, peak in peak_bytes(plan, scenario).items():
        group = next(replica.devices for replica in plan.replicas if replica.device == leader)
        device = min((scenario.cluster.by_name[name] for name in group), key=lambda each: each.memory_bytes)
        if peak > device.memory_bytes:
            raise InputError(
                f"schedule '{plan.schedule}' holds {size_text(peak)} at once on device '{device.name}', which has "
                f"{size_text(device.memory_bytes)}",
                where="schedule",
                valid="take smaller microbatches, less depth, fewer layers or schedule compact-zb, which limits memory",
            )


def microbatches_held(pipeline: Pipeline, plan: Plan, stage: int) -> int:
    """Return a lower bound on the most microbatches that a stage holds between forward and backward (B or I).

    The bound is exact for explicit orders and for schedules that ignore memory, and 1 for all others.
    """
    count = len(pipeline.microbatches)
    if not pipeline.orders:
        if plan.schedule not in _IGNORING_MEMORY or plan.order != "scheduled":
            return 1
        return count if plan.schedule in HOLD_ALL else min(pipeline.stages[stage].in_flight, count)
    held = most = 0
    for action in pipeline.orders[pipeline.workers[stage]]:
        if action.stage == stage and action.kind is not Kind.BACKWARD_WEIGHT:
            held += 1 if action.kind is Kind.FORWARD else -1
            most = max(most, held)
    return most


def _splits(pipeline: Pipeline, plan: Plan) -> bool:
    """Return whether some backward of a pipeline may be split."""
    if not pipeline.orders:
        return plan.schedule not in WHOLE
    return any(action.kind is Kind.BACKWARD_INPUT for row in pipeline.orders for action in row)


def _check_worker(
    pipeline: Pipeline, stages: Sequence[int], held: Sequence[int], scenario: Scenario, where: str, *, splits: bool
) -> None:
    holds = [pipeline.stages[number] for number in stages]
    for index, replica in enumerate(holds[0].replicas):
        degree = replica.tensor_parallel
        kind = scenario.cluster.by_name[replica.device].kind
        device = min((scenario.cluster.by_name[name] for name in replica.devices), key=lambda each: each.memory_bytes)
        activations = states = workspace = 0
        for stage, in_flight in zip(holds, held, strict=True):
            first, end, samples = stage.first_layer, stage.end_layer, stage.most_samples(pipeline.microbatches)[index]
            try:
                scenario.model.at_degree(degree).times(first, end, kind, max(1, samples))
            except InputError as error:
                raise error.within(where) from None
            output = samples * largest_output_bytes(scenario, stage)
            if output > device.memory_bytes:
                raise InputError(
                    f"an output of layers {first} to {end - 1} needs {size_text(output)} on device "
                    f"'{device.name}', which has {size_text(device.memory_bytes)}",
                    where=where,
                    valid="smaller microbatches, or smaller outputs in the model",
                )
            activations += in_flight * samples * saved_activation_bytes(scenario, stage, degree)
            states += state_bytes(scenario, first, end, degree)
            recomputed = samples * recomputed_bytes(scenario, stage, degree)
            beside = workspace_bytes(scenario, stage, samples, degree)
            if splits:
                # A lower bound, whichever backwards are split; `check_peaks` knows their order.
                beside = min(beside, split_workspace_bytes(scenario, stage, samples, degree)[0])
            workspace = max(workspace, recomputed + beside)
        taken = scenario.effects.memory.framework_bytes + workspace
        needed = states + activations + taken
        if needed > device.memory_bytes:
            layers = " and ".join(f"{stage.first_layer} to {stage.end_layer - 1}" for stage in holds)
            raise InputError(
                f"layers {layers} need {size_text(needed)} on device '{device.name}' ({size_text(states)} of states, "
                f"{size_text(activations)} of activations of {' and '.join(map(str, held))} microbatches in flight"
                f"{f', {size_text(taken)} of framework and workspace' if taken else ''}), which has "
                f"{size_text(device.memory_bytes)}",
                where=where,
                valid=f"free {needed - device.memory_bytes} bytes: fewer layers, smaller microbatches or less depth",
            )
