"""Flows on shared links whose rates follow traces, integrated exactly.

Between two moments at which a flow starts, a flow ends or a trace changes, all rates are constant; the network
wakes at these moments only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import simpy

from planner.cluster import LONGEST_OUTAGE_S, Link
from sim.fairshare import max_min_rates
from traces.errors import RunError


@dataclass(eq=False, slots=True)
class _Flow:
    """Bits on their way; ``end_s`` is when the last one leaves if no rate changes before."""

    links: Sequence[Link]
    remaining_bits: float
    departed: simpy.Event
    rate_bps: float = 0.0
    end_s: float = float("inf")


class Network:
    """All flows under way; time counts in seconds from the start of the run.

    Raises:
        RunError: Nothing has moved for longer than any outage.
    """

    def __init__(self, environment: simpy.Environment) -> None:
        self._environment = environment
        self._flows: list[_Flow] = []
        self._updated_s = 0.0
        self._alarm: simpy.Event | None = None
        self._moved_s = 0.0

    def transmit(self, links: Sequence[Link], bits: float) -> simpy.Event:
        """Start a flow; return the event of its last bit's departure."""
        flow = _Flow(links, bits, self._environment.event())
        self._progress()
        self._flows.append(flow)
        self._share()
        return flow.departed

    def _progress(self) -> None:
        """Move every flow's bits up to now."""
        elapsed_s = self._environment.now - self._updated_s
        for flow in self._flows:
            flow.remaining_bits -= flow.rate_bps * elapsed_s
        self._updated_s = self._environment.now

    def _share(self) -> None:
        """End the flows that are done, share the links among the others, and set the next alarm."""
        now_s = self._environment.now
        for flow in self._flows:
            if flow.end_s <= now_s or flow.remaining_bits <= 0:
                flow.departed.succeed()
        self._flows = [flow for flow in self._flows if not flow.departed.triggered]
        self._alarm = None
        if not self._flows:
            return
        links = {link.name: link for flow in self._flows for link in flow.links}
        capacity_bps = {name: _rate_bps(link, now_s) for name, link in links.items()}
        rates = max_min_rates([[link.name for link in flow.links] for flow in self._flows], capacity_bps)
        for flow, rate_bps in zip(self._flows, rates, strict=True):
            flow.rate_bps = rate_bps
            flow.end_s = now_s + flow.remaining_bits / rate_bps if rate_bps > 0 else float("inf")
        if any(rates):
            self._moved_s = now_s
        elif now_s - self._moved_s > LONGEST_OUTAGE_S:
            raise RunError(
                f"no link has carried anything for {LONGEST_OUTAGE_S:g} s at {now_s:.3f} s of the run, and bytes wait "
                f"for {', '.join(sorted(links))}: do their traces ever rise above zero, at the same time?"
            )
        next_s = min(
            [flow.end_s for flow in self._flows]
            + [link.trace.next_change_s(now_s) for link in links.values() if link.trace is not None]
        )
        if next_s < float("inf"):
            # An alarm that a later change overtakes still rings, and is passed over then.
            self._alarm = self._environment.timeout(next_s - now_s)
            self._alarm.callbacks.append(self._wake)

    def _wake(self, alarm: simpy.Event) -> None:
        if alarm is self._alarm:
            self._progress()
            self._share()


def _rate_bps(link: Link, time_s: float) -> float:
    return link.bandwidth_bps if link.trace is None else float(link.trace.bandwidth_at(time_s))
