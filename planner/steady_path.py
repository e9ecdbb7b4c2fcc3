"""A path whose rate does not change: what planners and the compiled evaluator count on."""

import math
from dataclasses import dataclass

from planner.scenario import Scenario
from planner.size_curve import SizeCurve


@dataclass(frozen=True, slots=True)
class SteadyPath:
    """A path whose rate does not change.

    Attributes:
        rate_bps: Bits per second, of payload.
        latency_s: One way, seconds.
        curves: What a message of a size reaches by itself.
        share: Of the curves' rates that messages really reach.
    """

    rate_bps: float
    latency_s: float
    curves: tuple[SizeCurve, ...] = ()
    share: float = 1.0

    def occupancy_s(self, size_bytes: float) -> float:
        """Return for how many seconds a message keeps the path busy."""
        if not self.curves or not size_bytes:
            return 8 * size_bytes / self.rate_bps
        return 8 * size_bytes / min(self.rate_bps, *(self.share * curve.rate_bps(size_bytes) for curve in self.curves))


def nominal_path(scenario: Scenario, source: str, target: str, connections: int = 1) -> SteadyPath:
    """Return the path between two devices at the bandwidths that the cluster declares.

    Args:
        scenario: Gives links, and what TCP makes of them.
        source: A device.
        target: Another one.
        connections: TCP connections between the two, if they stand in different regions.
    """
    links = scenario.cluster.path(source, target)
    latency_s = sum(link.latency_s for link in links)
    network = scenario.effects.network
    rate_bps = network.share * network.payload_efficiency * min(link.bandwidth_bps for link in links)
    ceiling_bps = window_ceiling_bps(scenario, source, target, connections)
    curves = tuple(link.size_curve for link in links if link.size_curve is not None)
    return SteadyPath(min(rate_bps, ceiling_bps), latency_s, curves, network.share)


def window_ceiling_bps(scenario: Scenario, source: str, target: str, connections: int) -> float:
    """Return what the windows of the connections between two devices let through: window over round trip each."""
    window_bytes = scenario.effects.network.window_bytes
    if math.isinf(window_bytes):
        return math.inf
    back = sum(link.latency_s for link in scenario.cluster.path(target, source))
    round_trip_s = sum(link.latency_s for link in scenario.cluster.path(source, target)) + back
    count = connections if scenario.cluster.crosses_regions(source, target) else 1
    return count * 8 * window_bytes / round_trip_s if round_trip_s > 0 else math.inf
