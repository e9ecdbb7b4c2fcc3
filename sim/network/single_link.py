"""One link that several flows share: equally (`FairLink`), or first in, first out (`FifoLink`)."""

import heapq
import math
from bisect import bisect_right
from collections import deque
from itertools import count

import simpy

from sim.kernel.events import Flow, Timer
from sim.kernel.piecewise import RateTables, moved, time_of

# Number of latest flows of which a queue knows when they were there. Acknowledgements are looked up soon after.
_REMEMBERED_FLOWS = 4096


class FairLink:
    """A link that connections with the same ceiling share equally; the link's rate may change.

    This is processor sharing in virtual time (the idea of fair queueing: Demers, Keshav and Shenker, 1989). The virtual
    time is the number of bits that each connection has been given since the start: a message of b bits that starts at
    virtual time v departs at v + b, whether or not other messages start or depart meanwhile. A change of the link's
    rate needs no event, since the next departure follows from the integral of the rate.
    """

    def __init__(self, environment: simpy.Environment, tables: RateTables, table: int) -> None:
        self._environment = environment
        self._tables = tables
        self._table = table
        # Most links inside a region have a constant rate, for which no table is needed.
        constant = tables.first[table + 1] - tables.first[table] == 1
        self._constant_bps = float(tables.rate[tables.first[table]]) if constant else None
        # (virtual time of the departure, order of arrival, flow), a heap.
        self._flows: list[tuple[float, int, Flow]] = []
        self._numbers = count()
        self._weight = 0
        self._virtual_bits = 0.0
        self._updated_s = 0.0
        self._timer: Timer | None = None
        # Virtual time of the departure for which the timer is set; 0 after another flow has started.
        self._due_bits = 0.0

    def start(self, flow: Flow) -> None:
        """Add a flow to the link."""
        now_s = self._environment.now
        self._progress(now_s)
        # A new flow delays the present ones: the present timer expires before the next departure, and is set again.
        self._due_bits = 0.0
        bits = self._virtual_bits + flow.bits / flow.weight
        is_first = not self._flows or bits < self._flows[0][0]
        heapq.heappush(self._flows, (bits, next(self._numbers), flow))
        self._weight += flow.weight
        if is_first:
            self._await_departure(now_s)

    def _progress(self, now_s: float) -> None:
        """Advance the virtual time to now."""
        if self._weight and now_s > self._updated_s:
            ceiling_bps = self._flows[0][2].ceiling_bps * self._weight
            if self._constant_bps is None:
                bits = moved(self._tables, self._table, self._updated_s, now_s, ceiling_bps)
            else:
                bits = min(self._constant_bps, ceiling_bps) * (now_s - self._updated_s)
            self._virtual_bits += bits / self._weight
        if now_s > self._updated_s:
            self._updated_s = now_s

    def _expire(self, timer: Timer) -> None:
        """End the flows whose virtual departure time is reached, and set a timer for the next departure."""
        if timer is not self._timer:
            return
        self._timer = None
        self._progress(timer.time_s)
        # Rounding may leave a remainder of the departing flow, which an outage could delay; the timer was set for its
        # departure.
        self._virtual_bits = max(self._virtual_bits, self._due_bits)
        reached_bits = self._virtual_bits * (1 + 1e-14)
        flows = self._flows
        departed = []
        while flows and flows[0][0] <= reached_bits:
            flow = heapq.heappop(flows)[2]
            self._weight -= flow.weight
            departed.append(flow)
        if flows:
            self._await_departure(timer.time_s)
        else:
            self._virtual_bits = 0.0
        for flow in departed:
            flow.depart(timer.time_s)

    def _await_departure(self, now_s: float) -> None:
        head_bits, _, head = self._flows[0]
        rest = (head_bits - self._virtual_bits) * self._weight
        ceiling_bps = head.ceiling_bps * self._weight
        if self._constant_bps:
            departure_s = now_s + max(rest, 0.0) / min(self._constant_bps, ceiling_bps)
        else:
            departure_s = time_of(self._tables, self._table, rest, now_s, ceiling_bps)
        self._timer = None
        if departure_s < math.inf:
            self._due_bits = head_bits
            self._timer = Timer(self._environment, departure_s, self._expire)


class FifoLink:
    """A link with a queue of whole flows: first in, first out.

    A TCP window of bytes leaves its sender at once and waits in the buffer before the link. Later flows do not delay
    these bytes; on a `FairLink` they would.
    """

    def __init__(self, environment: simpy.Environment, tables: RateTables, table: int) -> None:
        self._environment = environment
        self._tables = tables
        self._table = table
        self._queue: deque[tuple[Flow, float]] = deque()
        # Of the latest flows: when each joined the queue, and when its last bit leaves it, seconds.
        self._joined_s: list[float] = []
        self._leaves_s: list[float] = []

    def leaves_s(self, joined_s: float) -> float:
        """Return when a packet leaves the queue that joined it at ``joined_s``, seconds.

        Flows that join later than now are unknown. A packet does not wait for flows that never leave.
        """
        before = bisect_right(self._joined_s, joined_s)
        leaves_s = self._leaves_s[before - 1] if before else 0.0
        return max(joined_s, leaves_s) if leaves_s < math.inf else joined_s

    def passed_s(self, left_s: float) -> float:
        """Return until when packets joined the queue that had left it by ``left_s``, seconds."""
        following = bisect_right(self._leaves_s, left_s)
        return min(left_s, self._joined_s[following]) if following < len(self._joined_s) else left_s

    def start(self, flow: Flow) -> tuple[float, float]:
        """Put a flow into the queue; return when its first and its last bit leave the queue, seconds."""
        now_s = self._environment.now
        start_s = max(now_s, self._leaves_s[-1]) if self._queue else now_s
        # A flow that never departs blocks all later flows; the run then stalls.
        leaves_s = math.inf
        if start_s < math.inf:
            leaves_s = time_of(self._tables, self._table, flow.bits, start_s, flow.ceiling_bps * flow.weight)
        if len(self._joined_s) == _REMEMBERED_FLOWS:
            del self._joined_s[: _REMEMBERED_FLOWS // 2], self._leaves_s[: _REMEMBERED_FLOWS // 2]
        self._joined_s.append(now_s)
        self._leaves_s.append(leaves_s)
        self._queue.append((flow, leaves_s))
        if len(self._queue) == 1:
            self._await_departure()
        return start_s, leaves_s

    def _await_departure(self) -> None:
        _, leaves_s = self._queue[0]
        if leaves_s < math.inf:
            Timer(self._environment, leaves_s, self._expire)

    def _expire(self, timer: Timer) -> None:
        flow, _ = self._queue.popleft()
        if self._queue:
            self._await_departure()
        flow.depart(timer.time_s)
