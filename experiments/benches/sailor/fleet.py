"""Builds the cluster of a fleet in one zone, with the rates between nodes that eth-easl/sailor measured.

The measured rates depend on the GPU kinds at both ends. Therefore the nodes of each kind form a region, and the rate
curves of the links inside and between the regions describe the network, at no price and no latency:

- A link inside or between regions never limits: it can carry the traffic of all interfaces at once.
- A message has the rate that was measured with one GPU at each end.
- A node's interface has the rate that was measured with all GPUs of two such nodes.
- Inside a node a message has the rate measured with two GPUs; all messages share the rate measured with all GPUs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from experiments.benches.sailor.measured_files import Node, SailorNetwork, read_inside
from planner.files.importers import pick
from planner.files.importers.sailor import KINDS
from planner.scenario.cluster import Cluster, Device, Link
from planner.scenario.datasheet import find_kind
from planner.scenario.size_curve import SizeCurve


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """Equal nodes of a fleet, each with ``gpus`` GPUs; the kind is named as in the files, such as ``A100-40``."""

    kind: str
    nodes: int
    gpus: int

    @property
    def name(self) -> str:
        """Return ropebridge's name of the kind, with which the names of devices and hosts begin."""
        return KINDS[self.kind]


def fleet_of(groups: tuple[NodeGroup, ...], zone: str, network: SailorNetwork, inside_path: Path) -> Cluster:
    """Return the cluster of nodes of different kinds in a zone, with memory sizes from datasheets.

    ``inside_path`` is the file of rates inside nodes, such as ``intra_node_bandwidths.json``.

    Raises:
        InputError: There is no measurement of such nodes, or the file is missing or malformed.
    """
    for group in groups:
        pick(KINDS, group.kind, "GPU kind", where="fleet")
    inside = read_inside(inside_path)
    own_bps = {group.kind: _between(group, group, group.gpus, zone, network).ceiling_bps for group in groups}
    devices = [device for group in groups for device in _devices(group, zone, own_bps[group.kind])]
    fabric_bps = sum(group.nodes * own_bps[group.kind] for group in groups)
    links = [
        Link(
            _region(source, zone),
            _region(target, zone),
            fabric_bps,
            latency_s=0.0,  # The rate curve includes the latency, as the time of small messages.
            size_curve=_between(source, target, 1, zone, network),
        )
        for source, target in product(groups, repeat=2)
    ]
    nodes = [link for group in groups if group.gpus > 1 for link in _inside(group, inside, str(inside_path))]
    return Cluster(tuple(devices), (*links, *nodes))


def _region(group: NodeGroup, zone: str) -> str:
    return f"{zone}/{group.name}"


def _between(source: NodeGroup, target: NodeGroup, gpus: int, zone: str, network: SailorNetwork) -> SizeCurve:
    return network.curve(Node(zone, source.kind, gpus), Node(zone, target.kind, gpus))


def _hosts(group: NodeGroup) -> list[str]:
    return [f"{group.name}-node-{number}" for number in range(group.nodes)]


def _devices(group: NodeGroup, zone: str, interface_bps: float) -> list[Device]:
    memory_bytes = find_kind(group.name).memory_bytes
    return [
        Device(
            f"{host}-gpu-{gpu}", group.name, _region(group, zone), memory_bytes, host=host, interface_bps=interface_bps
        )
        for host in _hosts(group)
        for gpu in range(group.gpus)
    ]


def _inside(group: NodeGroup, inside: Mapping[tuple[str, int], SizeCurve], where: str) -> list[Link]:
    pairs = {gpus: curve for (kind, gpus), curve in inside.items() if kind == group.kind}
    pair = pick(pairs, 2, f"number of GPUs of a {group.kind} node", where=where)
    together_bps = pick(pairs, group.gpus, f"number of GPUs of a {group.kind} node", where=where).ceiling_bps
    return [Link(host, host, together_bps, latency_s=0.0, size_curve=pair) for host in _hosts(group)]
