"""How long messages take on the paths between devices, and how many bytes they have on the wire."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from planner.scenario.cluster import Link
from planner.scenario.effects import NetworkEffects
from planner.scenario.faults import LinkOutage
from planner.scenario.scenario import Scenario
from planner.scenario.size_curve import SizeCurve

# Bytes of TCP payload, with timestamps, in an Ethernet frame of 1514 bytes.
PAYLOAD_BYTES = 1448


def jitter_delay_s(jitter_s: float, size_bytes: float) -> float:
    """Return the mean delay of a message of ``size_bytes`` (payload) by the jitter of its packets, seconds.

    Packets stay in order, so that the message is delayed as long as its slowest packet. The mean of the largest of n
    independent delays, uniform from 0 to J, is J n / (n + 1), where n is the number of frames and J is ``jitter_s``.
    """
    if not jitter_s:
        return 0.0
    frames = max(1, math.ceil(size_bytes / PAYLOAD_BYTES))
    return jitter_s * frames / (frames + 1)


def loss_ceiling_bps(loss_share: float, round_trip_s: float) -> float:
    """Return the limit on the rate of one TCP connection with packet loss, payload bits per second.

    The limit is MSS / RTT * sqrt(3 / 2) / sqrt(p), with MSS = `PAYLOAD_BYTES`, RTT = ``round_trip_s`` and p =
    ``loss_share``. The constant sqrt(3 / 2) holds for evenly spaced losses and an acknowledgement for every segment
    (Mathis, Semke, Mahdavi and Ott, The Macroscopic Behavior of the TCP Congestion Avoidance Algorithm, 1997).
    """
    if not loss_share or not round_trip_s:
        return math.inf
    return 8 * PAYLOAD_BYTES / round_trip_s * math.sqrt(1.5 / loss_share)


def payload_bps(effects: NetworkEffects, wire_bps: float) -> float:
    """Return the payload bits per second of training messages on a link that carries ``wire_bps`` bits per second."""
    return effects.share * effects.payload_efficiency * wire_bps


def curve_rate_bps(curve: SizeCurve, size_bytes: float, flows: int = 1) -> float:
    """Return the rate to which a size curve limits ``size_bytes`` in as many equal messages at once as ``flows``.

    Curves are measured with one device at each end. The devices of a tensor-parallel group send their shards side by
    side, each at the rate of a message of its size; together they are limited by the links' rates only.
    """
    return flows * curve.rate_bps(size_bytes / flows)


@dataclass(frozen=True, slots=True)
class ConstantRatePath:
    """A path between two devices whose rate does not change.

    Attributes:
        rate_bps: Rate of payload, bits per second.
        latency_s: One-way latency, the time to hand over a message included, seconds.
        curves: Size curves of the path's links; a link without one has the same rate for messages of any size.
        share: Share of the curves' rates that training messages reach.
        jitter_s: Largest additional delay of a packet, seconds.
    """

    rate_bps: float
    latency_s: float
    curves: tuple[SizeCurve, ...] = ()
    share: float = 1.0
    jitter_s: float = 0.0

    def transmission_s(self, size_bytes: float, flows: int = 1) -> float:
        """Return how long a message keeps the path busy, seconds; ``flows`` as in `curve_rate_bps`."""
        if not self.curves or not size_bytes:
            return 8 * size_bytes / self.rate_bps
        limits_bps = (self.share * curve_rate_bps(curve, size_bytes, flows) for curve in self.curves)
        return 8 * size_bytes / min(self.rate_bps, *limits_bps)

    def delivery_s(self, size_bytes: float, flows: int = 1) -> float:
        """Return the time from a message's start on an idle path to its arrival, seconds."""
        return self.transmission_s(size_bytes, flows) + self.propagation_s(size_bytes)

    def propagation_s(self, size_bytes: float) -> float:
        """Return the time from the departure of a message's last byte to its arrival: latency and jitter, seconds."""
        return self.latency_s + jitter_delay_s(self.jitter_s, size_bytes)


# Function from the names of a sending and a receiving device to the path between them.
Paths = Callable[[str, str], ConstantRatePath]


# Cached, because searches ask for the same pairs of devices many times.
@lru_cache(maxsize=4096)
def nominal_path(scenario: Scenario, source: str, target: str, connections: int = 1) -> ConstantRatePath:
    """Return the path from one device to another at the bandwidths that the cluster declares.

    Between regions, the two devices use this number of TCP ``connections``, inside a region one.
    """
    links = scenario.cluster.path(source, target)
    network = scenario.effects.network
    latency_s = sum(link.latency_s for link in links) + (network.handover_s if links else 0.0)
    rate_bps = payload_bps(network, min((link.bandwidth_bps for link in links), default=math.inf))
    ceiling_bps = connections_ceiling_bps(scenario, source, target, connections)
    curves = tuple(link.size_curve for link in links if link.size_curve is not None)
    jitter_s = sum(link.jitter_s for link in links)
    return ConstantRatePath(min(rate_bps, ceiling_bps), latency_s, curves, network.share, jitter_s)


# Cached, because devices ask for every message.
@lru_cache(maxsize=1024)
def own_link(scenario: Scenario, source: str, target: str) -> Link | None:
    """Return the link inside a host that carries only what one device sends to another, at a constant rate, if any.

    Such a link has neither a trace nor jitter nor loss nor an outage, and leads from the one device to the other one:
    how long a message takes depends on no other pair of devices, and not on when it is sent.
    """
    cluster = scenario.cluster
    path = cluster.path(source, target)
    if not cluster.same_host(source, target) or [(source, target)] != [(link.source, link.target) for link in path]:
        return None
    (link,) = path
    is_steady = link.trace is None and not link.jitter_s and not link.loss
    is_out = any(isinstance(fault, LinkOutage) and fault.link == link.name for fault in scenario.faults)
    # A link between two hosts that are named like the devices carries what all their devices send.
    is_of_hosts = {source, target} <= {device.machine for device in cluster.devices}
    return link if is_steady and not is_out and not is_of_hosts else None


def connections_ceiling_bps(scenario: Scenario, source: str, target: str, connections: int) -> float:
    """Return the limit on the joint rate of the connections between two devices, payload bits per second.

    The limit of each connection is the smaller of window / round trip and `loss_ceiling_bps`. The round trip is the sum
    of the links' latencies in both directions.
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


# By compression: bytes of an element, and bytes added to each sample (a float32 scale for 8-bit integers).
_FORMATS: Mapping[str, tuple[int, int]] = MappingProxyType({"bf16": (2, 0), "int8": (1, 4)})


def wire_bytes(compression: str, samples: int, sample_bytes: int, number_bytes: int) -> int:
    """Return the bytes on the wire of an activation or its gradient of ``samples`` samples.

    ``compression`` is one of `planner.scenario.training.COMPRESSIONS`. Without compression, a sample has
    ``sample_bytes`` bytes in numbers of ``number_bytes`` (`planner.scenario.training.Precision`); with it, a fraction
    of a number counts as a whole one.
    """
    if compression == "none":
        return samples * sample_bytes
    element_bytes, scale_bytes = _FORMATS[compression]
    elements = -(-sample_bytes // number_bytes)
    return samples * (elements * element_bytes + scale_bytes) if elements else 0


def message_bytes(
    scenario: Scenario, compression: str, source: str, target: str, samples: int, sample_bytes: int
) -> int:
    """Return the bytes that a plan sends from one device to another for ``samples`` samples of ``sample_bytes`` each.

    Between regions messages are compressed as ``compression`` says, inside a region they are not.
    """
    form = compression if scenario.cluster.crosses_regions(source, target) else "none"
    return wire_bytes(form, samples, sample_bytes, scenario.training.formats.number_bytes)
