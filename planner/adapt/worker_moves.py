"""Transfers of layer state between workers that train separately and meet in outer steps.

A worker is a pipeline of a plan with an outer step. The first replica of each stage holds the outer state of the
stage's layers. Layers of different workers differ, so that a device gets the state of the first replica of its own
stage. Where that one is lost, or the worker is new, all replicas of the stage get the state of another worker. Such a
worker begins anew: the parameters of all its stages become the common ones, which all workers hold.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping
from functools import partial

from planner.adapt.migration import LayerTransfer, Migration, joined, nearest, state_bytes
from planner.plan.plan import Pipeline, Plan
from planner.scenario.scenario import Scenario
from planner.scenario.training import FLOAT32_BYTES

# Values of a layer's outer state that are sent: the common parameters, the outer momentum and the mean of an outer step
# that is still to be taken; and whether there is such a mean.
OUTER_TENSORS, OUTER_MARKS = 3, 1


def outer_state_bytes(scenario: Scenario, first_layer: int, end_layer: int) -> int:
    """Return the bytes of the outer state of layers that a new worker receives."""
    parameters = scenario.model.parameter_bytes(first_layer, end_layer)
    return OUTER_TENSORS * parameters + OUTER_MARKS * FLOAT32_BYTES * (end_layer - first_layer)


def worker_moves(held: Mapping[str, Collection[int]], before: Plan, plan: Plan, scenario: Scenario) -> Migration:
    """Return the transfers of all layer state that the workers of a plan need and do not hold.

    Args:
        held: The layers whose state a device holds, by device, without devices that are lost.
        before: The plan with which they have trained these layers.
        plan: The plan whose workers need the layers.
        scenario: The scenario of both plans.

    Raises:
        InputError: No first replica of a stage holds a layer any more.
    """
    leader_of = _leaders(before)
    held = defaultdict(frozenset, {device: frozenset(layers) for device, layers in held.items()})
    # A worker that leaves does not keep its outer state.
    stays = _leaders(plan)
    leading = defaultdict[int, list[str]](list)
    for (device, layer), leader in leader_of.items():
        if device == leader == stays.get((device, layer)) and layer in held[device]:
            leading[layer].append(device)
    # Only the first replica of a stage gets the outer state.
    wanted: list[tuple[str, str, bool, int]] = []
    for stage in plan.stages:
        leader, *others = (replica.device for replica in stage.replicas)
        for layer in stage.layers:
            if leader in leading[layer]:
                lacking = [each for each in others if leader_of.get((each, layer)) != leader or layer not in held[each]]
                wanted += [(leader, each, False, layer) for each in lacking]
            else:
                # One source for all replicas, whose optimizers' states must be equal.
                source = nearest(leading[layer], leader, layer, scenario)
                targets = ((leader, True), *((each, False) for each in others))
                wanted += [(source, each, leads, layer) for each, leads in targets]
    wanted.sort(key=lambda each: (each[1], each[3]))
    return Migration(joined(wanted, partial(_transfer, scenario)))


def workers_anew(plan: Plan, moves: Collection[LayerTransfer]) -> list[int]:
    """Return the workers of a plan that get layers of other workers, and begin with the common parameters."""
    found = []
    for index, pipeline in enumerate(plan.pipelines):
        own = devices_of(pipeline)
        if any(move.target in own and move.source not in own for move in moves):
            found.append(index)
    return found


def keeps_workers(old: Plan, new: Plan) -> bool:
    """Return whether each worker of a new plan has the first replicas of an old one, or only devices without a part.

    At least one worker must stay, since new ones get the common parameters from it.
    """
    before = [_first_replicas(each) for each in old.pipelines]
    kept = [_first_replicas(each) in before for each in new.pipelines]
    added = {
        device for each, stays in zip(new.pipelines, kept, strict=True) if not stays for device in devices_of(each)
    }
    return any(kept) and added.isdisjoint(old.devices)


def same_workers(old: Plan, new: Plan) -> bool:
    """Return whether two plans have the same workers in the same order."""
    return [*map(_first_replicas, old.pipelines)] == [*map(_first_replicas, new.pipelines)]


def devices_of(pipeline: Pipeline) -> frozenset[str]:
    """Return the names of the devices of a pipeline."""
    return frozenset(device for stage in pipeline.stages for replica in stage.replicas for device in replica.devices)


def _first_replicas(pipeline: Pipeline) -> list[tuple[int, int, str]]:
    return [(stage.first_layer, stage.end_layer, stage.replicas[0].device) for stage in pipeline.stages]


def _leaders(plan: Plan) -> dict[tuple[str, int], str]:
    """Return the first replica of the stage in which a device trains a layer, by device and layer."""
    return {
        (replica.device, layer): stage.replicas[0].device
        for stage in plan.stages
        for replica in stage.replicas
        for layer in stage.layers
    }


def _transfer(scenario: Scenario, source: str, target: str, first: int, end: int, leads: int) -> LayerTransfer:
    outer_bytes = outer_state_bytes(scenario, first, end) if leads else 0
    return LayerTransfer(source, target, first, end, state_bytes(scenario, first, end) + outer_bytes, bool(leads))
