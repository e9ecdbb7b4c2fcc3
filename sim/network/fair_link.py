"""One link that many messages share equally: processor sharing in virtual time, whatever the link's rate does.

The virtual time counts the bits that each connection has been given since the start. A message that starts with b
bits at virtual time v departs at v + b, so that starts, ends and rates of others never touch it (the idea of fair
queueing: Demers, Keshav and Shenker, 1989). A change of the rate needs no event either: the next departure follows
from the integral of the rate.
"""

import heapq
import math
from collections.abc import Callable
from itertools import count

import simpy

from sim.kernel.piecewise import RateTables, moved, time_of
from sim.kernel.timer import Timer
from sim.network.flow import Flow


class FairLink:
    """Connections with the same ceiling on one link.

    Args:
        environment: The clock.
        tables: Rates in bits per second.
        table: The link's.
        settled: Called after departures.
    """

    def __init__(
        self, environment: simpy.Environment, tables: RateTables, table: int, settled: Callable[[], None]
    ) -> None:
        self._environment = environment
        self._tables = tables
        self._table = table
        self._settled = settled
        # Most links inside a region never change: their integral needs no table.
        pieces = int(tables.first[table + 1] - tables.first[table])
        self._steady_bps = float(tables.rate[tables.first[table]]) if pieces == 1 else None
        self._under_way: list[tuple[float, int, Flow]] = []
        self._numbers = count()
        self._weight = 0
        self._virtual_bits = 0.0
        self._updated_s = 0.0
        self._alarm: Timer | None = None
        # The virtual time of the departure that the alarm rings for, as long as nobody joins meanwhile.
        self._due_bits = 0.0

    def start(self, flow: Flow) -> None:
        """Let a message share the link from now on."""
        now_s = self._environment.now
        self._progress(now_s)
        # Who joins delays the others: an alarm set before rings too early, and is set again then.
        self._due_bits = 0.0
        bits = self._virtual_bits + flow.bits / flow.weight
        is_first = not self._under_way or bits < self._under_way[0][0]
        heapq.heappush(self._under_way, (bits, next(self._numbers), flow))
        self._weight += flow.weight
        if is_first:
            self._await_departure(now_s)

    def _progress(self, now_s: float) -> None:
        if self._weight and now_s > self._updated_s:
            ceiling_bps = self._under_way[0][2].ceiling_bps * self._weight
            if self._steady_bps is None:
                bits = moved(self._tables, self._table, self._updated_s, now_s, ceiling_bps)
            else:
                bits = min(self._steady_bps, ceiling_bps) * (now_s - self._updated_s)
            self._virtual_bits += bits / self._weight
        if now_s > self._updated_s:
            self._updated_s = now_s

    def _ring(self, alarm: Timer) -> None:
        """Let go what has departed, and wait for the next departure."""
        if alarm is not self._alarm:
            return
        self._alarm = None
        self._progress(alarm.time_s)
        # Rounding may leave a rest that an outage would then hold for long: the alarm knows better.
        self._virtual_bits = max(self._virtual_bits, self._due_bits)
        reached_bits = self._virtual_bits * (1 + 1e-14)
        under_way = self._under_way
        departed = []
        while under_way and under_way[0][0] <= reached_bits:
            flow = heapq.heappop(under_way)[2]
            self._weight -= flow.weight
            departed.append(flow)
        if under_way:
            self._await_departure(alarm.time_s)
        else:
            self._virtual_bits = 0.0
        for flow in departed:
            flow.departed(alarm.time_s)
        if departed:
            self._settled()

    def _await_departure(self, now_s: float) -> None:
        head_bits, _, head = self._under_way[0]
        rest = (head_bits - self._virtual_bits) * self._weight
        ceiling_bps = head.ceiling_bps * self._weight
        if self._steady_bps:
            departure_s = now_s + max(rest, 0.0) / min(self._steady_bps, ceiling_bps)
        else:
            departure_s = time_of(self._tables, self._table, rest, now_s, ceiling_bps)
        self._alarm = None
        if departure_s < math.inf:
            self._due_bits = head_bits
            self._alarm = Timer(self._environment, departure_s, self._ring)
