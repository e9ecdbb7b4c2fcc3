"""Pipelines of few, unlike devices: the dynamic programme of `partition_dp` with every set of devices as an option.

A set of devices, which are the replicas of a stage, is written as a number: bit i is 1 if device i is a member. For
every set of devices that a whole pipeline may use, and for every bound of a grid, the programme finds the pipeline with
the shortest round trip. If only few pipelines are possible, all of them are timed instead (`timed_pipelines`).
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numba import njit

from planner.cost.layers import launches_s, layer_table
from planner.cost.network import ConstantRatePath, nominal_path
from planner.cost.synchronisation import ring_s
from planner.scenario.cluster import Device
from planner.scenario.scenario import Scenario
from planner.step.graph import Floats, Ints
from planner.systems.auto.candidates.cut_points import at_cut_points, cut_points, part_memory
from planner.systems.auto.candidates.partition_dp import (
    Limits,
    PartitionCosts,
    best_start,
    fill,
    fronts_within,
    new_tables,
    ranges_within,
    unwind,
    wait_s,
)

# The grid has `_BOUNDS` bounds from the least possible one to the time of the fastest device alone, and `_BEYOND`
# bounds up to `_FARTHEST` times that time, which are needed if memory or links allow no smaller ones.
_BOUNDS, _BEYOND, _FARTHEST = 40, 10, 20.0

# Most parts of a microbatch that are given to devices one after the other.
_MOST_SHARES = 1024

# Compute time per layer of a device that gets no samples, seconds: so long that no set with such a device is used.
_NO_SAMPLES_S = 1e30


class SubsetPipelines(NamedTuple):
    """Pipelines whose stages are sets of devices.

    Attributes:
        used: Set of all devices of the pipeline, [pipelines].
        bound_s: Longest time of a stage or link for one microbatch, seconds, [pipelines].
        round_trip_s: Time from a microbatch's first forward to its last backward, plus the time of all stages' gradient
            sums, seconds, [pipelines].
        devices: Set of devices of each stage, 0 after the last stage, [pipelines, most stages].
        first_layer: Index in the model of the first layer of each stage, [pipelines, most stages].
    """

    used: Ints
    bound_s: Floats
    round_trip_s: Floats
    devices: Ints
    first_layer: Ints

    def steps_s(self, microbatches: int) -> Floats:
        """Return the time of a step with ``microbatches`` microbatches of each pipeline, seconds, [pipelines]."""
        return np.asarray((microbatches - 1) * self.bound_s + self.round_trip_s)


def devices_of(subset: int, devices: Sequence[Device]) -> list[Device]:
    """Return the devices of the set that the bits of ``subset`` give."""
    return [device for number, device in enumerate(devices) if subset >> number & 1]


def samples_by_speed(members: Sequence[Device], scenario: Scenario, microbatch: int) -> dict[str, int]:
    """Return the number of samples of a microbatch that each device takes, by device name.

    If there are enough samples, every device takes at least one, even if it is slow, since its memory may be needed.
    Each further sample goes to the device that would finish first with it. Of more than `_MOST_SHARES` samples, several
    go together.
    """
    layers = len(scenario.model.layers)
    first = min(1, microbatch // len(members))
    given = dict.fromkeys((device.name for device in members), first)
    left = microbatch - first * len(members)
    most = -(-left // _MOST_SHARES)
    while left:
        part = min(most, left)
        soonest = min(
            members,
            key=lambda device: scenario.model.times(0, layers, device.kind, given[device.name] + part).total_s,
        )
        given[soonest.name] += part
        left -= part
    return given


def subset_costs(devices: Sequence[Device], scenario: Scenario, microbatch: int) -> PartitionCosts:
    """Return the costs of all sets of devices: option i is set i + 1, and a context is the set of all used devices."""
    subsets, cuts = range(1, 1 << len(devices)), cut_points(scenario)
    shape = (len(subsets), len(devices), len(cuts))
    seconds, resident, saved = np.zeros(shape), np.zeros((*shape, shape[-1])), np.zeros((*shape, shape[-1]))
    states = layer_table(scenario, devices[0].kind, microbatch).state_bytes[cuts]
    no_samples_s = _NO_SAMPLES_S * np.arange(shape[-1])
    for subset in subsets:
        members = devices_of(subset, devices)
        shares = samples_by_speed(members, scenario, microbatch)
        for number, device in enumerate(devices):
            if device in members:
                samples = shares[device.name]
                compute_s = layer_table(scenario, device.kind, samples).compute_s[cuts] if samples else no_samples_s
                seconds[subset - 1, number] = compute_s
                resident[subset - 1, number], saved[subset - 1, number] = part_memory(scenario, samples)
    is_member = np.array([[subset >> number & 1 for number in range(len(devices))] for subset in subsets])
    capacity = np.array([device.memory_bytes for device in devices], np.float64)
    busy_s, delivery_s = _boundary_costs(devices, scenario, microbatch)
    sets = np.array(subsets)
    sums_s = np.array([_gradient_sum_s(devices_of(subset, devices), scenario) for subset in subsets])
    context = np.arange(len(subsets) + 1)[:, None]
    entered = np.where((context & sets) == 0, context | sets, -1)
    return PartitionCosts(
        cuts,
        seconds,
        launches_s(scenario),
        resident,
        saved,
        np.where(is_member, capacity, np.inf),
        np.maximum(busy_s, busy_s.swapaxes(0, 1)),
        # Outputs and their gradients are sent in opposite directions, whose links may differ.
        delivery_s + delivery_s.swapaxes(0, 1),
        # The time to sum the whole model's gradients is divided among the layers in proportion to their model state.
        sums_s[:, None] * (states / max(states[-1], 1.0)),
        sets,
        sets[:, None] & sets == 0,
        entered,
        np.full_like(entered, -1),
        scenario.effects.compute.transfers_block,
        waits=True,
        adds_sums=True,
    )


def _boundary_costs(devices: Sequence[Device], scenario: Scenario, microbatch: int) -> tuple[Floats, Floats]:
    """Return the time to send each part's output from one set to another, and the time until it arrives.

    Both are arrays of seconds, [sending set - 1, receiving set - 1, parts].
    """
    subsets, of_layers = range(1, 1 << len(devices)), np.array([each.output_bytes for each in scenario.model.layers])
    outputs = at_cut_points(of_layers, scenario)
    busy_s, delivery_s = (np.zeros((len(subsets), len(subsets), len(outputs))) for _ in range(2))

    @cache
    def times_s(path: ConstantRatePath, samples: int) -> Floats:
        sizes = (samples * outputs).tolist()
        return np.array([[each(size) for size in sizes] for each in (path.transmission_s, path.delivery_s)])

    for one in subsets:
        for other in subsets:
            if one & other:
                continue
            paths = {
                nominal_path(scenario, a.name, b.name)
                for a in devices_of(one, devices)
                for b in devices_of(other, devices)
            }
            samples = -(-microbatch // max(one.bit_count(), other.bit_count()))
            ends = (one - 1, other - 1)
            busy_s[ends], delivery_s[ends] = np.max([times_s(path, samples) for path in paths], axis=0)
    return busy_s, delivery_s


def _gradient_sum_s(members: Sequence[Device], scenario: Scenario) -> float:
    """Return the time of a ring all-reduce of the whole model's gradients over the devices, seconds."""
    count = len(members)
    if count < 2:
        return 0.0
    names = [device.name for device in members]
    paths = [nominal_path(scenario, one, other) for one, other in zip(names, [*names[1:], names[0]], strict=True)]
    return ring_s(paths, scenario.model.parameter_bytes(0, len(scenario.model.layers)), count)


def bounds_grid(costs: PartitionCosts) -> Floats:
    """Return the bounds of the slowest stage or link that `best_pipelines` tries, ascending, seconds."""
    devices = range(costs.compute_s.shape[1])
    alone_s = np.array([costs.compute_s[(1 << number) - 1, number, -1] for number in devices]) + costs.launches_s
    high = float(alone_s.min())
    low = 1 / float((1 / np.maximum(alone_s, 1e-12)).sum())
    return np.concatenate((np.geomspace(low, high, _BOUNDS), np.geomspace(1.2 * high, _FARTHEST * high, _BEYOND)))


def best_pipelines(costs: PartitionCosts, microbatches: int, bounds_s: Floats) -> SubsetPipelines:
    """Return, for each bound and each set of used devices, the pipeline with the shortest round trip.

    Args:
        costs: Costs of every set of devices.
        microbatches: Number of microbatches of a step, which limits the number in flight at a stage.
        bounds_s: Bounds of the slowest stage or link, ascending, seconds.
    """
    round_trip_s, subset, first_layer = _best_pipelines(costs, microbatches, bounds_s)
    bound, used = np.nonzero(np.isfinite(round_trip_s))
    stages = np.concatenate((subset[bound, used], first_layer[bound, used]), axis=1)
    # A pipeline that is found with several bounds is kept with the least one.
    _, first = np.unique(stages, axis=0, return_index=True)
    bound, used = bound[first], used[first]
    first_layers = costs.cuts[first_layer[bound, used]]
    return SubsetPipelines(used, bounds_s[bound], round_trip_s[bound, used], subset[bound, used], first_layers)


def timed_pipelines(costs: PartitionCosts, microbatches: int, subset: Ints, first_layer: Ints) -> SubsetPipelines:
    """Return the given pipelines with their times, without those that do not fit into memory.

    Args:
        costs: Costs of every set of devices.
        microbatches: Number of microbatches of a step, which limits the number in flight at a stage.
        subset: Set of devices of each stage, 0 after the last stage, [pipelines, most stages].
        first_layer: Index of the first part of each stage, [pipelines, most stages].
    """
    bound_s, round_trip_s = _time_pipelines(costs, microbatches, subset, first_layer)
    fits = np.isfinite(bound_s)
    used = np.bitwise_or.reduce(subset, axis=1)
    return SubsetPipelines(used[fits], bound_s[fits], round_trip_s[fits], subset[fits], costs.cuts[first_layer[fits]])


@njit(cache=True)
def _time_pipelines(
    costs: PartitionCosts, microbatches: int, subset: Ints, first_layer: Ints
) -> tuple[Floats, Floats]:  # pragma: no cover
    pipelines, most_stages = subset.shape
    layers = costs.compute_s.shape[2] - 1
    bound_s, round_trip_s, ranges = np.zeros(pipelines), np.zeros(pipelines), ranges_within(costs, np.inf)
    for pipeline in range(pipelines):
        end, behind = layers, 0
        for stage in range(most_stages - 1, -1, -1):
            option = subset[pipeline, stage] - 1
            if option < 0:
                continue
            first, transfer_s, busy_s = first_layer[pipeline, stage], 0.0, 0.0
            if behind:
                after = subset[pipeline, stage + 1] - 1
                transfer_s, busy_s = costs.transfer_s[option, after, end - 1], costs.busy_s[option, after, end - 1]
            time_s = ranges.compute_s[option, end, first]
            sum_s = costs.sum_s[option, end] - costs.sum_s[option, first]
            round_trip_s[pipeline] += time_s + transfer_s + sum_s
            own_s = time_s + (transfer_s if costs.blocks else 0.0)
            depth = min(microbatches, behind + 1)
            waiting_s = wait_s(costs.waits, ranges.held[option, end, first], depth, round_trip_s[pipeline])
            bound_s[pipeline] = max(bound_s[pipeline], busy_s, own_s, waiting_s)
            end, behind = first, behind + 1
    return bound_s, round_trip_s


@njit(cache=True)
def _best_pipelines(
    costs: PartitionCosts, microbatches: int, bounds_s: Floats
) -> tuple[Floats, Ints, Ints]:  # pragma: no cover
    options, devices, layers = costs.compute_s.shape[0], costs.compute_s.shape[1], costs.compute_s.shape[2] - 1
    best_s = np.full((len(bounds_s), options + 1), np.inf)
    subset = np.zeros((len(bounds_s), options + 1, devices), np.int64)
    first_layer = np.zeros((len(bounds_s), options + 1, devices), np.int64)
    tables, fronts = new_tables(costs, devices), fronts_within(costs, bounds_s[-1])
    ranges = ranges_within(costs, bounds_s[-1])
    for number, bound_s in enumerate(bounds_s):
        limits = Limits(microbatches, bound_s, np.inf, np.zeros(layers), np.inf)
        fill(costs, ranges, limits, fronts, tables, False)
        for used in range(1, options + 1):
            best_s[number, used], start = best_start(tables, used, used + 1)
            stages = unwind(start, tables.next_state, subset[number, used], first_layer[number, used])
            subset[number, used, :stages] += 1
    return best_s, subset, first_layer
