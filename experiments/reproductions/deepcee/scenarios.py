"""The scenarios of DeepCEE's reproduction.

From the paper: regions of the kinds cloud, edge and end, with fast links inside and slow, unstable links between them.
Assumption: all devices, models and batches below; 10 to 100 Gbit/s inside a region, 0.1 to 1 Gbit/s at 10 to 60 ms
between regions. Times are those of the roofline (`planner.scenario.roofline`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations

from experiments.reproductions.architectures import gpt, vit_huge
from planner.scenario.cluster import Cluster, Device, Link
from planner.scenario.datasheet import find_kind
from planner.scenario.profile import LayerProfile, ModelProfile
from planner.scenario.roofline import LayerWork, roofline_layer
from planner.scenario.scenario import Scenario
from planner.scenario.training import Optimizer, Training
from traces.trace import LinkTrace

# Number formats in which every setting is measured: 32-bit training, in TF32 on GPUs that have it, and mixed 16-bit
# training, as the hardware of the clusters is used today. V100 and Titan RTX have no bfloat16.
PRECISIONS = ("tf32", "fp16")

# Width and number of blocks in GPT-3's table of models: 1.3, 2.7 and 6.7 billion parameters.
GPT_SIZES = {"gpt-1.3b": (2048, 24), "gpt-2.7b": (2560, 32), "gpt-6.7b": (4096, 32)}

VISION_MODEL = "vit-huge"
MODELS = (*GPT_SIZES, VISION_MODEL)

# Samples (sequences or images) of a step, and of a microbatch for strategies that do not choose its size; contenders of
# the reproduction do.
BATCHES = {**dict.fromkeys(GPT_SIZES, (64, 2)), VISION_MODEL: (256, 8)}


@dataclass(frozen=True, slots=True)
class Site:
    """A region of a cluster: its number of devices of each kind, and the rate of its network, bits per second."""

    region: str
    devices: tuple[tuple[str, int], ...]
    inside_bps: float


CLUSTERS = {
    # Three data centres of different ages.
    "data centres": (
        Site("cloud", (("a100-40", 2),), 100e9),
        Site("edge", (("v100-32", 4),), 25e9),
        Site("end", (("a5000", 2),), 10e9),
    ),
    # One GPU server, a room of workstations, two boards.
    "cloud, edge, end": (
        Site("cloud", (("a100-40", 2),), 100e9),
        Site("edge", (("rtx-3090", 2), ("a5000", 2)), 10e9),
        Site("end", (("jetson-agx-orin", 2),), 10e9),
    ),
    # No data centre at all.
    "workstations": (
        Site("cloud", (("a6000", 2),), 25e9),
        Site("edge", (("rtx-3090", 3),), 10e9),
        Site("end", (("titan-rtx", 3),), 10e9),
    ),
}

INSIDE_LATENCY_S = 100e-6


def deepcee_scenario(
    cluster: str,
    model: str,
    bandwidth_bps: float,
    latency_s: float,
    *,
    mixed: bool = False,
    trace: LinkTrace | None = None,
    precision: str = PRECISIONS[0],
) -> Scenario:
    """Return one of `MODELS` on one of `CLUSTERS`, whose links between regions have the given rate and latency.

    With ``mixed`` the cluster lists one device of each region in turn, instead of region by region. ``trace`` is the
    rate over time of the links between the first two regions.
    """
    sites = CLUSTERS[cluster]
    kinds = list(dict.fromkeys(kind for site in sites for kind, _ in site.devices))
    links = [Link(site.region, site.region, site.inside_bps, INSIDE_LATENCY_S) for site in sites]
    for number, (one, other) in enumerate(combinations([site.region for site in sites], 2)):
        swaying = trace if number == 0 else None
        links += [Link(*ends, bandwidth_bps, latency_s, swaying) for ends in ((one, other), (other, one))]
    batch, microbatch = BATCHES[model]
    return Scenario(
        f"{cluster}, {model}",
        Cluster(_devices(sites, mixed), tuple(links)),
        model_profile(model, kinds, precision),
        Training(batch, microbatch, Optimizer("adamw"), precision),
    )


def model_profile(model: str, kinds: Sequence[str], precision: str = PRECISIONS[0]) -> ModelProfile:
    """Return one of `MODELS` with the roofline's times on device kinds."""
    works = vit_huge() if model == VISION_MODEL else gpt(*GPT_SIZES[model])
    known = [find_kind(kind) for kind in kinds]

    @cache
    def timed(work: LayerWork) -> LayerProfile:
        return roofline_layer(work, known, precision)

    layers = (replace(timed(replace(work, name="")), name=work.name) for work in works)
    return ModelProfile(model, tuple(layers))


def _devices(sites: Sequence[Site], mixed: bool) -> tuple[Device, ...]:
    rows = [
        [
            Device(f"{site.region}-{kind}-{number}", kind, site.region, find_kind(kind).memory_bytes)
            for kind, count in site.devices
            for number in range(count)
        ]
        for site in sites
    ]
    if not mixed:
        return tuple(device for row in rows for device in row)
    longest = max(map(len, rows))
    return tuple(row[index] for index in range(longest) for row in rows if index < len(row))
