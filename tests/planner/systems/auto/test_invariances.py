"""What must not change a plan's step, and what must not lengthen it: order, names, faster links, more devices."""

from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from experiments.benches.planning.random_clusters import (
    random_cluster,
    region_subsets,
    relisted,
    renamed,
)
from planner.scenario.cluster import Cluster, Device, Link
from planner.scenario.effects import Effects
from planner.scenario.profile import LayerProfile, TimeTable
from planner.scenario.scenario import Scenario, allowing_compressions, within_regions
from planner.systems.auto.canonical import canonical
from planner.systems.auto.objective import contended_step_time_s
from planner.systems.auto.strategy import auto
from traces.common.errors import InputError

# Shrinking would plan hundreds of times, for minutes.
GENERATE = [Phase.explicit, Phase.reuse, Phase.generate]

# So few that a plan takes a second or two.
MOST_DEVICES = 5

# A step may be longer by this share where the search has more to choose from.
GRACE = 1.01


def small_cluster(seed: int, regions: int = 1) -> Scenario:
    """The first of the clusters from a seed on that has few devices, in so many regions at least."""
    while True:
        scenario = random_cluster(seed)
        if len(scenario.cluster.devices) <= MOST_DEVICES and len(scenario.cluster.regions) >= regions:
            return scenario
        seed += 1


SCENARIOS = st.integers(0, 10**5).map(small_cluster)


def step_s(scenario: Scenario) -> float:
    """The step of the plan for a scenario, infinite if there is none."""
    try:
        return contended_step_time_s(auto(scenario), scenario)
    except InputError:
        return float("inf")


def with_links(scenario: Scenario, links: tuple[Link, ...]) -> Scenario:
    return replace(scenario, cluster=Cluster(scenario.cluster.devices, links))


@settings(max_examples=50)
@given(st.integers(0, 10**5), st.integers(0, 10**5))
def test_devices_have_one_order_however_they_are_listed_and_named(seed: int, order: int) -> None:
    scenario = random_cluster(seed)

    def described(each: Scenario) -> list[tuple[object, ...]]:
        cluster = canonical(each).cluster
        devices = cluster.devices
        kinds = [(device.kind, device.interface_bps) for device in devices]
        paths = [
            [
                tuple((link.bandwidth_bps, link.latency_s) for link in cluster.path(one.name, other.name))
                for other in devices
            ]
            for one in devices
        ]
        return list(zip(kinds, paths, strict=True))

    assert canonical(canonical(scenario)) is canonical(scenario)
    assert described(relisted(scenario, order)) == described(renamed(scenario, order)) == described(scenario)


@pytest.mark.slow
@settings(max_examples=2, phases=GENERATE)
@given(SCENARIOS, st.integers(0, 10**5))
def test_order_and_names_change_nothing(scenario: Scenario, order: int) -> None:
    plain_s = step_s(scenario)
    assert step_s(relisted(scenario, order)) == pytest.approx(plain_s, rel=1e-6)
    assert step_s(renamed(scenario, order)) == pytest.approx(plain_s, rel=1e-6)


@pytest.mark.slow
@settings(max_examples=2, phases=GENERATE)
@given(SCENARIOS, st.data())
def test_a_better_link_never_lengthens_the_step(scenario: Scenario, data: st.DataObject) -> None:
    links = scenario.cluster.links
    at = data.draw(st.integers(0, len(links) - 1))
    factor = data.draw(st.sampled_from([1.1, 1.5, 3.0]))
    plain_s = step_s(scenario)
    for better in (
        replace(links[at], bandwidth_bps=factor * links[at].bandwidth_bps),
        replace(links[at], latency_s=links[at].latency_s / factor),
    ):
        changed = with_links(scenario, (*links[:at], better, *links[at + 1 :]))
        assert step_s(changed) <= GRACE * plain_s


@pytest.mark.slow
@settings(max_examples=2, phases=GENERATE)
@given(SCENARIOS, st.data())
def test_one_more_device_never_lengthens_the_step(scenario: Scenario, data: st.DataObject) -> None:
    devices = scenario.cluster.devices
    gone = data.draw(st.sampled_from([device.name for device in devices]))
    left = tuple(device for device in devices if device.name != gone)
    ends = {name for device in left for name in (device.machine, device.region)}
    links = tuple(link for link in scenario.cluster.links if {link.source, link.target} <= ends)
    fewer = replace(scenario, cluster=Cluster(left, links))
    assert step_s(scenario) <= GRACE * step_s(fewer)


@pytest.mark.slow
@settings(max_examples=2, phases=GENERATE)
@given(st.integers(0, 10**5).map(lambda seed: small_cluster(seed, regions=2)))
def test_one_more_region_never_lengthens_the_step(scenario: Scenario) -> None:
    whole_s = step_s(scenario)
    for regions in region_subsets(scenario):
        assert whole_s <= GRACE * step_s(within_regions(scenario, regions))


@pytest.mark.slow
@settings(max_examples=2, phases=GENERATE)
@given(st.integers(0, 10**5).map(lambda seed: small_cluster(seed, regions=2)))
def test_leave_to_compress_never_lengthens_the_step(scenario: Scenario) -> None:
    free = allowing_compressions(scenario, ("none", "int8"))
    assert step_s(free) <= GRACE * step_s(scenario)


@pytest.mark.slow
@settings(max_examples=2, phases=GENERATE)
@given(SCENARIOS)
def test_twice_as_fast_is_half_as_long(scenario: Scenario) -> None:
    def halved(table: TimeTable) -> TimeTable:
        columns = (table.forward_s, table.backward_input_s, table.backward_weight_s)
        return TimeTable(table.samples, *(tuple(each / 2 for each in column) for column in columns))

    def layer(each: LayerProfile) -> LayerProfile:
        return replace(each, times={kind: halved(table) for kind, table in each.times.items()})

    def device(each: Device) -> Device:
        return replace(each, interface_bps=2 * each.interface_bps)

    # With TCP, windows and hand-over would have to be twice as good as well.
    scenario = replace(scenario, effects=Effects())
    model = replace(scenario.model, layers=tuple(map(layer, scenario.model.layers)))
    devices = tuple(map(device, scenario.cluster.devices))
    links = tuple(
        replace(link, bandwidth_bps=2 * link.bandwidth_bps, latency_s=link.latency_s / 2)
        for link in scenario.cluster.links
    )
    fast = replace(scenario, model=model, cluster=Cluster(devices, links))
    assert 2 * step_s(fast) == pytest.approx(step_s(scenario), rel=1e-6)
