from pathlib import Path

import pytest

from experiments.benches.sailor.fleet import NodeGroup, fleet_of
from experiments.benches.sailor.measured_files import (
    SailorNetwork,
)
from planner.cost.network import nominal_path
from planner.scenario.cluster import Cluster
from planner.scenario.profile import ModelProfile
from planner.scenario.scenario import Scenario
from planner.scenario.training import Training
from tests.helpers.scenarios.fleet_files import write_fleet_files
from traces.common.errors import InputError

ZONE = "us-central1-a"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_fleet_files(tmp_path)
    return tmp_path


def fleet(folder: Path, *groups: NodeGroup) -> Cluster:
    return fleet_of(groups, ZONE, SailorNetwork(folder / "network.json"), folder / "intra_node_bandwidths.json")


def seconds_for_a_gigabyte(cluster: Cluster, source: str, target: str) -> float:
    scenario = Scenario("fleet", cluster, ModelProfile("none", ()), Training(1))
    path = nominal_path(scenario, source, target)
    assert path.latency_s == 0
    return path.transmission_s(1e9)


def test_devices_are_those_of_the_nodes(folder: Path) -> None:
    cluster = fleet(folder, NodeGroup("A100-40", 2, 4), NodeGroup("V100-16", 3, 2))
    assert len(cluster.devices) == 14
    assert cluster.regions == (f"{ZONE}/a100-40", f"{ZONE}/v100-16")
    last = cluster.by_name["v100-16-node-2-gpu-1"]
    assert (last.kind, last.host, last.memory_bytes) == ("v100-16", "v100-16-node-2", 16 * 2**30)
    # All GPUs of two nodes of its kind together: 2 at 1 GB/s.
    assert last.interface_bps == 16e9


def test_links_grow_with_nodes_and_not_with_pairs(folder: Path) -> None:
    cluster = fleet(folder, NodeGroup("A100-40", 32, 4), NodeGroup("V100-16", 96, 4))
    assert len(cluster.links) == 2 * 2 + 32 + 96


def test_a_message_goes_at_the_rate_of_the_kinds(folder: Path) -> None:
    cluster = fleet(folder, NodeGroup("A100-40", 2, 4), NodeGroup("V100-16", 2, 4))
    a100, a100_beside, a100_away = ("a100-40-node-0-gpu-0", "a100-40-node-0-gpu-1", "a100-40-node-1-gpu-0")
    v100, v100_away = ("v100-16-node-0-gpu-0", "v100-16-node-1-gpu-3")
    assert seconds_for_a_gigabyte(cluster, a100, a100_away) == pytest.approx(1 / 2)
    assert seconds_for_a_gigabyte(cluster, a100, v100) == pytest.approx(1)
    assert seconds_for_a_gigabyte(cluster, v100, a100) == pytest.approx(1)
    assert seconds_for_a_gigabyte(cluster, v100, v100_away) == pytest.approx(1)
    assert seconds_for_a_gigabyte(cluster, a100, a100_beside) == pytest.approx(1 / 20)


def test_the_fabric_never_blocks(folder: Path) -> None:
    cluster = fleet(folder, NodeGroup("A100-40", 3, 4), NodeGroup("V100-16", 5, 4))
    interfaces_bps = sum(
        cluster.by_name[f"{host}-gpu-0"].interface_bps
        for host in dict.fromkeys(device.host for device in cluster.devices)
    )
    between = [link for link in cluster.links if link.source in cluster.regions]
    assert [link.bandwidth_bps for link in between] == [interfaces_bps] * 4


def test_a_node_of_one_gpu_needs_no_link_inside(folder: Path) -> None:
    assert len(fleet(folder, NodeGroup("A100-40", 5, 1)).links) == 1


def test_what_nobody_measured_is_refused(folder: Path) -> None:
    with pytest.raises(InputError, match="unknown GPU kind 'H100'"):
        fleet(folder, NodeGroup("H100", 1, 4))
    with pytest.raises(InputError, match="unknown number of GPUs '8'"):
        fleet(folder, NodeGroup("A100-40", 1, 8))


def test_the_published_network_has_the_fleets(shared_folder: Path) -> None:
    providers = shared_folder / "profiles" / "sailor" / "providers"
    network = SailorNetwork(providers / "multizone_bandwidths_het.json")
    groups = (NodeGroup("A100-40", 8, 4), NodeGroup("V100-16", 24, 4))
    cluster = fleet_of(groups, ZONE, network, providers / "intra_node_bandwidths.json")
    assert len(cluster.devices) == 128
    together_bps = {device.kind: device.interface_bps for device in cluster.devices}
    assert together_bps["a100-40"] == pytest.approx(48.3e9, rel=0.01)
    assert together_bps["v100-16"] == pytest.approx(46.3e9, rel=0.01)
