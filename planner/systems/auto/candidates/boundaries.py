"""How layers' outputs pass from one stage to the next, for every pair of ways to use pools."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from planner.cost.network import ConstantRatePath, nominal_path
from planner.scenario.scenario import Scenario
from planner.systems.auto.candidates.chain_split import Floats
from planner.systems.auto.candidates.device_classes import DeviceClass, StageOption


def crossings(
    ways: Sequence[StageOption], scenario: Scenario, pipelines: int, microbatch: int
) -> tuple[Floats, Floats]:
    """Return for how long each layer's output keeps the links busy, and how long it is on its way, in seconds.

    Both for each pair of ways, [ways, ways, layers]. What a host sends in each round of microbatches passes its
    interface, what a region does passes the region's links, and no link is busy for less than one message takes.

    Args:
        ways: To use the pools.
        scenario: Gives links and sizes.
        pipelines: That send at the same time.
        microbatch: Samples.
    """
    count, layers = len(ways), len(scenario.model.layers)
    busy_s, way_s = np.zeros((count, count, layers)), np.zeros((count, count, layers))
    width = np.array([way.width for way in ways])
    # Assumed: the stages of a host's devices are the same one, of different pipelines or replicas.
    senders = [min(pipelines * way.width, way.pool.host_size // way.degree or 1) for way in ways]
    host = np.array(senders) * -(-microbatch // width)
    places: dict[DeviceClass, list[int]] = {}
    for index, way in enumerate(ways):
        places.setdefault(way.pool, []).append(index)
    for one, rows in places.items():
        for other, columns in places.items():
            if one is other and one.size == 1:
                continue
            between = _between(scenario, one, other)
            message = -(-microbatch // np.maximum(width[rows][:, None], width[columns][None, :]))
            sizes, which = np.unique(message, return_inverse=True)
            alone_s = np.array([_message_s(scenario, one, other, size) for size in sizes.tolist()])[which]
            alone_s = alone_s.reshape(*message.shape, layers)
            shared_s = np.maximum(host[rows][:, None, None] * between.host_s, pipelines * microbatch * between.region_s)
            block = np.ix_(rows, columns)
            busy_s[block] = np.maximum(alone_s, shared_s)
            way_s[block] = alone_s + between.path.latency_s
    return busy_s, way_s


@dataclass(frozen=True, eq=False, slots=True)
class _Between:
    """The way between devices of two pools.

    Attributes:
        path: Of one message by itself.
        host_s: Seconds of a sample of each layer's output on the interfaces of hosts, [layers].
        region_s: On the links of and between regions, [layers].
    """

    path: ConstantRatePath
    host_s: Floats
    region_s: Floats


@lru_cache(maxsize=4096)
def _between(scenario: Scenario, one: DeviceClass, other: DeviceClass) -> _Between:
    source, target = one.ends[0], other.ends[1]
    cluster, network = scenario.cluster, scenario.effects.network
    bits = 8 * np.array([layer.output_bytes for layer in scenario.model.layers], np.float64)
    host_s, region_s = np.zeros(len(bits)), np.zeros(len(bits))
    for link in cluster.path(source, target):
        seconds = bits / (link.bandwidth_bps * network.share * network.payload_efficiency)
        if "network" in (link.source, link.target):
            host_s = np.maximum(host_s, seconds)
        elif link.source in cluster.regions:
            region_s = np.maximum(region_s, seconds)
    return _Between(nominal_path(scenario, source, target), host_s, region_s)


@lru_cache(maxsize=16384)
def _message_s(scenario: Scenario, one: DeviceClass, other: DeviceClass, samples: int) -> Floats:
    """Seconds for which each layer's output of so many samples keeps an idle path busy, [layers]."""
    path = _between(scenario, one, other).path
    sizes, which = np.unique(
        samples * np.array([layer.output_bytes for layer in scenario.model.layers]), return_inverse=True
    )
    return np.array([path.transmission_s(size) for size in sizes.tolist()])[which]
