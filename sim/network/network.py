"""The network of a run: lines that need no events, and links that are shared."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import simpy

from planner.scenario.cluster import Link
from planner.scenario.scenario import Scenario
from sim.kernel.advance import CONSTANT, SHARED, TABLED, Lines
from sim.kernel.piecewise import RateTable, join_tables, latency_table
from sim.network.connection import Connection, Message, SharedLink
from sim.network.fair_link import FairLink
from sim.network.fifo_link import QueuedLink
from sim.network.flow import first_come_rates, max_min_rates
from sim.network.routes import Route, find_routes, group_links, link_rates
from sim.network.shared_links import SharedLinks


class Network:
    """All lines between devices that may talk; `lines` carries what nobody shares, `send` the rest.

    Args:
        environment: The clock.
        scenario: Gives links, outages and what TCP makes of them.
        pairs: Ordered pairs of devices that may talk, and whether what they send needs events even where nobody
            shares their links; a line is the place of its pair.
        connections: TCP connections between devices of different regions.
        deliver: Called with each parcel that has departed, and the times of its departure and arrival.
        settled: Called when all that depart at one time have.
    """

    def __init__(
        self,
        environment: simpy.Environment,
        scenario: Scenario,
        pairs: Mapping[tuple[str, str], bool],
        connections: int,
        deliver: Callable[[Message, float, float], None],
        settled: Callable[[], None],
    ) -> None:
        self._environment = environment
        self._scenario = scenario
        self._deliver = deliver
        self.number = {pair: line for line, pair in enumerate(pairs)}
        self.routes = find_routes(list(pairs), scenario, connections)
        users: dict[str, int] = {}
        for route in self.routes:
            for link in route.binding:
                users[link.name] = users.get(link.name, 0) + 1
        exclusive = [
            not eventful and all(users[link.name] == 1 for link in route.binding)
            for route, eventful in zip(self.routes, pairs.values(), strict=True)
        ]
        self.lines = _exclusive_lines(self.routes, exclusive, scenario)
        shared = [route for route, mode in zip(self.routes, self.lines.mode, strict=True) if mode == SHARED]
        self._groups = _share_groups(environment, shared, scenario, settled)
        self._connections: dict[int, Connection] = {}

    def send(self, line: int, parcel: Message) -> None:
        """Hand a parcel over to a shared line."""
        connection = self._connections.get(line)
        if connection is None:
            connection = self._connections[line] = self._connect(self.routes[line])
        connection.send(parcel)

    def _connect(self, route: Route) -> Connection:
        group = self._groups[route.binding[0].name]
        back_s = sum(link.latency_s for link in self._scenario.cluster.path(route.target, route.source))
        effects = self._scenario.effects.network
        return Connection(self._environment, route, group, effects, back_s, self._deliver)


def _exclusive_lines(routes: Sequence[Route], exclusive: Sequence[bool], scenario: Scenario) -> Lines:
    effects = scenario.effects.network
    tables: list[RateTable] = []
    modes, rate_numbers, latency_numbers = [], [], []
    for route, alone in zip(routes, exclusive, strict=True):
        rates = [link_rates(link, scenario) for link in route.binding]
        traced = [link.trace is not None for link in route.binding]
        changing = [table for table, follows in zip(rates, traced, strict=True) if follows or len(table.rates) > 1]
        swaying = [link for link in route.path if link.trace is not None and link.trace.latency_s is not None]
        curved = any(link.size_curve is not None for link in route.path)
        rate_number = latency_number = -1
        # A device and its lane are one.
        events = bool(route.path) and (not alone or effects.ready_notice or effects.cold_start)
        if events or len(changing) > 1 or len(swaying) > 1 or (changing and curved):
            mode = SHARED
        else:
            mode = TABLED if changing else CONSTANT
            if changing:
                steady_bps = [table.rates[0] for table in rates if table is not changing[0]]
                ceiling_bps = min([route.connections * route.ceiling_bps, *steady_bps])
                rate_number = len(tables)
                tables.append(changing[0].clipped(1.0, ceiling_bps))
            if swaying:
                latency_number = len(tables)
                tables.append(_path_latency(route.path, swaying[0]))
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


def _path_latency(path: Sequence[Link], swaying: Link) -> RateTable:
    """The latency of a path on which one link's latency follows its trace."""
    assert swaying.trace is not None
    others_s = sum(link.latency_s for link in path if link is not swaying)
    table = latency_table(swaying.trace)
    return RateTable(table.times_s, [rate + others_s for rate in table.rates], table.duration_s, table.repeat_from_s)


def _share_groups(
    environment: simpy.Environment, routes: Sequence[Route], scenario: Scenario, settled: Callable[[], None]
) -> dict[str, SharedLink]:
    """What carries the messages over each shared link, by the link's name."""
    links = {link.name: link for route in routes for link in route.binding}
    number = {name: index for index, name in enumerate(links)}
    tables = join_tables([link_rates(link, scenario) for link in links.values()])
    groups: dict[str, SharedLink] = {}
    for names in group_links(routes):
        own = [route for route in routes if route.binding[0].name in names]
        queue = _queue(scenario, own)
        group: SharedLink
        if not _is_one_link(names, own):
            numbers = {name: number[name] for name in sorted(names)}
            rates = first_come_rates if queue else max_min_rates
            group = SharedLinks(environment, tables, numbers, rates, settled)
        elif queue:
            group = QueuedLink(environment, tables, number[next(iter(names))], settled)
        else:
            group = FairLink(environment, tables, number[next(iter(names))], settled)
        groups |= dict.fromkeys(names, group)
    return groups


def _is_one_link(names: set[str], routes: Sequence[Route]) -> bool:
    same_ceiling = len({route.ceiling_bps for route in routes}) == 1
    curved = any(link.size_curve is not None for route in routes for link in route.path)
    return len(names) == 1 and same_ceiling and not curved


def _queue(scenario: Scenario, routes: Sequence[Route]) -> bool:
    """Whether messages queue before links as a whole, since the windows of their senders are open.

    Where packets are lost windows are small: what is on a link is on its way from everybody at the same time.
    """
    return scenario.effects.network.cold_start and not any(link.loss for route in routes for link in route.path)
