"""Random clusters that train a transformer: unlike devices in hosts, regions with shared networks, unequal links.

Everything is drawn from ranges in which published clusters lie. Scenarios of equal seeds are equal.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import inf, log

import numpy as np

from planner.scenario.cluster import Cluster, Device, Link
from planner.scenario.datasheet import DeviceKind, find_kind
from planner.scenario.effects import WIDE_AREA_TCP, Effects
from planner.scenario.profile import ModelProfile
from planner.scenario.roofline import LayerWork, roofline_layer
from planner.scenario.scenario import Scenario
from planner.scenario.training import FLOAT32_BYTES, Optimizer, Training

KINDS = (
    *("h100-80", "a100-80", "a100-40", "l40s", "a6000", "a10g", "rtx-4090", "rtx-3090"),
    *("titan-rtx", "v100-16", "l4", "t4"),
)
DEVICES, KIND_COUNTS, REGIONS = (4, 64), (2, 6), (1, 5)
HOST_SIZES = (1, 2, 4, 8)

# Links inside a host, interfaces of hosts, networks of regions, and links between regions: rates in bit/s and one-way
# latencies in seconds, drawn with equal probability for every order of magnitude.
INSIDE_BPS, INSIDE_S = (50e9, 2e12), 3e-6
INTERFACES_BPS = (1e9, 10e9, 25e9, 100e9, inf)
REGION_BPS, REGION_S = (1e9, 200e9), (20e-6, 500e-6)
WIDE_BPS, WIDE_S = (50e6, 20e9), (1e-3, 100e-3)

# Largest ratio of the rates of a link's two directions.
UNEQUAL = 5.0

WIDTHS, BLOCKS, TOKENS, VOCABULARY = (768, 1024, 1600, 2560, 4096), (6, 32), (256, 512, 1024, 2048), 32_000
BATCHES = (16, 32, 64, 128, 256)
PRECISIONS = ("fp32", "bf16")

# Bytes per parameter of weights, gradients and AdamW's state, and the largest part of all devices' memory that they
# may take: with more, few ways of dividing the model are left.
_STATE_BYTES, _MOST_OF_MEMORY = 16, 0.4

# Half of the clusters have the effects of TCP, unless gradients are more windows than this, each of which the simulator
# sends by itself.
_MOST_WINDOWS = 20_000

# Bytes of activations that a block saves per token and unit of width, in float32.
_SAVED_BYTES = 68


def random_cluster(seed: int) -> Scenario:
    """Return the scenario of a seed."""
    random = np.random.default_rng(seed)
    devices, hosts = _devices(random)
    regions = list(dict.fromkeys(device.region for device in devices))
    links = [Link(host, host, _between(random, INSIDE_BPS), INSIDE_S) for host in hosts]
    links += [Link(each, each, _between(random, REGION_BPS), _between(random, REGION_S)) for each in regions]
    links += [link for at, one in enumerate(regions) for other in regions[:at] for link in _wide(random, one, other)]
    cluster = Cluster(tuple(devices), tuple(links))
    precision = str(random.choice(PRECISIONS))
    training = Training(int(random.choice(BATCHES)), optimizer=Optimizer("adamw"), precision=precision)
    model = _model(random, cluster, precision)
    windows = len(devices) * model.parameter_bytes(0, len(model.layers)) / WIDE_AREA_TCP.window_bytes
    has_tcp = bool(random.integers(2)) and windows <= _MOST_WINDOWS
    effects = Effects(network=WIDE_AREA_TCP) if has_tcp else Effects()
    return Scenario(f"random-{seed}", cluster, model, training, effects=effects)


def _between(random: np.random.Generator, limits: Sequence[float]) -> float:
    """Return a number between two limits, with equal probability for every order of magnitude."""
    return float(np.exp(random.uniform(log(limits[0]), log(limits[-1]))))


def _devices(random: np.random.Generator) -> tuple[list[Device], list[str]]:
    """Return the devices of all regions, and the hosts that have several."""
    count = round(_between(random, DEVICES))
    regions = int(random.integers(REGIONS[0], min(REGIONS[1], count // 2) + 1))
    names = random.choice(KINDS, int(random.integers(*KIND_COUNTS, endpoint=True)), replace=False)
    kinds = [find_kind(str(name)) for name in names]
    devices: list[Device] = []
    shared: list[str] = []
    number = 0
    while len(devices) < count:
        # The first hosts give every region one device or more, and the cluster two kinds or more.
        region = number if number < regions else int(random.integers(regions))
        kind = kinds[number % len(kinds)] if number < 2 else kinds[int(random.integers(len(kinds)))]
        left = count - len(devices) - max(0, regions - number - 1)
        size = min(left, int(random.choice(HOST_SIZES)))
        host, interface_bps = f"host-{number}", float(random.choice(INTERFACES_BPS))
        shared += [host] if size > 1 else []
        devices += [
            Device(
                f"gpu-{number}-{place}",
                kind.name,
                f"region-{region}",
                kind.memory_bytes,
                host=host,
                interface_bps=interface_bps,
            )
            for place in range(size)
        ]
        number += 1
    return devices, shared


def _wide(random: np.random.Generator, one: str, other: str) -> tuple[Link, Link]:
    """Return a link between two regions in both directions, whose rates differ."""
    rate_bps, latency_s = _between(random, WIDE_BPS), _between(random, WIDE_S)
    both_bps = [rate_bps, rate_bps / random.uniform(1, UNEQUAL)]
    there_bps, back_bps = (float(each) for each in random.permutation(both_bps))
    return Link(one, other, there_bps, latency_s), Link(other, one, back_bps, latency_s * random.uniform(1, 1.5))


def _model(random: np.random.Generator, cluster: Cluster, precision: str) -> ModelProfile:
    """Return a transformer whose training state takes a part of the devices' memory."""
    room = _MOST_OF_MEMORY * sum(device.memory_bytes for device in cluster.devices)
    while True:
        width, blocks = int(random.choice(WIDTHS)), int(random.integers(*BLOCKS, endpoint=True))
        if _STATE_BYTES * (12 * blocks * width + 2 * VOCABULARY) * width <= room:
            break
    tokens = int(random.choice(TOKENS))
    output_bytes = FLOAT32_BYTES * tokens * width
    vocabulary_bytes = FLOAT32_BYTES * VOCABULARY * width
    works = (
        LayerWork("embedding", 0.0, vocabulary_bytes, output_bytes, 0, backward_input_flop=0.0),
        *(
            LayerWork(
                f"block-{number}",
                (24.0 * width + 4.0 * tokens) * width * tokens,
                12 * FLOAT32_BYTES * width**2,
                output_bytes,
                _SAVED_BYTES * tokens * width,
            )
            for number in range(blocks)
        ),
        LayerWork(
            "head",
            2.0 * tokens * width * VOCABULARY,
            vocabulary_bytes,
            FLOAT32_BYTES,
            FLOAT32_BYTES * tokens * VOCABULARY,
        ),
    )
    kinds: list[DeviceKind] = [find_kind(kind) for kind in dict.fromkeys(device.kind for device in cluster.devices)]
    return ModelProfile(
        f"transformer-{blocks}x{width}", tuple(roofline_layer(work, kinds, precision) for work in works)
    )


def relisted(scenario: Scenario, seed: int) -> Scenario:
    """Return the scenario with devices and links listed in another order."""
    random, cluster = np.random.default_rng(seed), scenario.cluster
    devices = tuple(cluster.devices[index] for index in random.permutation(len(cluster.devices)))
    links = tuple(cluster.links[index] for index in random.permutation(len(cluster.links)))
    return replace(scenario, cluster=Cluster(devices, links))


def renamed(scenario: Scenario, seed: int) -> Scenario:
    """Return the scenario with other names of devices, hosts and regions, whose alphabetical order is another one."""
    cluster = scenario.cluster
    old = dict.fromkeys(name for each in cluster.devices for name in (each.name, each.host, each.region) if name)
    numbers = np.random.default_rng(seed).permutation(len(old)).tolist()
    new = {name: f"n{number:04d}" for name, number in zip(old, numbers, strict=True)}
    devices = tuple(
        replace(each, name=new[each.name], host=new.get(each.host, ""), region=new[each.region])
        for each in cluster.devices
    )
    links = tuple(replace(each, source=new[each.source], target=new[each.target]) for each in cluster.links)
    return replace(scenario, cluster=Cluster(devices, links))


def region_subsets(scenario: Scenario) -> list[tuple[str, ...]]:
    """Return the sets of regions that are compared with all regions: all regions but one, and each region alone."""
    regions = scenario.cluster.regions
    if len(regions) == 1:
        return []
    without_one = [tuple(each for each in regions if each != left) for left in regions]
    return list(dict.fromkeys((*without_one, *((each,) for each in regions))))
