"""The scenarios of Cloudless-Training's reproduction: two regions with their own data, and a varying WAN between them.

The paper (arXiv 2303.05330) trained on two regions of a public cloud. All figures here are assumed, except those of
datasheets and those with a named source.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from planner.scenario.cluster import Cluster, Device, Link
from planner.scenario.datasheet import DeviceKind, find_kind
from planner.scenario.profile import ModelProfile
from planner.scenario.roofline import LayerWork, roofline_layer
from planner.scenario.scenario import Scenario
from planner.scenario.training import Training
from traces.generators.presets import preset
from traces.trace import LinkTrace

REGIONS = ("north", "south")

WAN_BPS = 100e6
WAN_LATENCY_S = 0.025
LAN_BPS, LAN_LATENCY_S = 10e9, 50e-6

# One core of a shared server, measured by a matrix product of 1,024 x 1,024 and a copy of 256 MiB. Twelve cores are one
# device, assumed to have four times a core's memory bandwidth.
_CORE = DeviceKind("cpu-core", {"fp32": 94e9}, 4 * 2**30, 27e9, "measured")
_SERVER = DeviceKind("cpu-server", {"fp32": 12 * 94e9}, 48 * 2**30, 4 * 27e9, "assumed: twelve cores")
SERVERS: Mapping[str, DeviceKind] = {kind.name: kind for kind in (_CORE, _SERVER)}


@dataclass(frozen=True, slots=True)
class Generation:
    """A kind of GPU for rent; ``price_per_hour`` is the price on demand, in US dollars, without the host."""

    kind: str
    price_per_hour: float


# Google Cloud's list for us-central1, 2023.
PASCAL, VOLTA, AMPERE = Generation("p100", 1.46), Generation("v100-16", 2.48), Generation("a100-40", 2.93)

# Pairs of an older and a newer generation of GPUs.
GENERATIONS = ((PASCAL, VOLTA), (VOLTA, AMPERE))

# ResNet-18 on images of 224 x 224 (He et al., 2016: 1.8e9 multiplications, 11.7 million parameters), 32-bit numbers.
# The backward needs about 5 million saved numbers for an image, the inputs of convolutions and normalisations.
RESNET_18 = LayerWork("resnet-18", 3.6e9, 46_800_000, 4_000, 20_000_000)

# The classifier of experiments/models/convolutional.py with its defaults: images of 32 x 32, 485,000 parameters.
SMALL_CNN = LayerWork("small-cnn", 135e6, 1_940_000, 40, 3_000_000)


def wan_trace(seed: int = 3) -> LinkTrace:
    """Return the trace of a WAN, repeated every 10 minutes: mean 100 Mbit/s, standard deviation 13 % of the mean."""
    trace = preset("cloud-wan-colombia", duration_s=600.0, seed=seed)
    return replace(trace, bandwidth_bps=trace.bandwidth_bps * (WAN_BPS / trace.mean_bps), loops=True)


def two_regions(devices: tuple[Device, ...], work: LayerWork, kinds: list[DeviceKind], global_batch: int) -> Scenario:
    """Return a scenario that trains a model of a single float32 layer on devices in `REGIONS`, over a varying WAN."""
    trace = wan_trace()
    links = [Link(region, region, LAN_BPS, LAN_LATENCY_S) for region in REGIONS]
    links += [Link(*pair, trace.mean_bps, WAN_LATENCY_S, trace) for pair in (REGIONS, REGIONS[::-1])]
    model = ModelProfile(work.name, (roofline_layer(work, kinds, "fp32"),))
    return Scenario(f"two-regions-{work.name}", Cluster(devices, tuple(links)), model, Training(global_batch))


def rental_scenario(generations: tuple[Generation, Generation], units: int, data: tuple[int, int]) -> Scenario:
    """Return a scenario of ResNet-18 on ``units`` older GPUs in the north and as many newer ones in the south.

    ``data`` is the ratio of the regions' numbers of samples.
    """
    devices = tuple(
        Device(f"{region}-{index}", each.kind, region, find_kind(each.kind).memory_bytes, each.price_per_hour)
        for region, each in zip(REGIONS, generations, strict=True)
        for index in range(units)
    )
    kinds = [find_kind(each.kind) for each in generations]
    # With this many samples for each GPU, whole samples approximate the GPUs' shares well.
    scenario = two_regions(devices, RESNET_18, kinds, 512 * units)
    return replace(scenario, data={region: 100_000 * part for region, part in zip(REGIONS, data, strict=True)})


def server_scenario(work: LayerWork, server: str, region_batch: int) -> Scenario:
    """Return a scenario with a model on one of `SERVERS` in each region, each with ``region_batch`` samples a step."""
    kind = SERVERS[server]
    devices = tuple(Device(f"{region}-server", kind.name, region, kind.memory_bytes) for region in REGIONS)
    return two_regions(devices, work, [kind], 2 * region_batch)
