"""A path whose rate does not change: what planners and the compiled evaluator count on."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from planner.cost.packets import jitter_delay_s, loss_ceiling_bps
from planner.scenario.scenario import Scenario
from planner.scenario.size_curve import SizeCurve


@dataclass(frozen=True, slots=True)
class ConstantRatePath:
    """A path whose rate does not change.

    Attributes:
        rate_bps: Bits per second, of payload.
        latency_s: One way, seconds.
        curves: What a message of a size reaches by itself.
        share: Of the curves' rates that messages really reach.
        jitter_s: Each packet takes up to so much longer, seconds.
    """

    rate_bps: float
    latency_s: float
    curves: tuple[SizeCurve, ...] = ()
    share: float = 1.0
    jitter_s: float = 0.0

    def transmission_s(self, size_bytes: float) -> float:
        """Return for how many seconds a message keeps the path busy."""
        if not self.curves or not size_bytes:
            return 8 * size_bytes / self.rate_bps
        return 8 * size_bytes / min(self.rate_bps, *(self.share * curve.rate_bps(size_bytes) for curve in self.curves))

    def propagation_s(self, size_bytes: float) -> float:
        """Return how long after its departure a message is there, seconds."""
        return self.latency_s + jitter_delay_s(self.jitter_s, size_bytes)


# The path from one device to another.
Paths = Callable[[str, str], ConstantRatePath]


def nominal_path(scenario: Scenario, source: str, target: str, connections: int = 1) -> ConstantRatePath:
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
    slowest_bps = min((link.bandwidth_bps for link in links), default=math.inf)
    rate_bps = network.share * network.payload_efficiency * slowest_bps
    ceiling_bps = connections_ceiling_bps(scenario, source, target, connections)
    curves = tuple(link.size_curve for link in links if link.size_curve is not None)
    jitter_s = sum(link.jitter_s for link in links)
    return ConstantRatePath(min(rate_bps, ceiling_bps), latency_s, curves, network.share, jitter_s)


def connections_ceiling_bps(scenario: Scenario, source: str, target: str, connections: int) -> float:
    """Return what the connections between two devices carry at most by themselves, payload bits per second.

    Each carries no more than its window per round trip, and no more than losses on the way let it grow to. A round trip
    is the links' latencies there and back.
    """
    window_bytes = scenario.effects.network.window_bytes
    links = scenario.cluster.path(source, target)
    loss_share = 1 - math.prod(1 - link.loss for link in links)
    if math.isinf(window_bytes) and not loss_share:
        return math.inf
    back = sum(link.latency_s for link in scenario.cluster.path(target, source))
    round_trip_s = sum(link.latency_s for link in links) + back
    count = connections if scenario.cluster.crosses_regions(source, target) else 1
    window_bps = count * 8 * window_bytes / round_trip_s if round_trip_s > 0 else math.inf
    return min(window_bps, count * loss_ceiling_bps(loss_share, round_trip_s))
