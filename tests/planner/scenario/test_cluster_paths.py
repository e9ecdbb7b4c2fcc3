"""The links that bytes take: between devices, hosts and regions, and through network interfaces."""

import math
from collections import deque
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.scenario.cluster import Cluster, ClusterError, Device, Link
from traces.common.errors import InputError

GBPS = 1e9


def device(name: str, region: str, host: str = "", interface_bps: float = math.inf) -> Device:
    return Device(name, "kind", region, 2**30, host=host, interface_bps=interface_bps)


def link(source: str, target: str) -> Link:
    return Link(source, target, GBPS, 0.001)


def names(cluster: Cluster, source: str, target: str) -> list[str]:
    return [each.name for each in cluster.path(source, target)]


# Two hosts of two devices in one region, a lone device in another.
BOX = (device("a0", "west", "box", 10 * GBPS), device("a1", "west", "box", 10 * GBPS))
TOWER = (device("b0", "west", "tower", 5 * GBPS), device("b1", "west", "tower", 5 * GBPS))
LONE = (device("c", "east", interface_bps=GBPS),)
FIELD = (device("d", "east"),)
EVERYBODY = (*BOX, *TOWER, *LONE, *FIELD)
REGIONS = (link("west", "west"), link("west", "east"), link("east", "west"), link("east", "east"))


def test_interfaces_are_the_first_and_the_last_link_between_hosts() -> None:
    cluster = Cluster(EVERYBODY, REGIONS)
    assert names(cluster, "a0", "b1") == ["box->network", "west->west", "network->tower"]
    assert names(cluster, "b1", "a0") == ["tower->network", "west->west", "network->box"]
    assert names(cluster, "a1", "c") == ["box->network", "west->east", "network->c"]
    # A device without a host has a machine of its own, and one without a rate has no interface that binds.
    assert names(cluster, "c", "d") == ["c->network", "east->east"]
    assert names(cluster, "d", "a0") == ["east->west", "network->box"]


def test_devices_of_one_host() -> None:
    cluster = Cluster(EVERYBODY, REGIONS)
    together = {(one, other) for one in cluster.by_name for other in cluster.by_name if cluster.same_host(one, other)}
    boxes = {(one.name, other.name) for host in (BOX, TOWER) for one in host for other in host}
    assert together == boxes | {("c", "c"), ("d", "d")}


def test_devices_of_one_host_share_its_interface() -> None:
    cluster = Cluster(EVERYBODY, REGIONS)
    assert cluster.path("a0", "b0") == cluster.path("a1", "b1")
    leaving, _, entering = cluster.path("a0", "b0")
    assert (leaving.bandwidth_bps, leaving.latency_s) == (10 * GBPS, 0)
    assert (entering.bandwidth_bps, entering.latency_s) == (5 * GBPS, 0)


def test_inside_a_host_no_interface_is_passed() -> None:
    inside = Cluster(EVERYBODY, (*REGIONS, link("box", "box")))
    assert names(inside, "a0", "a1") == ["box->box"]
    # Without a link of its own a host's devices talk over the region's, but do not leave the host.
    assert names(inside, "b0", "b1") == ["west->west"]


def test_the_nearest_link_wins() -> None:
    links = list(REGIONS)
    assert names(Cluster(EVERYBODY, tuple(links)), "a0", "b0")[1] == "west->west"
    links.append(link("box", "tower"))
    assert names(Cluster(EVERYBODY, tuple(links)), "a0", "b0") == ["box->network", "box->tower", "network->tower"]
    assert names(Cluster(EVERYBODY, tuple(links)), "b0", "a0")[1] == "west->west"
    links.append(link("a0", "b0"))
    assert names(Cluster(EVERYBODY, tuple(links)), "a0", "b0") == ["box->network", "a0->b0", "network->tower"]
    assert names(Cluster(EVERYBODY, tuple(links)), "a1", "b0")[1] == "box->tower"
    links.append(link("a0", "a1"))
    links.append(link("box", "box"))
    assert names(Cluster(EVERYBODY, tuple(links)), "a0", "a1") == ["a0->a1"]
    assert names(Cluster(EVERYBODY, tuple(links)), "a1", "a0") == ["box->box"]


def test_a_host_in_two_regions_or_with_two_interfaces() -> None:
    with pytest.raises(ClusterError, match="'a0' and 'x' of host 'box' differ in region or interface") as refused:
        Cluster((*BOX, device("x", "east", "box", 10 * GBPS)), ())
    assert refused.value.location == ("devices", 2, "host")
    with pytest.raises(ClusterError, match="differ in region or interface"):
        Cluster((*BOX, device("x", "west", "box", 9 * GBPS)), ())
    with pytest.raises(ClusterError, match="'west' is both a host and a region"):
        Cluster((device("x", "west", "west"),), ())
    with pytest.raises(ClusterError, match="the network interface of device 'x' carries nothing"):
        Cluster((device("x", "west", interface_bps=0.0),), ())


def test_a_link_to_a_host_that_is_not_there() -> None:
    with pytest.raises(ClusterError, match=r"ends at 'boxes'.*hosts: box, tower"):
        Cluster(EVERYBODY, (link("box", "boxes"),))


def test_hosts_in_regions_without_a_link() -> None:
    cluster = Cluster((*BOX, *TOWER, *LONE), (link("box", "tower"), link("box", "box")))
    assert names(cluster, "a0", "b0") == ["box->network", "box->tower", "network->tower"]
    with pytest.raises(InputError, match="no link leads from device 'b0' to 'a0'"):
        cluster.path("b0", "a0")
    with pytest.raises(InputError, match=r"no link leads from region 'west' \(device 'a0'\) to 'east'"):
        cluster.path("a0", "c")


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Regions with links among some of them, and a host of two devices in each, with an interface or without."""
    regions = [f"region-{index}" for index in range(draw(st.integers(1, 5)))]
    pairs = [(a, b) for a in regions for b in regions]
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True))
    devices = []
    for region in regions:
        interface_bps = draw(st.sampled_from([math.inf, GBPS]))
        devices += [device(f"{region}-{n}", region, f"host-{region}", interface_bps) for n in range(2)]
    return Cluster(tuple(devices), tuple(link(*pair) for pair in chosen))


def hops(cluster: Cluster, start: str) -> dict[str, int]:
    """The fewest links from a region to each that can be reached."""
    found, queue = {start: 0}, deque([start])
    while queue:
        region = queue.popleft()
        for each in cluster.links:
            if each.source == region and each.target not in found:
                found[each.target] = found[region] + 1
                queue.append(each.target)
    return found


@given(clusters())
def test_a_path_is_connected_has_the_fewest_links_and_passes_the_interfaces_of_both_ends(cluster: Cluster) -> None:
    for source in cluster.devices:
        reached = hops(cluster, source.region)
        for target in cluster.devices:
            if source is target:
                assert cluster.path(source.name, target.name) == ()
                continue
            inside = source.region == target.region
            linked = any(each.source == each.target == source.region for each in cluster.links)
            if target.region not in reached or (inside and not linked):
                with pytest.raises(InputError, match="no link leads"):
                    cluster.path(source.name, target.name)
                continue
            path = list(cluster.path(source.name, target.name))
            if source.machine != target.machine:
                if source.interface_bps < math.inf:
                    assert path.pop(0).name == f"{source.machine}->network"
                if target.interface_bps < math.inf:
                    assert path.pop().name == f"network->{target.machine}"
            assert path[0].source == source.region
            assert path[-1].target == target.region
            assert all(one.target == other.source for one, other in pairwise(path))
            assert len(path) == (1 if inside else reached[target.region])
            assert cluster.crosses_regions(source.name, target.name) is not inside


@given(st.permutations([(relay, *hop) for relay in "bcd" for hop in (("a", relay), (relay, "e"))]), st.data())
def test_of_routes_with_equally_many_links_the_quickest_is_taken_however_they_are_listed(
    listed: list[tuple[str, str, str]], data: st.DataObject
) -> None:
    latencies_s = {relay: data.draw(st.sampled_from([0.001, 0.002])) for relay in "bcd"}
    rates_bps = dict(zip("bcd", data.draw(st.permutations([GBPS, 2 * GBPS, 3 * GBPS])), strict=True))
    links = tuple(Link(*ends, rates_bps[relay], latencies_s[relay]) for relay, *ends in listed)
    cluster = Cluster(tuple(device(f"in-{region}", region) for region in "abcde"), links)
    best = min("bcd", key=lambda relay: (latencies_s[relay], -rates_bps[relay]))
    assert names(cluster, "in-a", "in-e") == [f"a->{best}", f"{best}->e"]
