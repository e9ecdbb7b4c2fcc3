"""Devices in groups of two levels: areas that slow links part, and in each area groups of much the same devices.

DeepCEE's profiler (arXiv 2505.15536) clusters first by the network, then by compute. For two devices let alpha be the
time of a large packet of m bytes and beta that of a minimal one; their distance is

    pt = alpha + beta / m, of the worse direction.

Agglomerative clustering by average linkage. Assumed, since the public text is silent: m is 1 MiB; areas are cut where
the heights of merges rise most, if they rise to the `LEAST_RISE`-fold or more; packets that are faster than a link of
10 Gbit/s makes them count as that fast, so that no cut falls inside a network that is fast anyway. Inside an area
devices are grouped by the time of the model's own layers and by memory, to within `SPREAD_RATIO`.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planner.cost.network import nominal_path
from planner.scenario.cluster import LONGEST_OUTAGE_S, Device
from planner.scenario.scenario import Scenario
from traces.common.errors import InputError

Floats = NDArray[np.float64]

# The large packet.
PACKET_BYTES = 2**20

# Below this all packets are alike: 10 Gbit/s.
FAST_PACKET_S = 8 * PACKET_BYTES / 10e9

# Areas are cut where merges become this many times as far.
LEAST_RISE = 5.0

# Devices of a group differ in speed, and in memory, by this factor on average at most.
SPREAD_RATIO = 1.2

Group = tuple[Device, ...]
Area = tuple[Group, ...]


def device_areas(scenario: Scenario) -> tuple[Area, ...]:
    """Return the areas of a scenario's cluster, each with its groups; all in the order of the cluster's devices.

    Groups of an area come by memory, the largest first: the earlier a stage, the more microbatches it keeps.
    """
    devices = scenario.cluster.devices
    areas = cut_at_largest_rise(packet_times_s(scenario))
    return tuple(_groups([devices[index] for index in members], scenario) for members in areas)


def packet_times_s(scenario: Scenario) -> Floats:
    """Return the distance pt of every two devices, the worse direction, seconds, [devices, devices].

    Where no link leads, a day.
    """
    names = [device.name for device in scenario.cluster.devices]
    one_way_s = np.array([[_packet_s(scenario, a, b) for b in names] for a in names])
    return np.asarray(np.maximum(one_way_s, one_way_s.T), np.float64)


def cut_at_largest_rise(distance_s: Floats) -> list[list[int]]:
    """Return groups of indices, cut where the heights of merges rise most; one group where none rises enough.

    Args:
        distance_s: Of every two, symmetric, [members, members].
    """
    count = len(distance_s)
    if count == 1:
        return [[0]]
    merges = _merges(np.maximum(distance_s, FAST_PACKET_S))
    heights_s = np.concatenate(([FAST_PACKET_S], merges[:, 2]))
    rises = heights_s[1:] / heights_s[:-1]
    steepest = int(np.argmax(rises))
    if rises[steepest] < LEAST_RISE:
        return [list(range(count))]
    return _members(merges, math.sqrt(heights_s[steepest] * heights_s[steepest + 1]))


def model_time_s(device: Device, scenario: Scenario) -> float:
    """Return the seconds that all layers of the model take on a device for one microbatch: its benchmark, pc.

    Assumed: the model itself as the only task, at the scenario's microbatch.
    """
    samples = max(1, scenario.training.microbatch)
    return scenario.model.times(0, len(scenario.model.layers), device.kind, samples).total_s


def _packet_s(scenario: Scenario, source: str, target: str) -> float:
    if source == target:
        return 0.0
    try:
        path = nominal_path(scenario, source, target)
    except InputError:
        return LONGEST_OUTAGE_S
    large_s = path.transmission_s(PACKET_BYTES) + path.propagation_s(PACKET_BYTES)
    minimal_s = path.transmission_s(1) + path.propagation_s(1)
    return large_s + minimal_s / PACKET_BYTES


def _groups(devices: Sequence[Device], scenario: Scenario) -> Area:
    if len(devices) == 1:
        return (tuple(devices),)
    features = np.log([[max(model_time_s(each, scenario), 1e-12), each.memory_bytes] for each in devices])
    spread = np.abs(features[:, None, :] - features[None, :, :]).max(axis=2)
    groups = [
        tuple(devices[index] for index in members) for members in _members(_merges(spread), math.log(SPREAD_RATIO))
    ]
    return tuple(sorted(groups, key=lambda group: -min(device.memory_bytes for device in group)))


def _merges(distance: Floats) -> Floats:
    """Agglomerative clustering by average linkage, as in scipy; distances of every two, [members, members]."""
    # Loaded where it is needed: that takes a third of a second, and every command knows all strategies.
    from scipy.cluster.hierarchy import linkage

    return np.asarray(linkage(distance[np.triu_indices(len(distance), 1)], "average"), np.float64)


def _members(merges: Floats, height: float) -> list[list[int]]:
    """The indices of each cluster below a height, by their first."""
    from scipy.cluster.hierarchy import fcluster

    members: dict[int, list[int]] = {}
    for index, label in enumerate(fcluster(merges, height, "distance").tolist()):
        members.setdefault(label, []).append(index)
    return list(members.values())


MOST_EXACT = 9


def best_order(distance: Floats) -> tuple[int, ...]:
    """Return the order of all groups, the end with the lower index first.

    Args:
        distance: Of every two groups, symmetric, not negative, in any unit, [groups, groups].
    """
    count = len(distance)
    if count <= MOST_EXACT:
        worst, _ = _best_path(distance, max)
        order = _best_path(np.where(distance <= worst, distance, np.inf), lambda a, b: a + b)[1]
    else:
        order = min((_two_opt(_nearest_from(start, distance), distance) for start in range(count)), key=_cost(distance))
    return order if order[0] <= order[-1] else order[::-1]


def path_cost(order: tuple[int, ...], distance: Floats) -> tuple[float, float]:
    """Return the largest and the sum of the distances between neighbours, in the unit of ``distance``."""
    steps = [float(distance[a, b]) for a, b in pairwise(order)]
    return max(steps, default=0.0), sum(steps)


def _cost(distance: Floats) -> Callable[[tuple[int, ...]], tuple[float, float]]:
    return lambda order: path_cost(order, distance)


def _best_path(distance: Floats, join: Callable[[float, float], float]) -> tuple[float, tuple[int, ...]]:
    """The least cost of a path through all, with its order; ``join`` adds a distance to the cost of a path."""
    count = len(distance)
    best: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {(1 << i, i): (0.0, (i,)) for i in range(count)}
    for visited in range(1, 1 << count):
        for last in range(count):
            if (visited, last) not in best:
                continue
            cost, order = best[visited, last]
            for following in (each for each in range(count) if not visited >> each & 1):
                longer = (join(cost, float(distance[last, following])), (*order, following))
                key = (visited | 1 << following, following)
                if key not in best or longer < best[key]:
                    best[key] = longer
    return min(best[(1 << count) - 1, last] for last in range(count))


def _nearest_from(start: int, distance: Floats) -> tuple[int, ...]:
    order, left = [start], set(range(len(distance))) - {start}
    while left:
        order.append(min(left, key=lambda each: (distance[order[-1], each], each)))
        left.remove(order[-1])
    return tuple(order)


def _two_opt(order: tuple[int, ...], distance: Floats) -> tuple[int, ...]:
    """Turn pieces of the order around as long as that helps."""
    cost = _cost(distance)
    while True:
        turned = (
            (*order[:first], *order[first:end][::-1], *order[end:])
            for first in range(len(order))
            for end in range(first + 2, len(order) + 1)
        )
        better = next((each for each in turned if cost(each) < cost(order)), None)
        if better is None:
            return order
        order = better
