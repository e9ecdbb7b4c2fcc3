"""The cluster of a measured run: a host for each replica, and a link for each pair of hosts."""

from collections.abc import Mapping
from itertools import product

from experiments.benches.sailor.network import Node, SailorNetwork
from planner.files.importers.sailor_files import KINDS
from planner.scenario.cluster import Cluster, Device, Link

# What ran did fit, whatever a model of memory says.
UNLIMITED_BYTES = 2**60


def gpus_of(host: str, node: Node) -> tuple[str, ...]:
    """Return the names of the GPUs of a host."""
    return tuple(f"{host}-gpu-{number}" for number in range(node.gpus))


def cluster_of(nodes: Mapping[str, Node], network: SailorNetwork) -> Cluster:
    """Return the cluster of hosts, by name, each with the GPUs of one tensor-parallel group.

    The GPUs of a group send at once, each to its counterpart: a flow goes at the measured rate of one GPU, and at most
    at its part of what all of them get together. What they exchange inside their host is in the layers' times; its link
    is given the rate between two such hosts, which nothing depends on.

    Raises:
        InputError: Nobody measured the rate between two of the nodes.
    """
    devices = tuple(
        Device(gpu, KINDS[node.kind], node.zone, UNLIMITED_BYTES, host=host)
        for host, node in nodes.items()
        for gpu in gpus_of(host, node)
    )
    pairs = product(nodes.items(), repeat=2)
    return Cluster(devices, tuple(_link(*source, *target, network) for source, target in pairs))


def _link(source: str, sender: Node, target: str, receiver: Node, network: SailorNetwork) -> Link:
    together_bps = network.curve(sender, receiver).ceiling_bps
    alone = network.curve(Node(sender.zone, sender.kind, 1), Node(receiver.zone, receiver.kind, 1))
    # The time of small messages is in the curve.
    return Link(source, target, together_bps / max(sender.gpus, receiver.gpus), latency_s=0.0, size_curve=alone)
