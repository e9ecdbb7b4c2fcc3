"""DeepCEE (also SpanTrain; arXiv 2505.15536): one pipeline across regions, built around the links between them.

Devices are grouped by network and by speed, and areas are put in the order with the least worst distance between
neighbours (`planner.systems.deepcee.device_groups`). Layers are split for the fastest step
(`planner.systems.deepcee.layer_split`), with as many microbatches in flight as hide the round trips, in an order
without avoidable idle time (schedule ``compact-zb``). Links between areas carry activations and their gradients only:
replicas of a stage are of one group.

Published: grouping, asymmetric stages, compact zero-bubble pipelines. Assumed, where the public text is silent: the
formulas in the modules named; that devices of a group are replicas or consecutive stages; that areas may
be left out, at either end of the order or one in between, where the rest is faster alone; that candidates are timed
by a closed form, and the best few by one step with a dynamic order at constant rates.
"""

from collections.abc import Iterator
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

# Number of starting pipelines that are improved, and of improved pipelines whose steps are evaluated.
_IMPROVED = 4
_TIMED = 3


@dataclass(frozen=True, slots=True)
class Mechanisms:
    """The mechanisms of DeepCEE's planner beyond splitting layers; each can be switched off for an ablation.

    Attributes:
        grouping: Whether devices are grouped, ordered and chosen; otherwise each is a stage, in the cluster's order.
        zero_bubble: Whether backward is split and weight gradients fill the gaps; otherwise 1F1B.
        latency_aware_depth: Whether depths hide round trips; otherwise they are 1F1B's P - s.
    """

    grouping: bool = True
    zero_bubble: bool = True
    latency_aware_depth: bool = True


def deepcee(scenario: Scenario) -> Plan:
    """Return the fastest pipeline over some or all areas of the cluster.

    Raises:
        InputError: No split of the model fits into memory.
    """
    return deepcee_with(Mechanisms(), scenario)


def deepcee_with(mechanisms: Mechanisms, scenario: Scenario) -> Plan:
    """Return DeepCEE's plan with only some of its mechanisms.

    Raises:
        InputError: No split of the model fits into memory.
    """
    search = PipelineSearch(scenario, hides_latency=mechanisms.latency_aware_depth)
    chains = _chains(scenario) if mechanisms.grouping else iter([_as_named(scenario)])
    starts = sorted((start for chain in chains for start in search.starts(chain)), key=lambda each: each.step_s)
    if not starts:
        raise no_split_fits(scenario, "deepcee")
    improved = {search.improved(start): None for start in starts[:_IMPROVED]}
    best = sorted(improved, key=lambda each: each.step_s)[:_TIMED]
    return min(
        (_plan(each, mechanisms, scenario) for each in best), key=lambda plan: approximate_step_time_s(plan, scenario)
    )


def approximate_step_time_s(plan: Plan, scenario: Scenario) -> float:
    """Return the time of a step with a dynamic order at declared bandwidths, seconds.

    A dynamic order needs no search. Flows that start together share their links.
    """
    return step_time_s(replace(plan, order="dynamic"), scenario, shared_paths(plan, scenario))


def _plan(candidate: Candidate, mechanisms: Mechanisms, scenario: Scenario) -> Plan:
    schedule = "compact-zb" if mechanisms.zero_bubble else "1f1b"
    return Plan(scenario.name, scenario.model.name, "deepcee", schedule, (candidate.pipeline,))


def _chains(scenario: Scenario) -> Iterator[tuple[Group, ...]]:
    """Yield sequences of groups, in both directions: of all areas, of consecutive areas, and of all areas but one."""
    areas = device_areas(scenario)
    order = best_order(_area_distance_s(areas, scenario))
    count = len(order)
    runs = {order[first:end] for first in range(count) for end in range(first + 1, count + 1)}
    runs |= {(*order[:index], *order[index + 1 :]) for index in range(count) if count > 1}
    for run in sorted(runs):
        for direction in dict.fromkeys((run, run[::-1])):
            yield tuple(group for index in direction for group in areas[index])


def _area_distance_s(areas: tuple[Area, ...], scenario: Scenario) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Return the worst distance between any device of one area and any of another, seconds, [areas, areas]."""
    number = {device.name: index for index, device in enumerate(scenario.cluster.devices)}
    members = [[number[device.name] for group in area for device in group] for area in areas]
    every_s = packet_times_s(scenario)
    return np.array([[every_s[np.ix_(a, b)].max() for b in members] for a in members])


def _as_named(scenario: Scenario) -> tuple[Group, ...]:
    """Return groups of one device each, or of neighbours where there are more devices than layers."""
    devices = scenario.cluster.devices
    return tuple(even_groups(devices, min(len(devices), len(scenario.model.layers))))
