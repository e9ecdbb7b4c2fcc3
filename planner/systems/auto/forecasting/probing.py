"""Plans that probe links which the current plan does not use: the first or last layer is moved behind such a link.

While a plan uses one region only, the rates of the links to other regions stay unknown. To measure them, a few steps
send all samples over such a link. Most models have a small first and last layer, which can be moved to the other region
and back in little time; moving half of the model would take long.
"""

from collections.abc import Collection
from dataclasses import replace

from planner.check import is_possible
from planner.cost.in_flight import fitting_depths
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.scenario.scenario import Scenario

# Most microbatches of a step of a probing plan: enough for compute and transfers to overlap.
MICROBATCHES = 16


def probing_plan(plan: Plan, scenario: Scenario, links: Collection[str], away: Collection[str]) -> Plan | None:
    """Return the plan with its last layer, its first layer or both moved across ``links``; None if impossible.

    Args:
        plan: Current plan, for which a probe is possible only if it has one pipeline and sums gradients in every step.
        scenario: Scenario that the plan is for.
        links: Names of the links to probe.
        away: Names of devices that are absent.
    """
    if len(plan.pipelines) != 1 or plan.synchronisation.method != "allreduce":
        return None
    stages = plan.pipelines[0].stages
    ahead = _beyond(scenario, stages[-1], links, {*away, *plan.devices})
    if ahead is not None and stages[-1].end_layer - stages[-1].first_layer > 1:
        last = stages[-1]
        cut = last.end_layer - 1
        stages = (*stages[:-1], replace(last, end_layer=cut), Stage(cut, last.end_layer, (Replica(ahead),), 1))
    used = {device for stage in stages for replica in stage.replicas for device in replica.devices}
    behind = _beyond(scenario, stages[0], links, {*away, *used}, other_than=ahead)
    if behind is not None and stages[0].end_layer - stages[0].first_layer > 1:
        first = stages[0]
        stages = (Stage(0, 1, (Replica(behind),), 1), replace(first, first_layer=1), *stages[1:])
    return _with_depths(plan, stages, scenario) if len(stages) > len(plan.pipelines[0].stages) else None


def _beyond(
    scenario: Scenario, stage: Stage, links: Collection[str], taken: Collection[str], other_than: str | None = None
) -> str | None:
    """Return a device at the other end of one of ``links``, seen from ``stage``, or None if there is none.

    The device is neither in ``taken`` nor in the region of the device ``other_than``.
    """
    here, wan_links = stage.replicas[0].device, scenario.cluster.wan_links
    near = {scenario.cluster.by_name[name].region for name in (here, other_than) if name is not None}
    for device in scenario.cluster.devices:
        wide = [link.name for link in scenario.cluster.path(here, device.name) if link.name in wan_links]
        if device.region not in near and device.name not in taken and len(wide) == 1 and wide[0] in links:
            return device.name
    return None


def _with_depths(plan: Plan, stages: tuple[Stage, ...], scenario: Scenario) -> Plan | None:
    samples = plan.pipelines[0].samples
    count = max(number for number in range(1, MICROBATCHES + 1) if samples % number == 0)
    microbatches = (samples // count,) * count
    # All in flight, if there is memory: the latencies that the probe meets then delay a step once, not each microbatch.
    depths = fitting_depths([count] * len(stages), stages, scenario, microbatches)
    if depths is None:
        return None
    pipeline = Pipeline(stages, microbatches).with_depths(depths)
    probing = replace(plan, pipelines=(pipeline,), schedule="1f1b", order="dynamic")
    return probing if is_possible(probing, scenario) else None
