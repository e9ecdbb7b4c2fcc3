"""A cheap look at links that the plan does not use: for a few steps, one end layer is computed on their far side.

A plan within a region learns nothing of the links around it. Moving half of the model to try them costs as much as
moving it for good, both ways; the first and the last layer of most models are small, and all samples still cross.
"""

from collections.abc import Collection
from dataclasses import replace

from planner.check import check_plan
from planner.cost.in_flight import fitting_depths, latency_aware_depths
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.scenario.scenario import Scenario
from traces.common.errors import InputError

# Microbatches of a scouting step: enough that computing and sending overlap.
MICROBATCHES = 16


def probing_plan(plan: Plan, scenario: Scenario, links: Collection[str], away: Collection[str]) -> Plan | None:
    """Return the plan with an end layer beyond each of two of these links at most; None where that cannot be.

    Args:
        plan: With one pipeline.
        scenario: What it is for.
        links: Names of links that shall be used.
        away: Devices that are not there.
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
    behind = _beyond(scenario, stages[0], links, {*away, *used}, but=ahead)
    if behind is not None and stages[0].end_layer - stages[0].first_layer > 1:
        first = stages[0]
        stages = (Stage(0, 1, (Replica(behind),), 1), replace(first, first_layer=1), *stages[1:])
    return _in_depth(plan, stages, scenario) if len(stages) > len(plan.pipelines[0].stages) else None


def _beyond(
    scenario: Scenario, stage: Stage, links: Collection[str], taken: Collection[str], but: str | None = None
) -> str | None:
    """A free device at the far end of one of the links from a stage, in another region than device ``but``."""
    here = stage.replicas[0].device
    by_name = scenario.cluster.by_name
    for device in scenario.cluster.devices:
        crossed = [link.name for link in scenario.cluster.path(here, device.name)]
        elsewhere = device.region != by_name[here].region and (but is None or device.region != by_name[but].region)
        if elsewhere and device.name not in taken and len(crossed) == 1 and crossed[0] in links:
            return device.name
    return None


def _in_depth(plan: Plan, stages: tuple[Stage, ...], scenario: Scenario) -> Plan | None:
    samples = plan.pipelines[0].samples
    count = max(number for number in range(1, MICROBATCHES + 1) if samples % number == 0)
    microbatches = (samples // count,) * count
    wanted = latency_aware_depths([1.0] * len(stages), [1.0] * (len(stages) - 1), [0.0] * (len(stages) - 1))
    depths = fitting_depths(wanted, stages, scenario, microbatches)
    if depths is None:
        return None
    pipeline = Pipeline(tuple(stages), microbatches).with_depths(depths)
    scouting = replace(plan, pipelines=(pipeline,), schedule="1f1b", order="dynamic")
    try:
        check_plan(scouting, scenario)
    except InputError:
        return None
    return scouting
