"""Rates of flows that start together and share links.

All pairs of replicas of two stages that have samples in common send at the same time, and so do all members of a ring.
Pairs whose paths have a link in common (a region's LAN, the WAN between two regions) share the rate of this link.
`planner.step.evaluate` gives each pair its own channel; the paths of this module reduce a channel's rate to its share.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planner.cost.network import ConstantRatePath, Paths, nominal_path, payload_bps
from planner.plan.plan import Plan, Stage
from planner.scenario.scenario import Scenario

Floats = NDArray[np.float64]
Pair = tuple[str, str]


def boundary_samples(senders: Stage, receivers: Stage, samples: int) -> dict[Pair, int]:
    """Return how many of a microbatch's ``samples`` each pair (sending device, receiving device) transfers."""
    common = {}
    own, other = senders.intervals(samples), receivers.intervals(samples)
    sender = receiver = 0
    while sender < len(own) and receiver < len(other):
        (start, stop), (other_start, other_stop) = own[sender], other[receiver]
        count = min(stop, other_stop) - max(start, other_start)
        ends = senders.replicas[sender].device, receivers.replicas[receiver].device
        if count > 0 and ends[0] != ends[1]:
            common[ends] = count
        # Intervals follow one another, so that the one that ends first has no more in common with later ones.
        if stop <= other_stop:
            sender += 1
        else:
            receiver += 1
    return common


def boundary_flows(senders: Stage, receivers: Stage, samples: int) -> dict[Pair, float]:
    """Return the share of a microbatch of ``samples`` that each pair (sending device, receiving device) transfers."""
    return {pair: count / samples for pair, count in boundary_samples(senders, receivers, samples).items()}


def ring_flows(devices: Sequence[str]) -> dict[Pair, float]:
    """Return the ratio of the bytes sent from each device of a ring all-reduce to the next, to the gradients' bytes."""
    count = len(devices)
    if count < 2:
        return {}
    return dict.fromkeys(pairwise((*devices, devices[0])), 2 * (count - 1) / count)


def transfer_times_s(flows: dict[Pair, float], sizes_bytes: Floats, scenario: Scenario) -> Floats:
    """Return how long the busiest link or pair is busy if all flows start at once, seconds.

    ``flows`` is the share of a size that each pair (sending device, receiving device) transfers. The result has a time
    for each entry of ``sizes_bytes``, an array of any shape, and the same shape.
    """
    load_s: defaultdict[str, float] = defaultdict(float)
    for pair, share in flows.items():
        for link in scenario.cluster.path(*pair):
            load_s[link.name] += 8 * share / payload_bps(scenario.effects.network, link.bandwidth_bps)
    times_s = max(load_s.values(), default=0.0) * sizes_bytes
    for path, share in {(nominal_path(scenario, *pair), share) for pair, share in flows.items()}:
        if path.curves:
            sizes, which = np.unique(sizes_bytes, return_inverse=True)
            alone_s = np.array([path.transmission_s(share * size) for size in sizes.tolist()])[which]
            times_s = np.maximum(times_s, alone_s.reshape(sizes_bytes.shape))
        else:
            times_s = np.maximum(times_s, path.transmission_s(share) * sizes_bytes)
    return times_s


def binding_links(
    paths: Sequence[Sequence[str]],
    least_bps: Mapping[str, float],
    most_bps: Mapping[str, float],
    ceilings_bps: Sequence[float],
    kept: Collection[str] = (),
) -> list[list[str]]:
    """Return, for each line, the links of its path that can limit its rate.

    A link that its lines together can never fill does not limit them, for example the network interface of a host whose
    traffic all passes a slow wide-area link.

    Args:
        paths: Names of the links of each line.
        least_bps: Least rate of each link over time, bits per second.
        most_bps: Largest rate of each link over time, bits per second.
        ceilings_bps: Limit on each line's rate beside its links, bits per second; infinite for none.
        kept: Names of links that limit their lines for other reasons.
    """
    users: dict[str, list[int]] = {}
    for line, path in enumerate(paths):
        for name in path:
            users.setdefault(name, []).append(line)
    binding = [list(path) for path in paths]
    for name, lines in users.items():
        demand_bps = 0.0
        for line in lines:
            elsewhere = [most_bps[other] for other in binding[line] if other != name]
            demand_bps += min([*elsewhere, ceilings_bps[line]]) if elsewhere else math.inf
        if demand_bps <= least_bps[name] and name not in kept:
            for line in lines:
                binding[line] = [other for other in binding[line] if other != name]
    return binding


def sharers(plan: Plan, scenario: Scenario) -> dict[Pair, int]:
    """Return, for each pair of devices, the number of pairs that send at once over the most shared link of its path."""
    found: dict[Pair, int] = {}
    for pairs in _simultaneous_pairs(plan):
        users = Counter(link.name for pair in pairs for link in scenario.cluster.path(*pair))
        for pair in pairs:
            links = scenario.cluster.path(*pair)
            found[pair] = max([found.get(pair, 1), *(users[link.name] for link in links)])
    return found


def shared_paths(plan: Plan, scenario: Scenario) -> Paths:
    """Return the paths of a plan at declared bandwidths, divided evenly among the pairs that share a link."""
    return slowed_paths(plan, scenario, sharers(plan, scenario))


def slowed_paths(plan: Plan, scenario: Scenario, factors: Mapping[Pair, float]) -> Paths:
    """Return the paths of a plan at declared bandwidths, divided by the pair's entry of ``factors`` (default 1)."""

    def path(source: str, target: str) -> ConstantRatePath:
        alone = nominal_path(scenario, source, target, plan.connections)
        return replace(alone, rate_bps=alone.rate_bps / factors.get((source, target), 1))

    return path


def _simultaneous_pairs(plan: Plan) -> Iterator[Iterable[Pair]]:
    """Yield sets of pairs that send at the same time: one per boundary and direction, and one per ring."""
    for pipeline in plan.pipelines:
        samples = max(pipeline.microbatches)
        for left, right in pairwise(pipeline.stages):
            yield boundary_flows(left, right, samples)
            yield boundary_flows(right, left, samples)
        for stage in pipeline.stages:
            yield ring_flows([replica.device for replica in stage.replicas])
