"""Strategy ``deepcee``: one pipeline across regions, planned around the links between them (arXiv 2505.15536).

The system is also known as SpanTrain. The planner has these steps:

1. Devices are grouped by network into areas, and by speed into groups; areas are put in the order in which the largest
   distance between neighbours is least (`planner.systems.deepcee.device_groups`).
2. Each group becomes one or several stages, and layers are split among the stages for the shortest step
   (`planner.systems.deepcee.pipeline_search`). All replicas of a stage belong to one group, so links between areas
   carry only activations and their gradients, no gradient sums.
3. Stages keep as many microbatches in flight as hide the round trips, and the schedule ``compact-zb`` orders actions
   without avoidable idle time.

The public text of the paper describes the grouping, stages of unequal size and the compact zero-bubble schedule.
Assumed, where it gives no details: the formulas of the modules named; the division of a group into replicas or
consecutive stages; that areas may be left out, at either end of the order or one in between, if this is faster; and
that candidates are compared first by a closed form, and the best few by one step with a dynamic order.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from planner.cost.in_flight import no_split_fits
from planner.cost.link_sharing import shared_paths
from planner.plan.microbatches import even_groups
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.step.evaluate import step_time_s
from planner.systems.deepcee.device_groups import Area, Group, best_order, device_areas, packet_times_s
from planner.systems.deepcee.pipeline_search import Candidate, PipelineSearch

# Number of starting pipelines that are improved, and of improved pipelines that are compared by an evaluated step.
_IMPROVED = 4
_TIMED = 3


@dataclass(frozen=True, slots=True)
class Mechanisms:
    """Mechanisms of DeepCEE's planner that an ablation can switch off.

    Attributes:
        grouping: Whether devices are grouped, ordered and left out; otherwise every device is a stage, in the cluster's
            order.
        zero_bubble: Whether the schedule is ``compact-zb``, in which weight gradients fill idle time; otherwise 1F1B.
        latency_aware_depth: Whether depths (microbatches in flight) hide round trips; otherwise they are 1F1B's.
    """

    grouping: bool = True
    zero_bubble: bool = True
    latency_aware_depth: bool = True


ALL_MECHANISMS = Mechanisms()


def deepcee(scenario: Scenario, mechanisms: Mechanisms = ALL_MECHANISMS) -> Plan:
    """Return the fastest pipeline over some or all areas of the cluster, planned with some or all mechanisms.

    Raises:
        InputError: No split of the model fits into memory.
    """
    return counted_deepcee(scenario, mechanisms)[0]


def counted_deepcee(scenario: Scenario, mechanisms: Mechanisms = ALL_MECHANISMS) -> tuple[Plan, int]:
    """Return the result of `deepcee`, and the number of candidate pipelines that its search has looked at."""
    search = PipelineSearch(scenario, hides_latency=mechanisms.latency_aware_depth)
    chains = _chains(scenario) if mechanisms.grouping else iter([_as_named(scenario)])
    starts = sorted((start for chain in chains for start in search.starts(chain)), key=lambda each: each.step_s)
    if not starts:
        raise no_split_fits(scenario, "deepcee")
    improved = {search.improved(start): None for start in starts[:_IMPROVED]}
    best = sorted(improved, key=lambda each: each.step_s)[:_TIMED]
    plans = (_plan(each, mechanisms, scenario) for each in best)
    return min(plans, key=lambda plan: dynamic_step_time_s(plan, scenario)), search.candidates


def dynamic_step_time_s(plan: Plan, scenario: Scenario, slowdown: Mapping[str, float] | None = None) -> float:
    """Return the time of a step with a dynamic order, which needs no search, at declared bandwidths, seconds.

    Flows that start together share their links. ``slowdown`` is that of `step_time_s`.
    """
    return step_time_s(replace(plan, order="dynamic"), scenario, shared_paths(plan, scenario), slowdown)


def _plan(candidate: Candidate, mechanisms: Mechanisms, scenario: Scenario) -> Plan:
    schedule = "compact-zb" if mechanisms.zero_bubble else "1f1b"
    return Plan(scenario.name, scenario.model.name, "deepcee", schedule, (candidate.pipeline,))


def _chains(scenario: Scenario) -> Iterator[tuple[Group, ...]]:
    """Yield sequences of groups to try: of all areas, of consecutive ones, of all areas but one, and their reverses."""
    areas = device_areas(scenario)
    order = best_order(_area_distance_s(areas, scenario))
    count = len(order)
    runs = {order[first:end] for first in range(count) for end in range(first + 1, count + 1)}
    runs |= {(*order[:index], *order[index + 1 :]) for index in range(count) if count > 1}
    for run in sorted(runs):
        for direction in dict.fromkeys((run, run[::-1])):
            yield tuple(group for index in direction for group in areas[index])


def _area_distance_s(areas: tuple[Area, ...], scenario: Scenario) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Return the largest distance between a device of one area and a device of another, seconds, [areas, areas]."""
    number = {device.name: index for index, device in enumerate(scenario.cluster.devices)}
    members = [[number[device.name] for group in area for device in group] for area in areas]
    every_s = packet_times_s(scenario)
    return np.array([[every_s[np.ix_(a, b)].max() for b in members] for a in members])


def _as_named(scenario: Scenario) -> tuple[Group, ...]:
    """Return one group per device, in the cluster's order; with fewer layers than devices, one group per layer."""
    devices = scenario.cluster.devices
    return tuple(even_groups(devices, min(len(devices), len(scenario.model.layers))))
