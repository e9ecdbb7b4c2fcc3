"""One link before which whole messages queue: first come, first served.

What a window lets through leaves its sender at once, and waits in the buffer before the link, behind what came earlier:
a message that comes meanwhile does not delay it, as it would where both shared the link.
"""

import math
from collections import deque
from collections.abc import Callable

import simpy

from sim.kernel.piecewise import RateTables, time_of
from sim.kernel.timer import Timer
from sim.network.flow import Flow


class QueuedLink:
    """A link and the queue before it.

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
        self._queue: deque[Flow] = deque()

    def start(self, flow: Flow) -> None:
        """Let a message queue from now on."""
        self._queue.append(flow)
        if len(self._queue) == 1:
            self._serve(self._environment.now)

    def _serve(self, now_s: float) -> None:
        flow = self._queue[0]
        ceiling_bps = flow.ceiling_bps * flow.weight
        departure_s = time_of(self._tables, self._table, flow.bits, now_s, ceiling_bps)
        # A link that never carries it holds up all behind it, and the run ends with that.
        if departure_s < math.inf:
            Timer(self._environment, departure_s, self._ring)

    def _ring(self, alarm: Timer) -> None:
        flow = self._queue.popleft()
        if self._queue:
            self._serve(alarm.time_s)
        flow.departed(alarm.time_s)
        self._settled()
