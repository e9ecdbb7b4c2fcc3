"""Plans that probe links which the current plan does not use: the first or last layer is moved behind such a link.

While a plan uses one region only, the rates of the links to other regions stay unknown. To measure them, a few steps
send all samples over such a link. Most models have a small first and last layer, one of which can be moved to the other
region and back in little time; moving half of the model would take long.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from planner.check import is_possible
from planner.cost.in_flight import fitting_depths
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.scenario.scenario import Scenario

# Most microbatches of a step of a probing plan: enough for compute and transfers to overlap.
MICROBATCHES = 16


def probing_plan(plan: Plan, scenario: Scenario, links: Sequence[str], away: Collection[str]) -> Plan | None:
    """Return the plan with its last or first layer moved across the first of ``links`` for which this is possible.

    Args:
        plan: Current plan, for which a probe is possible only if it has one pipeline and sums gradients in every step.
        scenario: Scenario that the plan is for.
        links: Names of the links to probe, the most wanted one first.
        away: Names of devices that are absent.
    """
    if len(plan.pipelines) != 1 or plan.synchronisation.method != "allreduce":
        return None
    stages = plan.pipelines[0].stages
    first, last = stages[0], stages[-1]
    taken = {*away, *plan.devices}
    for link in links:
        ahead, behind = (_beyond(scenario, stage, link, taken) for stage in (last, first))
        if ahead is not None and last.end_layer - last.first_layer > 1:
            cut = last.end_layer - 1
            moved = (*stages[:-1], replace(last, end_layer=cut), Stage(cut, last.end_layer, (Replica(ahead),), 1))
        elif behind is not None and first.end_layer - first.first_layer > 1:
            moved = (Stage(0, 1, (Replica(behind),), 1), replace(first, first_layer=1), *stages[1:])
        else:
            continue
        probing = _with_depths(plan, moved, scenario)
        if probing is not None:
            return probing
    return None


def _beyond(scenario: Scenario, stage: Stage, link: str, taken: Collection[str]) -> str | None:
    """Return a device at the other end of ``link``, seen from ``stage``, or None if there is none or it is taken."""
    here, wan_links = stage.replicas[0].device, scenario.cluster.wan_links
    region = scenario.cluster.by_name[here].region
    for device in scenario.cluster.devices:
        wide = [each.name for each in scenario.cluster.path(here, device.name) if each.name in wan_links]
        if device.region != region and device.name not in taken and wide == [link]:
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
