"""How long a step of a plan takes, quickly: alike pipelines are looked at once, and sums of gradients in closed form.

Few devices are no trouble: there the compiled evaluator looks at everything, and at what flows make of links that they
share.
"""

from collections.abc import Hashable, Sequence

from planner.cost.allreduce import GradientSync, gradient_syncs
from planner.cost.network import nominal_path
from planner.plan.equivalence import representatives
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.step.contention import contended_paths
from planner.step.evaluate import step_time_s

MOST_EVALUATED = 12


def approximate_step_time_s(plan: Plan, scenario: Scenario) -> float:
    """Return the seconds of a step on steady links."""
    if len(plan.devices) <= MOST_EVALUATED:
        return contended_step_time_s(plan, scenario)
    return step_time_s(representatives(plan, scenario), scenario) + _sums_s(plan, scenario)


def contended_step_time_s(plan: Plan, scenario: Scenario) -> float:
    """Return the seconds of a step on steady links, with all devices looked at.

    In clusters of few devices links are shared; in larger ones each pair of devices has them for itself.
    """
    few = len(scenario.cluster.devices) <= MOST_EVALUATED
    return step_time_s(plan, scenario, contended_paths(plan, scenario) if few else None)


def _sums_s(plan: Plan, scenario: Scenario) -> float:
    """Seconds of the sums of the device that has most of them; each device does one after the other."""
    busy_s = dict.fromkeys(plan.devices, 0.0)
    for sync in gradient_syncs(plan, scenario):
        time_s = _ring_s(sync, plan, scenario)
        for device in sync.devices:
            busy_s[device] += time_s
    return max(busy_s.values())


def _ring_s(sync: GradientSync, plan: Plan, scenario: Scenario) -> float:
    part_bytes = sync.elements * scenario.training.element_bytes / len(sync.devices)
    hops = _hops(sync.devices, scenario)
    slowest_s = max(
        path.latency_s + path.transmission_s(part_bytes)
        for path in {nominal_path(scenario, *hop, plan.connections) for hop in hops}
    )
    return 2 * (len(sync.devices) - 1) * slowest_s


def _hops(devices: Sequence[str], scenario: Scenario) -> list[tuple[str, str]]:
    """Hops of a ring, one for each pair of kinds and regions, and whether it stays in a host."""
    by_name = scenario.cluster.by_name
    hops: dict[Hashable, tuple[str, str]] = {}
    for one, other in zip(devices, [*devices[1:], devices[0]], strict=True):
        ends = (by_name[one], by_name[other])
        key = (*((end.kind, end.region) for end in ends), ends[0].machine == ends[1].machine)
        hops.setdefault(key, (one, other))
    return list(hops.values())
