"""Probes of the links between regions that a plan does not use, as in the executor (`planner.adapt.unused_links`).

A probe delays nothing of the run's, and has nothing of it before it.
"""

import math
from collections.abc import Mapping

from planner.adapt.unused_links import ProbeTimes, link_probe, probed_with, unused_paths
from planner.cost.network import jitter_delay_s
from planner.events.event import Event
from planner.plan.plan import Plan
from planner.scenario.cluster import Link
from planner.scenario.faults import Absence
from planner.scenario.scenario import Scenario
from sim.kernel.piecewise import RateTables, join_tables, time_of
from sim.network.routes import link_rates


class LinkProbes:
    """Sends the probes of a run, and tells which of them have arrived."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._absences = [fault for fault in scenario.faults if isinstance(fault, Absence)]
        self._rates: dict[str, RateTables] = {}
        self._under_way: list[Event] = []
        self._times = ProbeTimes(scenario)
        # By device: when a plan used it last, run seconds.
        self._used_s: dict[str, float] = {}

    def send(self, plan: Plan, step: int, begun_s: Mapping[str, float]) -> None:
        """Send the probes of a step.

        ``begun_s`` says when the devices of the plan began it, run seconds. The others send theirs with the first of
        these; in the executor they hear of a step up to two steps earlier.
        """
        first_s = min(begun_s.values())
        self._used_s |= dict.fromkeys(plan.devices, first_s)
        for source, target in probed_with(step, unused_paths(plan, self._scenario, self._present(first_s))):
            start_s, before_bytes = begun_s.get(source, first_s), 0
            for size_bytes in self._times.take_due(source, target, start_s):
                before_bytes += size_bytes
                arrived_s = self._arrived_s(self._scenario.cluster.path(source, target), before_bytes, start_s)
                if arrived_s < math.inf:
                    self._under_way.append(link_probe(source, target, step, size_bytes, start_s, arrived_s))

    def _present(self, now_s: float) -> frozenset[str]:
        """Return the devices that take part.

        As in the executor, one that was away takes part again once a plan uses it.
        """
        gone = {
            each.device
            for each in self._absences
            if each.start_s <= now_s and self._used_s.get(each.device, -math.inf) < each.end_s
        }
        return frozenset(device.name for device in self._scenario.cluster.devices) - gone

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
