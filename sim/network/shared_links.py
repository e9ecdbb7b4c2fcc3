"""Links that messages share along paths of several links, integrated exactly.

All rates are constant between two events; an event is the start or departure of a flow, or a change of a link's rate.
New rates are computed at events only.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import simpy

from planner.scenario.cluster import LONGEST_OUTAGE_S
from sim.kernel.events import Flow, Timer
from sim.kernel.piecewise import RateTables, holding
from traces.common.errors import RunError


def max_min_rates(flows: Sequence[Flow], capacity_bps: Mapping[str, float]) -> list[float]:
    """Return the max-min fair rate of each flow in bits per second, over all its connections.

    Each flow uses at least one link, by ``weight`` connections of at most ``ceiling_bps`` each. ``capacity_bps`` is the
    rate of each link that a flow uses.
    """
    rates = [0.0] * len(flows)
    remaining_bps = dict(capacity_bps)
    users: dict[str, int] = dict.fromkeys(remaining_bps, 0)
    for flow in flows:
        for link in flow.links:
            users[link] += flow.weight
    growing = list(range(len(flows)))
    level = 0.0
    while growing:
        room = min(remaining_bps[link] / count for link, count in users.items() if count)
        reached = min(flows[index].ceiling_bps for index in growing)
        step = min(room, reached - level)
        level += step
        full = set()
        for link, count in users.items():
            if count:
                share = remaining_bps[link] / count
                remaining_bps[link] = max(0.0, remaining_bps[link] - step * count)
                if share <= step:
                    full.add(link)
        still = []
        for index in growing:
            flow = flows[index]
            rates[index] = level * flow.weight
            if flow.ceiling_bps > level and full.isdisjoint(flow.links):
                still.append(index)
            else:
                for link in flow.links:
                    users[link] -= flow.weight
        growing = still
    return rates


def first_come_rates(flows: Sequence[Flow], capacity_bps: Mapping[str, float]) -> list[float]:
    """Return the rate of each flow in bits per second on links that serve flows first come, first served.

    Flows are in the order of their starts, and each gets the rate that the earlier flows leave. A flow that waits for
    one of its links does not delay other flows on the other links of its path. ``capacity_bps`` is the rate of each
    link that a flow uses.
    """
    remaining_bps = dict(capacity_bps)
    rates = []
    for flow in flows:
        rate_bps = min([flow.ceiling_bps * flow.weight, *(remaining_bps[link] for link in flow.links)])
        for link in flow.links:
            remaining_bps[link] -= rate_bps
        rates.append(rate_bps)
    return rates


@dataclass(eq=False)
class SharedLinks:
    """Links that some paths have in common.

    Args:
        tables: Rates of links in bits per second.
        share: Returns the rate of each flow, bits per second, from the flows in order of their starts and the rate of
            each link in bits per second.
    """

    _environment: simpy.Environment
    _tables: RateTables
    _table: Mapping[str, int]
    _share: Callable[[Sequence[Flow], Mapping[str, float]], list[float]]

    def __post_init__(self) -> None:
        self._flows: list[Flow] = []
        self._rates: list[float] = []
        self._ends_s: list[float] = []
        self._updated_s = 0.0
        self._timer: Timer | None = None
        self._moved_s = 0.0

    def start(self, flow: Flow) -> None:
        """Add a flow to its links."""
        now_s = self._environment.now
        self._progress(now_s)
        if not self._flows:
            self._moved_s = now_s
        self._flows.append(flow)
        self._rates.append(0.0)
        self._ends_s.append(math.inf)
        if self._timer is None or self._timer.time_s > now_s:
            self._timer = Timer(self._environment, now_s, self._expire)

    def _progress(self, now_s: float) -> None:
        """Subtract the bits that have departed since the last change."""
        elapsed_s = now_s - self._updated_s
        if elapsed_s > 0:
            for flow, rate_bps in zip(self._flows, self._rates, strict=True):
                flow.bits -= rate_bps * elapsed_s
            self._updated_s = now_s

    def _expire(self, timer: Timer) -> None:
        """End the flows without remaining bits, share the links among the other flows, and set the next timer."""
        if timer is not self._timer:
            return
        self._timer = None
        now_s = timer.time_s
        self._progress(now_s)
        departed: list[Flow] = []
        staying: list[Flow] = []
        for flow, end_s in zip(self._flows, self._ends_s, strict=True):
            (departed if end_s <= now_s or flow.bits <= 0 else staying).append(flow)
        self._flows = staying
        self._await_change(now_s)
        for flow in departed:
            flow.depart(now_s)

    def _await_change(self, now_s: float) -> None:
        """Set the rates that hold from now on, and a timer for the next departure or change of a link's rate.

        Raises:
            RunError: No link has carried anything for longer than the longest outage.
        """
        if not self._flows:
            self._rates, self._ends_s = [], []
            return
        names = dict.fromkeys(name for flow in self._flows for name in flow.links)
        # SimPy's clock begins at an integer, for which numba would compile the function once more.
        capacity = {name: holding(self._tables, self._table[name], float(now_s)) for name in names}
        self._rates = self._share(self._flows, {name: rate_bps for name, (rate_bps, _) in capacity.items()})
        self._ends_s = [
            now_s + flow.bits / rate_bps if rate_bps > 0 else math.inf
            for flow, rate_bps in zip(self._flows, self._rates, strict=True)
        ]
        if any(self._rates):
            self._moved_s = now_s
        elif now_s - self._moved_s > LONGEST_OUTAGE_S:
            raise RunError(
                f"no link has carried anything for {LONGEST_OUTAGE_S:g} s at {now_s:.3f} s of the run, and bytes wait "
                f"for {', '.join(sorted(names))}: do their traces ever rise above zero, at the same time?"
            )
        next_s = min([*self._ends_s, *(change_s for _, change_s in capacity.values())])
        if next_s < math.inf:
            self._timer = Timer(self._environment, next_s, self._expire)
