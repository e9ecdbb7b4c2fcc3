"""Which lines have their links for themselves, and which share them.

A line is one direction between two devices. What passes over links that no other line takes follows from
arithmetic; only shared links need events. A link that can never fill, whatever the lines over it carry, binds nobody
and is left out: the network interface of a host behind a slow wide-area link.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from planner.cost.network import connections_ceiling_bps
from planner.scenario.cluster import Link
from planner.scenario.faults import LinkOutage
from planner.scenario.scenario import Scenario
from sim.kernel.piecewise import RateTable, link_table


@dataclass(frozen=True, slots=True)
class Route:
    """The way of one line.

    Attributes:
        source: Sending device.
        target: Receiving device.
        path: All links that it takes.
        binding: Those of them that can bind it.
        connections: TCP connections.
        ceiling_bps: Bits on the wire per second and connection; infinite if neither windows nor losses bind.
    """

    source: str
    target: str
    path: tuple[Link, ...]
    binding: tuple[Link, ...]
    connections: int
    ceiling_bps: float


def link_rates(link: Link, scenario: Scenario) -> RateTable:
    """Return the rate of a link during the run, its outages included."""
    table = RateTable((0.0,), (link.bandwidth_bps,)) if link.trace is None else link_table(link.trace)
    if scenario.effects.network.share < 1:
        table = table.clipped(scenario.effects.network.share, math.inf)
    for fault in scenario.faults:
        if isinstance(fault, LinkOutage) and fault.link == link.name:
            table = table.without(fault.start_s, fault.end_s)
    return table


def find_routes(pairs: Sequence[tuple[str, str]], scenario: Scenario, connections: int) -> list[Route]:
    """Return the route of each ordered pair of devices that may talk.

    Raises:
        InputError: No link leads there.
    """
    cluster = scenario.cluster
    paths = [cluster.path(source, target) for source, target in pairs]
    counts = [connections if cluster.crosses_regions(*pair) else 1 for pair in pairs]
    network = scenario.effects.network
    efficiency = network.payload_efficiency
    ceilings = [connections_ceiling_bps(scenario, source, target, 1) / efficiency for source, target in pairs]
    links = {link.name: link for path in paths for link in path}
    tables = {name: link_rates(link, scenario) for name, link in links.items()}
    users: dict[str, list[int]] = {name: [] for name in links}
    for line, path in enumerate(paths):
        for link in path:
            users[link.name].append(line)
    binding = [list(path) for path in paths]
    for name, lines in users.items():
        demand_bps = 0.0
        for line in lines:
            elsewhere = [max(tables[link.name].rates) for link in binding[line] if link.name != name]
            # Where windows open and close, what is left of them goes at any rate.
            ceiling_bps = math.inf if network.cold_start else counts[line] * ceilings[line]
            demand_bps += min([*elsewhere, ceiling_bps], default=math.inf) if elsewhere else math.inf
        if demand_bps <= min(tables[name].rates) and links[name].size_curve is None:
            for line in lines:
                binding[line] = [link for link in binding[line] if link.name != name]
    return [
        Route(source, target, path, tuple(bound), count, ceiling)
        for (source, target), path, bound, count, ceiling in zip(pairs, paths, binding, counts, ceilings, strict=True)
    ]


def group_links(routes: Sequence[Route]) -> list[set[str]]:
    """Return the sets of links that the routes connect: two links of one route are in the same set."""
    group: dict[str, set[str]] = {}
    for route in routes:
        names = {link.name for link in route.binding}
        joined = set.union(names, *(group[name] for name in names if name in group))
        for name in joined:
            group[name] = joined
    return list({id(each): each for each in group.values()}.values())
