"""DeepCEE's areas and groups of devices, and the order of areas along a pipeline (arXiv 2505.15536).

Areas are clusters of devices by network: slow links separate them. The groups of an area are clusters of its devices by
speed and memory. Both use agglomerative clustering with average linkage. The distance of two devices by network is
pt = alpha + beta / m in the slower direction, where alpha is the time of a packet of m bytes and beta that of the
smallest packet. The distance by speed and memory is the larger of the two ratios, as a logarithm.

Assumed, since the public text of the paper does not say:

- m is 1 MiB, and no distance by network counts as shorter than on a link of 10 Gbit/s, so that a fast network is never
  divided.
- The clustering ends before the merge whose distance rises most compared with the previous merge, if this factor is
  `LEAST_RISE` or more. Otherwise all devices form one area.
- The speed of a device is the time of the model's own layers. Groups end at an average ratio of `SPREAD_RATIO`.

The order of the areas minimises the largest distance between neighbours (a bottleneck Hamiltonian path) and, assumed,
among such orders the sum of distances. For up to `MOST_EXACT` areas, dynamic programming over subsets finds it. For
more, the nearest-neighbour path from every area is improved by 2-opt.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import numpy as np

from planner.cost.network import nominal_path
from planner.scenario.cluster import LONGEST_OUTAGE_S, Device
from planner.scenario.scenario import Scenario
from planner.step.graph import Floats
from traces.common.errors import InputError

# Size m of the large packet.
PACKET_BYTES = 2**20

# Least distance by network, seconds: the time of a packet of `PACKET_BYTES` at 10 Gbit/s.
FAST_PACKET_S = 8 * PACKET_BYTES / 10e9

# Ratio of the distances of two successive merges from which the clustering ends before the second.
LEAST_RISE = 5.0

# Largest average ratio of the speeds, and of the memories, of two devices of one group.
SPREAD_RATIO = 1.2

Group = tuple[Device, ...]
Area = tuple[Group, ...]

# The distance of two clusters that become one, and a member of each.
Merge = tuple[float, int, int]


def device_areas(scenario: Scenario) -> tuple[Area, ...]:
    """Return the areas of a scenario's cluster, in the order of their first devices, each as a tuple of groups.

    Groups of an area are sorted by memory, largest first, since earlier stages keep more microbatches in flight.
    """
    devices = scenario.cluster.devices
    areas = cut_at_largest_rise(packet_times_s(scenario))
    return tuple(_groups([devices[index] for index in members], scenario) for members in areas)


def packet_times_s(scenario: Scenario) -> Floats:
    """Return the distance of every two devices by network, pt of the module's docstring, seconds, [devices, devices].

    The distance of devices without a path between them is `LONGEST_OUTAGE_S`, one day.
    """
    names = [device.name for device in scenario.cluster.devices]
    one_way_s = np.array([[_packet_s(scenario, a, b) for b in names] for a in names])
    return np.asarray(np.maximum(one_way_s, one_way_s.T), np.float64)


def cut_at_largest_rise(distance_s: Floats) -> list[list[int]]:
    """Return clusters of devices that are near by network, each as a list of the devices' indices.

    Args:
        distance_s: Distance of every two devices, symmetric, seconds, [devices, devices].
    """
    count = len(distance_s)
    if count == 1:
        return [[0]]
    merges = _merges(np.maximum(distance_s, FAST_PACKET_S))
    heights_s = np.array([FAST_PACKET_S, *(height_s for height_s, _, _ in merges)])
    rises = heights_s[1:] / heights_s[:-1]
    steepest = int(np.argmax(rises))
    if rises[steepest] < LEAST_RISE:
        return [list(range(count))]
    return _members(merges, math.sqrt(heights_s[steepest] * heights_s[steepest + 1]))


def model_time_s(device: Device, scenario: Scenario) -> float:
    """Return the time of all layers on a device for one microbatch of the scenario's size, seconds."""
    samples = max(1, scenario.training.microbatch)
    return scenario.model.times(0, len(scenario.model.layers), device.kind, samples).total_s


def _packet_s(scenario: Scenario, source: str, target: str) -> float:
    if source == target:
        return 0.0
    try:
        path = nominal_path(scenario, source, target)
    except InputError:
        return LONGEST_OUTAGE_S
    return path.delivery_s(PACKET_BYTES) + path.delivery_s(1) / PACKET_BYTES


def _groups(devices: Sequence[Device], scenario: Scenario) -> Area:
    if len(devices) == 1:
        return (tuple(devices),)
    features = np.log([[max(model_time_s(each, scenario), 1e-12), each.memory_bytes] for each in devices])
    spread = np.abs(features[:, None, :] - features[None, :, :]).max(axis=2)
    groups = [
        tuple(devices[index] for index in members) for members in _members(_merges(spread), math.log(SPREAD_RATIO))
    ]
    return tuple(sorted(groups, key=lambda group: -min(device.memory_bytes for device in group)))


def _merges(distance: Floats) -> list[Merge]:
    """Return the merges of a clustering with average linkage, nearest first, for distances [members, members].

    The nearest-neighbour chain (Müllner, arXiv 1109.2378, section 3.2) gives the clusters of scipy's ``linkage``, whose
    import takes a third of a second of every command that plans.
    """
    distance, sizes = distance.copy(), np.ones(len(distance))
    np.fill_diagonal(distance, np.inf)
    merges: list[Merge] = []
    chain: list[int] = []
    while len(merges) < len(distance) - 1:
        if not chain:
            chain.append(int(np.flatnonzero(sizes)[0]))
        row = distance[chain[-1]]
        nearest = int(np.argmin(row))
        # Of equally near clusters the previous one, or the chain could be a circle.
        if len(chain) == 1 or row[nearest] < row[chain[-2]]:
            chain.append(nearest)
            continue
        gone, kept = sorted(chain[-2:])
        del chain[-2:]
        merges.append((float(distance[gone, kept]), gone, kept))
        joined = np.average(distance[[gone, kept]], axis=0, weights=sizes[[gone, kept]])
        distance[kept], distance[:, kept], distance[gone], distance[:, gone] = joined, joined, np.inf, np.inf
        sizes[kept], sizes[gone] = sizes[kept] + sizes[gone], 0
    return sorted(merges)


def _members(merges: Sequence[Merge], height: float) -> list[list[int]]:
    """Return the clusters after all merges up to the distance ``height``, each as a list of the members' indices."""
    cluster = list(range(len(merges) + 1))
    for at, one, other in merges:
        if at <= height:
            joined = cluster[one]
            cluster = [cluster[other] if each == joined else each for each in cluster]
    members: dict[int, list[int]] = {}
    for index, each in enumerate(cluster):
        members.setdefault(each, []).append(index)
    return list(members.values())


# Most areas whose order is found by dynamic programming over subsets.
MOST_EXACT = 9


def best_order(distance: Floats) -> tuple[int, ...]:
    """Return the order of areas whose largest distance between neighbours is smallest.

    Of several, the one with the smallest sum of distances is returned; of an order and its reverse, the one that starts
    with the lower index.

    Args:
        distance: Distance of every two areas, symmetric and not negative, in any unit, [areas, areas].
    """
    count = len(distance)
    if count <= MOST_EXACT:
        worst, _ = _best_path(distance, max)
        order = _best_path(np.where(distance <= worst, distance, np.inf), lambda a, b: a + b)[1]
    else:
        paths = (_two_opt(nearest_from(start, distance), distance) for start in range(count))
        order = min(paths, key=partial(path_cost, distance=distance))
    return order if order[0] <= order[-1] else order[::-1]


def path_cost(order: tuple[int, ...], distance: Floats) -> tuple[float, float]:
    """Return the largest distance between neighbours of an order, and the sum of these distances."""
    steps = [float(distance[a, b]) for a, b in pairwise(order)]
    return max(steps, default=0.0), sum(steps)


def _best_path(distance: Floats, join: Callable[[float, float], float]) -> tuple[float, tuple[int, ...]]:
    """Return the least cost of a path through all areas, and the path.

    ``join`` returns the cost of a path that is extended by one distance, from the path's cost and the distance.
    """
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


def nearest_from(start: int, distance: Floats) -> tuple[int, ...]:
    """Return the path of all areas from ``start`` on in which the next one is always the nearest that is left.

    Args:
        start: Index of the first area.
        distance: Distance of every two areas, in any unit, [areas, areas].
    """
    order, left = [start], set(range(len(distance))) - {start}
    while left:
        order.append(min(left, key=lambda each: (distance[order[-1], each], each)))
        left.remove(order[-1])
    return tuple(order)


def _two_opt(order: tuple[int, ...], distance: Floats) -> tuple[int, ...]:
    """Return the order after reversals of parts, repeated until none lowers its `path_cost` (2-opt)."""
    while True:
        turned = (
            (*order[:first], *order[first:end][::-1], *order[end:])
            for first in range(len(order))
            for end in range(first + 2, len(order) + 1)
        )
        better = next((each for each in turned if path_cost(each, distance) < path_cost(order, distance)), None)
        if better is None:
            return order
        order = better
