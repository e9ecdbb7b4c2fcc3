"""An order of a cluster's devices that depends neither on their names nor on the order in which they are listed.

A search that takes devices in a given order, and the first of equally good plans, returns other plans for other orders.
Here devices get colours, which say what a device is and what its links lead to, by colour refinement (Weisfeiler and
Leman, 1968): regions, hosts and devices are nodes, and a node's next colour is its colour with those of its neighbours.
Devices are sorted by the colours of their regions, hosts and of themselves. Devices of equal colours keep the order of
listing; nearly always they are interchangeable.
"""

from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from planner.scenario.cluster import Cluster, Device, Link
from planner.scenario.scenario import Scenario

# Most rounds of the refinement; each round carries the colour of a node one link further.
_MOST_ROUNDS = 8

# Numbers of samples of the microbatches whose times tell device kinds apart.
_SAMPLES = (1, 4)


@lru_cache(maxsize=16)
def canonical(scenario: Scenario) -> Scenario:
    """Return the scenario with devices in the canonical order; the scenario itself if they are in this order."""
    devices = scenario.cluster.devices
    colours = _colours(scenario)
    regions, hosts = (
        {name: number for number, name in enumerate(dict.fromkeys(names))}
        for names in ([device.region for device in devices], [device.machine for device in devices])
    )

    def key(device: Device) -> tuple[int, ...]:
        region, host = ("region", device.region), ("host", device.machine)
        own = colours["device", device.name]
        return colours[region], regions[device.region], colours[host], hosts[device.machine], own

    ordered = tuple(sorted(devices, key=key))
    return scenario if ordered == devices else replace(scenario, cluster=Cluster(ordered, scenario.cluster.links))


# A region, host or device: what it is, and its name.
_Node = tuple[str, str]


def _colours(scenario: Scenario) -> dict[_Node, int]:
    """Return the colour of each region, host and device, a number that does not depend on names."""
    cluster = scenario.cluster
    neighbours: defaultdict[_Node, list[tuple[Hashable, _Node]]] = defaultdict(list)
    nodes: dict[str, _Node] = {}
    start: dict[_Node, Any] = {}
    slower = {each.device: each.factor for each in scenario.effects.compute.stragglers}
    for device in cluster.devices:
        region, host, own = ("region", device.region), ("host", device.machine), ("device", device.name)
        nodes |= {device.region: region, device.machine: host, device.name: own}
        start |= {region: (scenario.data.get(device.region, -1),), host: (device.interface_bps,)}
        start[own] = (*_attributes(device, scenario), slower.get(device.name, 1.0))
        for inner, outer in ((own, host), (host, region)):
            neighbours[inner].append((("in",), outer))
            neighbours[outer].append((("of",), inner))
    for link in cluster.links:
        ends = nodes[link.source], nodes[link.target]
        neighbours[ends[0]].append((("to", *_rates(link)), ends[1]))
        neighbours[ends[1]].append((("from", *_rates(link)), ends[0]))
    colours = _ranked(start)
    for _ in range(_MOST_ROUNDS):
        refined = _ranked(
            {
                node: (colours[node], tuple(sorted((how, colours[other]) for how, other in neighbours[node])))
                for node in colours
            }
        )
        if len(set(refined.values())) == len(set(colours.values())):
            break
        colours = refined
    return colours


def _ranked(values: Mapping[_Node, Any]) -> dict[_Node, int]:
    """Return the rank of each node's value among the different values of nodes of the same sort."""
    ranks = {value: rank for rank, value in enumerate(sorted({(node[0], value) for node, value in values.items()}))}
    return {node: ranks[node[0], value] for node, value in values.items()}


def _attributes(device: Device, scenario: Scenario) -> tuple[float, ...]:
    layers = len(scenario.model.layers)
    times_s = (scenario.model.times(0, layers, device.kind, samples).total_s for samples in _SAMPLES)
    return (*times_s, device.memory_bytes, device.price_per_hour, device.interface_bps)


def _rates(link: Link) -> tuple[float, ...]:
    return link.bandwidth_bps, link.latency_s, link.jitter_s, link.loss, link.price_per_gb
