from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform

from planner.scenario.cluster import Cluster, Device, Link
from planner.scenario.profile import LayerProfile, ModelProfile, TimeTable
from planner.scenario.scenario import Scenario
from planner.scenario.training import Training
from planner.systems.deepcee.device_groups import (
    FAST_PACKET_S,
    LEAST_RISE,
    PACKET_BYTES,
    cut_at_largest_rise,
    device_areas,
    packet_times_s,
)
from tests.helpers.scenarios.builders import chain_scenario

GIB = 2**30
SPEEDS = {"fast": 1.0, "slow": 3.0}


def regional(sites: dict[str, list[str]], *, inside_bps: float = 25e9, between_bps: float = 0.5e9) -> Scenario:
    """Regions with devices of kinds, fast inside, slow between."""
    devices = tuple(
        Device(f"{region}-{index}", kind, region, 16 * GIB)
        for region, kinds in sites.items()
        for index, kind in enumerate(kinds)
    )
    links = [Link(region, region, inside_bps, 1e-4) for region in sites]
    links += [Link(a, b, between_bps, 0.02) for a, b in permutations(sites, 2)]
    times = {kind: TimeTable((1,), (each,), (each,), (each,)) for kind, each in SPEEDS.items()}
    model = ModelProfile("model", (LayerProfile("layer", 4000, 1000, 1000, times),) * 4)
    return Scenario("regional", Cluster(devices, tuple(links)), model, Training(8))


def names(scenario: Scenario) -> list[list[list[str]]]:
    return [[[device.name for device in group] for group in area] for area in device_areas(scenario)]


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.floats(10e9, 100e9),
    st.floats(0.1e9, 1e9),
)
def test_areas_are_the_regions(counts: list[int], inside_bps: float, between_bps: float) -> None:
    sites = {f"region-{index}": ["fast"] * count for index, count in enumerate(counts)}
    found = names(regional(sites, inside_bps=inside_bps, between_bps=between_bps))
    assert found == [[[f"{region}-{index}" for index in range(len(kinds))]] for region, kinds in sites.items()]


def test_groups_of_an_area_are_alike() -> None:
    found = names(regional({"a": ["fast", "slow", "fast"], "b": ["slow"]}))
    assert found == [[["a-0", "a-2"], ["a-1"]], [["b-0"]]]


def test_hosts_inside_a_fast_network_are_no_areas() -> None:
    scenario = regional({"a": ["fast"] * 4, "b": ["fast"]})
    nvlink = [Link(*ends, 2400e9, 1e-6) for ends in (("a-0", "a-1"), ("a-1", "a-0"), ("a-2", "a-3"), ("a-3", "a-2"))]
    cluster = Cluster(scenario.cluster.devices, (*scenario.cluster.links, *nvlink))
    assert [len(area) for area in names(Scenario("x", cluster, scenario.model, scenario.training))] == [1, 1]


def test_the_worse_direction_counts() -> None:
    scenario = chain_scenario([1.0, 1.0], [1.0, 1.0], bandwidth_bps=1e9, latency_s=0.01)
    slower = (Link("region-0", "region-1", 1e8, 0.01), Link("region-1", "region-0", 1e9, 0.01))
    cluster = Cluster(scenario.cluster.devices, slower)
    times_s = packet_times_s(Scenario("x", cluster, scenario.model, scenario.training))
    assert times_s[0, 1] == times_s[1, 0] == pytest.approx(8 * PACKET_BYTES / 1e8 + 0.01, rel=1e-3)


@st.composite
def distances(draw: st.DrawFn) -> list[float]:
    """Of every two devices; many are equal, as between regions, and few enough differ for ties."""
    count = draw(st.integers(3, 14))
    pairs = count * (count - 1) // 2
    return draw(st.lists(st.sampled_from([1.0, 2.0, 3.0, 40.0, 50.0, 900.0]), min_size=pairs, max_size=pairs))


@settings(max_examples=300)
@given(distances())
def test_areas_are_the_clusters_that_scipy_finds(pairs: list[float]) -> None:
    merges = linkage(np.array(pairs) * FAST_PACKET_S, "average")
    heights_s = [FAST_PACKET_S, *merges[:, 2]]
    rises = [later / earlier for earlier, later in pairwise(heights_s)]
    steepest = rises.index(max(rises))
    labels = fcluster(merges, heights_s[steepest] * 1.001, "distance") if max(rises) >= LEAST_RISE else [0] * 99
    expected: dict[int, list[int]] = {}
    areas = cut_at_largest_rise(squareform(pairs) * FAST_PACKET_S)
    for index in range(sum(map(len, areas))):
        expected.setdefault(int(labels[index]), []).append(index)
    assert areas == list(expected.values())
