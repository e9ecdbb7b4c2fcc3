"""What ranks that are left have between them, and what has to travel so that they can begin anew."""

from collections.abc import Iterable, Mapping

from planner.adapt.migration import Migration, moves_from
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario

# Step to the layers whose state before that step a device has.
Copies = Mapping[int, frozenset[int]]


def newest_complete(copies: Iterable[Copies], layers: int, latest: int) -> int | None:
    """Return the newest step before which the state of all layers is there, on whichever devices.

    Args:
        copies: Of each device.
        layers: Of the model.
        latest: The step may not be after this one.

    Returns:
        None if there is none.
    """
    held = list(copies)
    for step in sorted({step for each in held for step in each if step <= latest}, reverse=True):
        if frozenset().union(*(each.get(step, frozenset()) for each in held)) >= frozenset(range(layers)):
            return step
    return None


def missing_layers(copies: Iterable[Copies], layers: int, latest: int) -> list[int]:
    """Return the layers that nobody has from the newest step, ``latest`` at most, of which some are left."""
    held = list(copies)
    newest = max((step for each in held for step in each if step <= latest), default=0)
    there = frozenset().union(*(each.get(newest, frozenset()) for each in held))
    return sorted(set(range(layers)) - there)


def restoring_moves(plan: Plan, scenario: Scenario, step: int, copies: Mapping[str, Copies]) -> Migration:
    """Return what the devices of a plan need of each other to have its layers as they were before a step.

    Args:
        plan: Of that step.
        scenario: What it is for.
        step: Of which every layer is there.
        copies: By device.
    """
    held = {device: each.get(step, frozenset()) for device, each in copies.items()}
    return moves_from(held, plan, scenario)


def layers_of(plan: Plan, device: str) -> frozenset[int]:
    """Return the layers that a device trains under a plan."""
    stages = (stage for pipeline in plan.pipelines for stage in pipeline.stages)
    return frozenset(
        layer
        for stage in stages
        if any(device in replica.devices for replica in stage.replicas)
        for layer in stage.layers
    )
