"""Functions on the copies of layers that devices have: from which step, and by which transfers, a run can resume."""

from collections.abc import Iterable, Mapping

from planner.adapt.migration import Migration, moves_from
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario

# The copies of one device: a dictionary of steps to the layers whose state before that step the device has.
Copies = Mapping[int, frozenset[int]]


def layers_of(plan: Plan, device: str) -> frozenset[int]:
    """Return the layers that a device trains under a plan."""
    return frozenset(
        layer
        for stage in plan.stages
        if any(device in replica.devices for replica in stage.replicas)
        for layer in stage.layers
    )


def newest_complete(copies: Iterable[Copies], layers: int, latest: int) -> int | None:
    """Return the newest step, at most ``latest``, before which each of ``layers`` layers has a copy; None if none."""
    found = list(copies)
    for step in sorted({step for each in found for step in each if step <= latest}, reverse=True):
        if frozenset().union(*(each.get(step, frozenset()) for each in found)) >= frozenset(range(layers)):
            return step
    return None


def missing_layers(copies: Iterable[Copies], layers: int, latest: int) -> list[int]:
    """Return the layers that lack a copy before the newest step, at most ``latest``, for which there are copies."""
    found = list(copies)
    newest = max((step for each in found for step in each if step <= latest), default=0)
    there = frozenset().union(*(each.get(newest, frozenset()) for each in found))
    return sorted(set(range(layers)) - there)


def restoring_moves(plan: Plan, scenario: Scenario, step: int, copies: Mapping[str, Copies]) -> Migration:
    """Return the transfers after which each device of a plan has its layers in their state before ``step``."""
    return moves_from({device: each.get(step, frozenset()) for device, each in copies.items()}, plan, scenario)
