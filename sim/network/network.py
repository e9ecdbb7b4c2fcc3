"""The network of an epoch: exclusive lines, whose message times are computed directly, and shared connections."""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import simpy

from planner.scenario.scenario import Scenario
from sim.kernel.advance import CONSTANT, SHARED, TABLED, Lines
from sim.kernel.piecewise import RateTable, join_tables, link_table
from sim.network.connection import Connection, Message, SharedLink
from sim.network.routes import PathLatency, Route, find_routes, group_links, link_rates
from sim.network.shared_links import SharedLinks, first_come_rates, max_min_rates
from sim.network.single_link import FairLink, FifoLink


class Network:
    """All lines between communicating devices.

    Args:
        pairs: Ordered pairs of devices; True if the pair needs a `Connection` even if it shares no link.

    Attributes:
        lines: Lines in arrays; `sim.kernel.advance` transmits over those that are not `SHARED`.
        delivered: Departed messages that the epoch has not processed yet, in order of departure.
    """

    def __init__(
        self,
        environment: simpy.Environment,
        scenario: Scenario,
        pairs: Mapping[tuple[str, str], bool],
        connections: int,
    ) -> None:
        self.number = {pair: line for line, pair in enumerate(pairs)}
        self.routes = find_routes(list(pairs), scenario, connections)
        users = Counter(name for route in self.routes for name in route.link_names)
        exclusive = [
            not eventful and all(users[name] == 1 for name in route.link_names)
            for route, eventful in zip(self.routes, pairs.values(), strict=True)
        ]
        self.lines = _make_lines(self.routes, exclusive, scenario)
        self.delivered: deque[Message] = deque()
        shared = [line for line, mode in enumerate(self.lines.mode.tolist()) if mode == SHARED]
        links = _shared_links(environment, [self.routes[line] for line in shared], scenario)
        is_shared = frozenset(shared)
        self.connections: dict[int, Connection] = {}
        for line in shared:
            route = self.routes[line]
            # Acknowledgements wait where another connection sends the other way, over a link that is its whole path.
            other = self.number.get((route.target, route.source), -1)
            way_back = links[self.routes[other].link_names[0]] if other in is_shared else None
            self.connections[line] = Connection(
                environment,
                route,
                links[route.link_names[0]],
                scenario.effects.network,
                PathLatency(scenario.cluster.path(route.target, route.source)),
                way_back if isinstance(way_back, FifoLink) else None,
                self.delivered,
                line < other,
            )

    def connection(self, source: str, target: str) -> Connection:
        """Return the connection between two devices whose line is shared."""
        return self.connections[self.number[source, target]]


def _make_lines(routes: Sequence[Route], exclusive: Sequence[bool], scenario: Scenario) -> Lines:
    """Return the lines of some routes; ``exclusive`` says of each route whether it shares no link."""
    effects = scenario.effects.network
    tables: list[RateTable] = []
    modes, rate_numbers, latency_numbers = [], [], []
    for route, alone in zip(routes, exclusive, strict=True):
        rates = [link_rates(link, scenario) for link in route.binding]
        traced = [link.trace is not None for link in route.binding]
        changing = [table for table, follows in zip(rates, traced, strict=True) if follows or len(table.rates) > 1]
        rate_number = latency_number = -1
        # An eventful line needs SimPy events. A path without links, from a device to its own communication stream,
        # needs none.
        eventful = bool(route.path) and (not alone or effects.ready_notice or effects.cold_start)
        several = len(changing) > 1 or len(route.varying_links) > 1
        if eventful or several or (changing and route.size_curves):
            mode = SHARED
        else:
            mode = TABLED if changing else CONSTANT
            if changing:
                constant_bps = [table.rates[0] for table in rates if table is not changing[0]]
                ceiling_bps = min([route.connections * route.ceiling_bps, *constant_bps])
                rate_number = len(tables)
                tables.append(changing[0].clipped(1.0, ceiling_bps))
            if route.varying_links:
                latency_number = len(tables)
                tables.append(_path_latency(route))
        modes.append(mode)
        rate_numbers.append(rate_number)
        latency_numbers.append(latency_number)
    count = len(routes)
    return Lines(
        np.array(modes, np.int64),
        np.zeros(count),
        np.zeros(count),
        np.array(rate_numbers, np.int64),
        np.array(latency_numbers, np.int64),
        join_tables(tables),
    )


def _path_latency(route: Route) -> RateTable:
    """Return the latency of a path on which one link's latency follows its trace."""
    (varying,) = route.varying_links
    assert varying.trace is not None
    assert varying.trace.latency_s is not None
    others_s = sum(link.latency_s for link in route.path if link is not varying)
    return replace(link_table(varying.trace), rates=varying.trace.latency_s + others_s)


def _shared_links(environment: simpy.Environment, routes: Sequence[Route], scenario: Scenario) -> dict[str, SharedLink]:
    """Return the model of each shared link, by the link's name; links of one route share a model."""
    links = {link.name: link for route in routes for link in route.binding}
    number = {name: index for index, name in enumerate(links)}
    tables = join_tables([link_rates(link, scenario) for link in links.values()])
    shared: dict[str, SharedLink] = {}
    for names in group_links(routes):
        own = [route for route in routes if route.link_names[0] in names]
        # Large windows put whole messages into a link's queue. Packet losses keep windows small, so that the packets of
        # all senders alternate on a link.
        queues = scenario.effects.network.cold_start and not any(route.loses_packets for route in own)
        group: SharedLink
        if not _is_one_link(names, own):
            numbers = {name: number[name] for name in sorted(names)}
            group = SharedLinks(environment, tables, numbers, first_come_rates if queues else max_min_rates)
        else:
            group = (FifoLink if queues else FairLink)(environment, tables, number[next(iter(names))])
        shared |= dict.fromkeys(names, group)
    return shared


def _is_one_link(names: set[str], routes: Sequence[Route]) -> bool:
    """Return whether routes share only one link, with equal ceilings that do not depend on the message's size."""
    return (
        len(names) == 1
        and len({route.ceiling_bps for route in routes}) == 1
        and not any(route.size_curves for route in routes)
    )
