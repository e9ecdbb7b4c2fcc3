"""Functions on the copies of layers that devices have: from which step, and by which transfers, a run can resume."""

from collections.abc import Callable, Iterable, Mapping

from planner.adapt.migration import Migration, moves_from
from planner.adapt.worker_moves import worker_moves
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


def newest_of_workers(
    copies: Mapping[str, Copies], plan_at: Callable[[int], Plan], layers: int, latest: int
) -> int | None:
    """Return the newest step, at most ``latest``, before which all workers have copies that train separately.

    If there is none, it is the newest one from which the others can begin anew: some worker has copies of each layer.
    None if there is none either.

    Args:
        copies: The copies of the devices that are not lost.
        plan_at: Returns the plan of a step.
        layers: Number of layers.
        latest: The newest step that may be returned.
    """
    some = None
    for step in sorted({step for each in copies.values() for step in each if step <= latest}, reverse=True):
        plan = plan_at(step)
        lacking = {
            device: layers_of(plan, device) - copies[device].get(step, frozenset())
            for device in plan.devices
            if device in copies
        }
        leaders = ((stage.replicas[0].device, stage.layers) for stage in plan.stages)
        led = {layer for leader, own in leaders if leader in lacking for layer in own if layer not in lacking[leader]}
        if len(led) == layers:
            some = step if some is None else some
            if not any(lacking.values()):
                return step
    return some


def resumable_step(
    copies: Mapping[str, Copies], plan_at: Callable[[int], Plan], layers: int, latest: int
) -> int | None:
    """Return the step from which a run goes on, at most ``latest``; None if layers are lost.

    The arguments are those of `newest_of_workers`. Devices whose pipelines sum gradients need one copy of each layer.
    """
    if plan_at(latest).synchronisation.has_outer_step:
        return newest_of_workers(copies, plan_at, layers, latest)
    return newest_complete(copies.values(), layers, latest)


def restoring_moves(
    plan: Plan, scenario: Scenario, step: int, copies: Mapping[str, Copies], before: Plan | None = None
) -> Migration:
    """Return the transfers after which each device of a plan has its layers in their state before ``step``.

    ``before`` is the plan with which devices made their copies; only workers that train separately need it.
    """
    held = {device: each.get(step, frozenset()) for device, each in copies.items()}
    if plan.synchronisation.has_outer_step and before is not None:
        return worker_moves(held, before, plan, scenario)
    return moves_from(held, plan, scenario)
