"""Links that messages share along paths of several links, integrated exactly.

Between two moments at which a message starts, one departs or a link's rate changes, all rates are constant; the
links wake at these moments only.
"""

from collections.abc import Callable, Mapping, Sequence

import simpy

from planner.scenario.cluster import LONGEST_OUTAGE_S
from sim.kernel.piecewise import RateTables, holding
from sim.kernel.timer import Timer
from sim.network.flow import Flow
from traces.common.errors import RunError


class SharedLinks:
    """Links that some paths have in common.

    Args:
        environment: The clock.
        tables: Rates in bits per second.
        table: Of each link, by name.
        rates: Says who gets what: the flows by when they came, and the rate of each link, in bits per second.
        settled: Called after departures.
    """

    def __init__(
        self,
        environment: simpy.Environment,
        tables: RateTables,
        table: Mapping[str, int],
        rates: Callable[[Sequence[Flow], Mapping[str, float]], list[float]],
        settled: Callable[[], None],
    ) -> None:
        self._environment = environment
        self._tables = tables
        self._table = table
        self._shares_of = rates
        self._settled = settled
        self._flows: list[Flow] = []
        self._rates: list[float] = []
        self._ends_s: list[float] = []
        self._updated_s = 0.0
        self._alarm: Timer | None = None
        self._moved_s = 0.0

    def start(self, flow: Flow) -> None:
        """Let a message share its links from now on."""
        now_s = self._environment.now
        self._progress(now_s)
        if not self._flows:
            self._moved_s = now_s
        self._flows.append(flow)
        self._rates.append(0.0)
        self._ends_s.append(float("inf"))
        if self._alarm is None or self._alarm.time_s > now_s:
            self._alarm = Timer(self._environment, now_s, self._settle)

    def _progress(self, now_s: float) -> None:
        elapsed_s = now_s - self._updated_s
        if elapsed_s > 0:
            for flow, rate_bps in zip(self._flows, self._rates, strict=True):
                flow.bits -= rate_bps * elapsed_s
            self._updated_s = now_s

    def _settle(self, alarm: Timer) -> None:
        """Let go what has departed, share the links among the others, and wait for the next change."""
        if alarm is not self._alarm:
            return
        self._alarm = None
        now_s = alarm.time_s
        self._progress(now_s)
        departed: list[Flow] = []
        staying: list[Flow] = []
        for flow, end_s in zip(self._flows, self._ends_s, strict=True):
            (departed if end_s <= now_s or flow.bits <= 0 else staying).append(flow)
        self._flows = staying
        self._share(now_s)
        for flow in departed:
            flow.departed(now_s)
        if departed:
            self._settled()

    def _share(self, now_s: float) -> None:
        if not self._flows:
            self._rates, self._ends_s = [], []
            return
        names = dict.fromkeys(name for flow in self._flows for name in flow.links)
        held = {name: holding(self._tables, self._table[name], now_s) for name in names}
        self._rates = self._shares_of(self._flows, {name: rate_bps for name, (rate_bps, _) in held.items()})
        self._ends_s = [
            now_s + flow.bits / rate_bps if rate_bps > 0 else float("inf")
            for flow, rate_bps in zip(self._flows, self._rates, strict=True)
        ]
        if any(self._rates):
            self._moved_s = now_s
        elif now_s - self._moved_s > LONGEST_OUTAGE_S:
            raise RunError(
                f"no link has carried anything for {LONGEST_OUTAGE_S:g} s at {now_s:.3f} s of the run, and bytes wait "
                f"for {', '.join(sorted(names))}: do their traces ever rise above zero, at the same time?"
            )
        next_s = min([*self._ends_s, *(change_s for _, change_s in held.values())])
        if next_s < float("inf"):
            self._alarm = Timer(self._environment, next_s, self._settle)
