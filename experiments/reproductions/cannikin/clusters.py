"""The clusters of Cannikin's reproduction, and scenarios on them.

The kinds and numbers of GPUs are those of the paper; how they are put into machines and what connects these is assumed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from experiments.reproductions.architectures import MODELS
from planner.scenario.cluster import Cluster, Device, Link
from planner.scenario.datasheet import find_kind
from planner.scenario.profile import ModelProfile
from planner.scenario.roofline import roofline_layer
from planner.scenario.scenario import Scenario
from planner.scenario.training import Optimizer, Training

# Cluster to its machines, each as kind and number of GPUs. Assumed: workstations of one GPU in A; in B one machine of
# four A100, one of four V100, and one RTX 6000 a machine.
MACHINES: Mapping[str, Sequence[tuple[str, int]]] = {
    "A": (("a5000", 1), ("a4000", 1), ("p4000", 1)),
    "B": (("a100-40", 4), ("v100-16", 4), *((("rtx-6000", 1),) * 8)),
}

# Assumed: a LAN that does not block, and PCI Express inside of machines.
LAN_LATENCY_S = 50e-6
INSIDE_BPS = 100e9
INSIDE_LATENCY_S = 10e-6

# Assumed: TF32 where the GPU has it, as PyTorch's convolutions by default; 32 bits everywhere else.
PRECISION = "tf32"


def cluster(name: str, network_bps: float) -> Cluster:
    """Return one of `MACHINES`, with network interfaces of ``network_bps`` bits per second."""
    devices, links = [], []
    for number, (kind, count) in enumerate(MACHINES[name]):
        host = f"host-{number}"
        for index in range(count):
            memory_bytes = find_kind(kind).memory_bytes
            device = Device(f"{kind}-{number}-{index}", kind, "lan", memory_bytes, host=host, interface_bps=network_bps)
            devices.append(device)
        if count > 1:
            links.append(Link(host, host, INSIDE_BPS, INSIDE_LATENCY_S))
    links.append(Link("lan", "lan", network_bps * len(MACHINES[name]), LAN_LATENCY_S))
    return Cluster(tuple(devices), tuple(links))


@lru_cache(maxsize=16)
def base_scenario(cluster_name: str, model: str, network_bps: float) -> Scenario:
    """Return a model on a cluster, with the model's first batch.

    Args:
        cluster_name: One of `MACHINES`.
        model: One of `experiments.reproductions.architectures.MODELS`.
        network_bps: Of each machine's network interface, bits per second.
    """
    trained, place = MODELS[model](), cluster(cluster_name, network_bps)
    kinds = [find_kind(kind) for kind in dict.fromkeys(device.kind for device in place.devices)]
    layers = tuple(roofline_layer(work, kinds, PRECISION) for work in trained.layers)
    training = Training(trained.first_batch, optimizer=Optimizer(trained.optimizer))
    return Scenario(f"cluster {cluster_name}", place, ModelProfile(trained.name, layers), training)


def with_batch(scenario: Scenario, batch: int) -> Scenario:
    """Return the scenario with another global batch."""
    return replace(scenario, training=replace(scenario.training, global_batch=batch))
