"""Probes of the links between regions that a plan does not use, as in the executor (`planner.adapt.unused_links`).

A probe is too small to delay anything, and has nothing of the run's before it.
"""

import math
from collections.abc import Mapping

from planner.adapt.unused_links import PACKET_BYTES, PROBE_EVERY_S, SMALL_BYTES, large_packets, link_probe, unused_paths
from planner.cost.network import jitter_delay_s
from planner.events.event import Event
from planner.plan.plan import Plan
from planner.scenario.cluster import Link
from planner.scenario.scenario import Scenario
from sim.kernel.piecewise import RateTables, join_tables, time_of
from sim.network.routes import link_rates


class LinkProbes:
    """Sends the probes of a run, and tells which of them have arrived."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._rates: dict[str, RateTables] = {}
        self._under_way: list[Event] = []
        # By path: when it was probed last, run seconds.
        self._sent_s: dict[tuple[str, str], float] = {}

    def send(self, plan: Plan, step: int, begun_s: Mapping[str, float]) -> None:
        """Send the probes of a step.

        ``begun_s`` says when the devices of the plan began it, run seconds; the other devices hear of it with the
        first of them.
        """
        first_s = min(begun_s.values())
        for source, target in unused_paths(plan, self._scenario):
            start_s = begun_s.get(source, first_s)
            if start_s < self._sent_s.get((source, target), -math.inf) + PROBE_EVERY_S:
                continue
            self._sent_s[source, target] = start_s
            large_bytes = PACKET_BYTES * large_packets(source, target, self._scenario)
            path, before_bytes = self._scenario.cluster.path(source, target), 0
            for size_bytes in (SMALL_BYTES, large_bytes):
                arrived_s = self._arrived_s(path, before_bytes + size_bytes, start_s)
                before_bytes += size_bytes
                if arrived_s < math.inf:
                    self._under_way.append(link_probe(source, target, step, size_bytes, start_s, arrived_s))

    def arrived(self, now_s: float) -> list[Event]:
        """Return the rows of probes that have arrived by run second ``now_s``, each once."""
        there = [probe for probe in self._under_way if probe.arrived_s <= now_s]
        self._under_way = [probe for probe in self._under_way if probe.arrived_s > now_s]
        return there

    def _arrived_s(self, path: tuple[Link, ...], size_bytes: int, start_s: float) -> float:
        """Return when ``size_bytes`` have arrived, run seconds; infinity if a link carries nothing any more."""
        bits = 8.0 * size_bytes
        left_s = max(time_of(self._rates_of(link), 0, bits, start_s, math.inf) for link in path)
        if left_s == math.inf:
            return math.inf
        latency_s = sum(link.latency_at_s(left_s) for link in path)
        return left_s + latency_s + jitter_delay_s(sum(link.jitter_s for link in path), size_bytes)

    def _rates_of(self, link: Link) -> RateTables:
        if link.name not in self._rates:
            self._rates[link.name] = join_tables([link_rates(link, self._scenario)])
        return self._rates[link.name]
