"""A fleet of one zone as eth-easl/sailor measured it: nodes of a few kinds, each node's GPUs, and the rates between.

The rates depend on the kinds at both ends, so the nodes of each kind are a region of their own of the same zone, and
four curves say all that there is, however many nodes there are; traffic between kinds therefore counts as traffic
between regions, at no price and no latency. Between nodes the fabric never blocks: a link inside or between the regions
has room for all interfaces at once, a message goes at the rate of one GPU at each end, and a node's interface carries
what all GPUs of two such nodes were measured to exchange together. Inside a node a pair of GPUs goes at its own rate,
and all together at most at the rate of all.
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
    """Equal nodes of a fleet, with so many GPUs each; the kind is as in the files: ``A100-40``."""

    kind: str
    nodes: int
    gpus: int

    @property
    def name(self) -> str:
        """Our name of the kind, of which devices and hosts get theirs."""
        return KINDS[self.kind]


def fleet_of(groups: tuple[NodeGroup, ...], zone: str, network: SailorNetwork, inside_path: Path) -> Cluster:
    """Return the cluster of a fleet, each group of another kind, with memory as vendors give it.

    Args:
        groups: Equal nodes each.
        zone: Name of the zone as in the files, ``us-central1-a``.
        network: Rates between nodes.
        inside_path: Rates inside nodes, such as ``intra_node_bandwidths.json``.

    Raises:
        InputError: Nobody measured such nodes, or the file is missing or malformed.
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
            latency_s=0.0,  # The time of small messages is in the curve.
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
