"""Routes of lines, and the links that limit the rate of each route.

A line is one direction between two devices. Times on exclusive links are computed directly; only shared links need
events. `planner.cost.link_sharing.binding_links` leaves out those that do not.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from planner.cost.link_sharing import binding_links
from planner.cost.network import connections_ceiling_bps
from planner.scenario.cluster import Link
from planner.scenario.faults import LinkOutage
from planner.scenario.scenario import Scenario
from planner.scenario.size_curve import SizeCurve
from sim.kernel.piecewise import RateTable, link_table


class PathLatency:
    """The latency of a path over time; the latest piece of its traces is remembered, since times are mostly near."""

    def __init__(self, path: Sequence[Link]) -> None:
        self._path = path
        self._varying = [link.trace for link in path if link.trace is not None and link.trace.latency_s is not None]
        # Since when and until when the latency that was looked up last holds, and the latency, seconds.
        self._known = (0.0, 0.0, 0.0)
        if not self._varying:
            self._known = -math.inf, math.inf, sum(link.latency_s for link in path)

    @property
    def is_none(self) -> bool:
        """Whether messages always arrive when they depart."""
        return not (self._varying or self._known[2])

    def at_s(self, time_s: float) -> float:
        """Return the latency at a time of the run, seconds."""
        since_s, until_s, latency_s = self._known
        if since_s <= time_s < until_s:
            return latency_s
        latency_s = sum(link.latency_at_s(time_s) for link in self._path)
        self._known = time_s, min(trace.rate_until(time_s)[1] for trace in self._varying), latency_s
        return latency_s


@dataclass(frozen=True)
class Route:
    """The path of one line.

    Attributes:
        path: All links from the source to the target.
        binding: Links of the path that can limit the line's rate.
        connections: Number of TCP connections.
        ceiling_bps: Highest rate on the wire of each connection, bits per second; infinite if neither the TCP window
            nor packet losses limit the rate.
    """

    source: str
    target: str
    path: tuple[Link, ...]
    binding: tuple[Link, ...]
    connections: int
    ceiling_bps: float

    @cached_property
    def link_names(self) -> tuple[str, ...]:
        """Names of the links that can limit the line's rate."""
        return tuple(link.name for link in self.binding)

    @cached_property
    def jitter_s(self) -> float:
        """Longest delay of a packet by jitter, seconds."""
        return sum(link.jitter_s for link in self.path)

    @cached_property
    def loses_packets(self) -> bool:
        """Whether packets are lost on any link of the path."""
        return any(link.loss for link in self.path)

    @cached_property
    def size_curves(self) -> tuple[SizeCurve, ...]:
        """Rates by message size of the path's links that have such a curve."""
        return tuple(link.size_curve for link in self.path if link.size_curve is not None)

    @cached_property
    def varying_links(self) -> tuple[Link, ...]:
        """Links of the path whose latency follows a trace."""
        return tuple(link for link in self.path if link.trace is not None and link.trace.latency_s is not None)

    def latency_at_s(self, time_s: float) -> float:
        """Return the latency of the path at a time of the run, seconds."""
        return self.latency.at_s(time_s)

    @cached_property
    def latency(self) -> PathLatency:
        """The latency of the path over time."""
        return PathLatency(self.path)


def link_rates(link: Link, scenario: Scenario) -> RateTable:
    """Return the rate of a link during the run, its outages included."""
    table = RateTable((0.0,), (link.bandwidth_bps,)) if link.trace is None else link_table(link.trace)
    if scenario.effects.network.share < 1:
        table = table.clipped(scenario.effects.network.share, math.inf)
    outages = [each for each in scenario.faults if isinstance(each, LinkOutage) and each.link == link.name]
    return table.without([(outage.start_s, outage.end_s) for outage in outages])


def find_routes(pairs: Sequence[tuple[str, str]], scenario: Scenario, connections: int) -> list[Route]:
    """Return the route of each ordered pair of devices that may communicate.

    Raises:
        InputError: No path connects a pair.
    """
    cluster = scenario.cluster
    paths = [cluster.path(source, target) for source, target in pairs]
    counts = [connections if cluster.crosses_regions(*pair) else 1 for pair in pairs]
    network = scenario.effects.network
    efficiency = network.payload_efficiency
    ceilings = [connections_ceiling_bps(scenario, source, target, 1) / efficiency for source, target in pairs]
    links = {link.name: link for path in paths for link in path}
    tables = {name: link_rates(link, scenario) for name, link in links.items()}
    # With `cold_start` the window changes with time, so that there is no constant ceiling of the rate.
    limits = [
        math.inf if network.cold_start else count * ceiling for count, ceiling in zip(counts, ceilings, strict=True)
    ]
    binding = binding_links(
        [[link.name for link in path] for path in paths],
        {name: float(np.min(table.rates)) for name, table in tables.items()},
        {name: float(np.max(table.rates)) for name, table in tables.items()},
        limits,
        [name for name, link in links.items() if link.size_curve is not None],
    )
    return [
        Route(source, target, path, tuple(links[name] for name in bound), count, ceiling)
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
