"""The fleets of the planner bench: the published fleets in one zone, and thousands of GPUs in many regions."""

from dataclasses import dataclass
from itertools import combinations, cycle

import numpy as np

from experiments.benches.sailor.closed_form import SHARDED_FRAMEWORK_BYTES
from experiments.benches.sailor.fleet import NodeGroup, fleet_of
from experiments.benches.sailor.measured_files import MeasuredFiles, SailorNetwork
from planner.files.importers.sailor import read_sailor
from planner.scenario.cluster import Cluster, Device, Link
from planner.scenario.datasheet import find_kind
from planner.scenario.effects import ComputeEffects, Effects, MemoryEffects
from planner.scenario.scenario import Scenario
from planner.scenario.training import Optimizer, Training

ZONE = "us-central1-a"

# Assumption: number of GPUs of a node. The published measurements have nodes of 1, 2 and 4 GPUs.
NODE_GPUS = 4

GLOBAL_BATCH = 1024

# The regions take these GPU kinds in turn.
WIDE_KINDS = ("a100-40", "v100-16", "rtx-3090", "titan-rtx")
WIDE_HOST_GPUS = 8
# Assumption: 200 Gbit/s inside a host (PCIe 4.0), 25 Gbit/s for a host's interface, and a fabric that never limits.
INSIDE_HOST_BPS, INTERFACE_BPS = 200e9, 25e9
WIDE_BPS = (0.1e9, 1e9)
WIDE_LATENCY_S = (0.010, 0.100)
LOCAL_LATENCY_S = 50e-6


@dataclass(frozen=True, slots=True)
class PublishedFleet:
    """A fleet of A100-40 and V100-16 GPUs on which planners were compared side by side.

    Attributes:
        published_per_s: Iterations per second of the best published planner's plan, by the closed form.
        published_search_s: Seconds that this planner searched.
        bar_per_s: Iterations per second that a plan must reach: those of the best plan known.
        bar_search_s: Most seconds that a search may take.
    """

    a100: int
    v100: int
    published_per_s: float
    published_search_s: float
    bar_per_s: float
    bar_search_s: float

    @property
    def name(self) -> str:
        """Return the fleet's numbers of GPUs as text."""
        return f"{self.a100} A100-40 + {self.v100} V100-16"


PUBLISHED_FLEETS = (
    PublishedFleet(32, 96, 0.170, 1.0, 0.2078, 1.0),
    PublishedFleet(80, 240, 0.361, 3.8, 0.40516, 2.0),
    PublishedFleet(128, 384, 0.523, 5.3, 0.56207, 4.0),
)


@dataclass(frozen=True, slots=True)
class WideFleet:
    """GPUs in regions over slow links of random rates and latencies.

    Attributes:
        hosts: Number of hosts of each region.
        most_search_s: Most seconds of processor time that a search may take.
    """

    regions: int
    hosts: int
    most_search_s: float

    @property
    def name(self) -> str:
        """Return the fleet's numbers of GPUs and regions as text."""
        return f"{self.regions * self.hosts * WIDE_HOST_GPUS:,} GPUs in {self.regions} regions"


WIDE_FLEETS = (WideFleet(16, 8, 5.0), WideFleet(64, 8, 20.0), WideFleet(64, 20, 60.0))


def fleet_scenario(name: str, a100: int, v100: int, global_batch: int, files: MeasuredFiles) -> Scenario:
    """Return a scenario that trains the measured model on whole nodes of two kinds, in fp32 with Adam.

    As in the closed form, compute and transfers share one stream, and each device holds the framework's bytes. The
    closed form counts more copies of a parameter than training needs, so a plan that fits into memory by ropebridge's
    evaluator may not fit by the closed form.
    """
    groups = tuple(
        NodeGroup(kind, gpus // NODE_GPUS, NODE_GPUS) for kind, gpus in (("A100-40", a100), ("V100-16", v100))
    )
    inside = files.network.with_name("intra_node_bandwidths.json")
    return Scenario(
        name,
        fleet_of(groups, ZONE, SailorNetwork(files.network), inside),
        read_sailor(files.times, files.sizes, files.model_name),
        Training(global_batch, optimizer=Optimizer("adamw")),
        effects=Effects(
            compute=ComputeEffects(transfers_block=True), memory=MemoryEffects(framework_bytes=SHARDED_FRAMEWORK_BYTES)
        ),
    )


def wide_scenario(fleet: WideFleet, files: MeasuredFiles, seed: int = 0) -> Scenario:
    """Return a scenario of the fleet's GPUs, of four kinds, over slow links of random rates and latencies."""
    random = np.random.default_rng(seed)
    regions = [f"region-{number}" for number in range(fleet.regions)]
    devices = tuple(
        Device(
            f"{region}-host-{host}-gpu-{gpu}",
            kind.name,
            region,
            kind.memory_bytes,
            host=f"{region}-host-{host}",
            interface_bps=INTERFACE_BPS,
        )
        for region, kind in zip(regions, cycle(map(find_kind, WIDE_KINDS)), strict=False)
        for host in range(fleet.hosts)
        for gpu in range(WIDE_HOST_GPUS)
    )
    links = [Link(region, region, fleet.hosts * INTERFACE_BPS, LOCAL_LATENCY_S) for region in regions]
    for pair in combinations(regions, 2):
        bandwidth_bps, latency_s = float(random.uniform(*WIDE_BPS)), float(random.uniform(*WIDE_LATENCY_S))
        links.extend(Link(*ends, bandwidth_bps, latency_s) for ends in (pair, pair[::-1]))
    hosts = dict.fromkeys(device.host for device in devices)
    links.extend(Link(host, host, INSIDE_HOST_BPS, latency_s=0.0) for host in hosts)
    return Scenario(
        fleet.name,
        Cluster(devices, tuple(links)),
        read_sailor(files.times, files.sizes, files.model_name),
        Training(GLOBAL_BATCH, optimizer=Optimizer("adamw")),
    )
