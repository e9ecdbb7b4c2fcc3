"""Probes of links that a plan does not use: which paths they take, and what a policy sees of them."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from experiments.benches.planning.random_clusters import random_cluster
from planner.adapt.observation import Observer, seen_with_steps
from planner.adapt.unused_links import (
    HOSTS_S,
    SMALL_BYTES,
    UnusedPath,
    large_packets,
    link_probe,
    probed_with,
    unused_paths,
)
from planner.check.paths import used_links
from planner.events.event import Event, EventKind
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.scenario.cluster import Cluster, Link
from planner.scenario.scenario import Scenario
from tests.helpers.scenarios.builders import chain_scenario, mesh_scenario


def plan_of(scenario: Scenario, devices: tuple[str, ...]) -> Plan:
    """Return a pipeline of a stage on each device."""
    layers = len(scenario.model.layers)
    cuts = [place * layers // len(devices) for place in range(len(devices) + 1)]
    stages = tuple(
        Stage(first, end, (Replica(device, 1.0),), 1)
        for first, end, device in zip(cuts, cuts[1:], devices, strict=False)
    )
    pipeline = Pipeline(stages, (scenario.training.global_batch,))
    return Plan(scenario.name, scenario.model.name, "drawn", "1f1b", (pipeline,))


def with_direct_links(scenario: Scenario, random: Random) -> Scenario:
    """Return the scenario with links of their own between some devices and hosts of different regions."""
    cluster, links = scenario.cluster, {link.name: link for link in scenario.cluster.links}
    for _ in range(random.randrange(4)):
        one, other = random.sample(cluster.devices, 2)
        if one.region != other.region:
            place = random.choice(("name", "machine"))
            link = Link(getattr(one, place), getattr(other, place), 1e8, 0.01)
            links[link.name] = link
    return replace(scenario, cluster=Cluster(cluster.devices, tuple(links.values())))


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 4), st.randoms(use_true_random=False))
def test_each_link_between_regions_is_used_or_probed(seed: int, stages: int, random: Random) -> None:
    scenario = with_direct_links(random_cluster(seed), random)
    cluster = scenario.cluster
    assume(len(cluster.regions) > 1)
    plan = plan_of(scenario, tuple(device.name for device in cluster.devices)[-stages:])
    everyone = frozenset(device.name for device in cluster.devices)
    paths = unused_paths(plan, scenario, everyone)
    used = {link.name for link in used_links(plan, scenario)}
    probed = [{link.name for link in cluster.path(*pair)} for pair in paths]
    between = {
        link.name
        for one in cluster.devices
        for other in cluster.devices
        if one.region != other.region
        for link in cluster.path(one.name, other.name)
    }
    assert between & cluster.wan_links <= used.union(*probed)
    # None for nothing, and none twice.
    for place, names in enumerate(probed):
        assert (names & cluster.wan_links) - used.union(*probed[:place])


def test_devices_of_the_plan_take_part_and_none_that_is_away() -> None:
    scenario = mesh_scenario(6, [1.0] * 2, [1.0] * 2)
    devices = tuple(replace(each, region=f"region-{place // 2}") for place, each in enumerate(scenario.cluster.devices))
    links = tuple(Link(f"region-{a}", f"region-{b}", 1e8, 0.02) for a in range(3) for b in range(3))
    scenario = replace(scenario, cluster=Cluster(devices, links))
    names = [device.name for device in devices]
    plan = plan_of(scenario, (names[1],))
    assert {device for pair in unused_paths(plan, scenario, frozenset(names)) for device in pair} == {
        names[1],
        names[2],
        names[4],
    }
    present = frozenset(names) - {names[2]}
    assert {device for pair in unused_paths(plan, scenario, present) for device in pair} == {
        names[1],
        names[3],
        names[4],
    }


def test_many_paths_are_probed_in_turn() -> None:
    paths = [(str(place), "x") for place in range(150)]
    parts = [probed_with(step, paths) for step in range(6)]
    assert sorted(path for part in parts[:3] for path in part) == sorted(paths)
    assert parts[3:] == parts[:3]
    assert probed_with(7, paths[:64]) == paths[:64]


def test_a_policy_sees_the_least_of_three_delays_once_they_have_come() -> None:
    scenario = random_cluster(1)
    plan, observer = plan_of(scenario, (scenario.cluster.devices[0].name,)), Observer()
    seen = []
    for step, delay_s in enumerate([0.3, 0.1, 0.2, 0.4, 0.5]):
        probe = link_probe("a", "b", step, SMALL_BYTES, 10.0 * step, 10.0 * step + delay_s)
        seen += observer.observe([probe], step, plan).unused
    assert [round(each.latency_s, 6) for each in seen] == [0.3, 0.1, 0.1, 0.1, 0.2]
    assert {each.rate_bps for each in seen} == {None}
    # Older ones than a minute do not count.
    (after,) = observer.observe([link_probe("a", "b", 9, SMALL_BYTES, 200.0, 200.9)], 5, plan).unused
    assert after.latency_s == pytest.approx(0.9)
    # Nothing came with this step.
    assert observer.observe([], 5, plan).unused == ()
    # A probe does not make a step longer, and belongs to no path of the plan.
    compute = Event(EventKind.COMPUTE, "a", "", 0, 0, 0, 6, "F", 60.0, 61.0, 0)
    late = link_probe("b", "a", 4, SMALL_BYTES, 40.0, 60.5)
    found = observer.observe([compute, late], 6, plan)
    assert (found.end_s, found.paths, found.unused) == (61.0, (), (UnusedPath("b", "a", 20.5),))


def pair(step: int, took_s: float) -> list[Event]:
    """Return the small and the large probe of a step, which came ``took_s`` seconds after it."""
    start_s = 10.0 * step
    small = link_probe("a", "b", step, SMALL_BYTES, start_s, start_s + 0.1)
    return [small, link_probe("a", "b", step, 5000, start_s, start_s + 0.1 + took_s)]


def test_a_policy_sees_the_highest_of_three_rates() -> None:
    scenario = random_cluster(1)
    plan, observer = plan_of(scenario, (scenario.cluster.devices[0].name,)), Observer()
    seen = []
    for step, took_s in enumerate([0.01, 0.04, 0.02, 0.05, 0.08]):
        # In whatever order they are recorded.
        seen += observer.observe(reversed(pair(step, took_s)), step, plan).unused
    assert [each.rate_bps for each in seen] == pytest.approx([4e6, 4e6, 4e6, 2e6, 2e6])
    # Of hosts alone it can come so soon, whatever the link's rate.
    (soon,) = observer.observe(pair(5, 0.9 * HOSTS_S), 5, plan).unused
    assert soon.rate_bps is None
    # After a minute without large ones nothing is known, but the delay is.
    (later,) = observer.observe(pair(13, 0.1)[:1], 13, plan).unused
    assert (later.rate_bps, later.latency_s) == (None, pytest.approx(0.1))


def test_a_large_probe_may_come_long_after_the_next_small_ones() -> None:
    scenario = random_cluster(1)
    plan, observer = plan_of(scenario, (scenario.cluster.devices[0].name,)), Observer()
    small, large = pair(0, 40.0)
    (first,) = observer.observe([small], 0, plan).unused
    assert first.rate_bps is None
    for step in (1, 2, 3):
        observer.observe(pair(step, 0.0)[:1], step, plan)
    (last,) = observer.observe([*pair(4, 0.0)[:1], large], 4, plan).unused
    assert last.rate_bps == pytest.approx(1000.0)
    # One without its small one tells nothing.
    (alone,) = Observer().observe([*pair(4, 0.0)[:1], large], 4, plan).unused
    assert alone.rate_bps is None


def test_a_large_probe_takes_milliseconds_at_the_declared_rate() -> None:
    for rate_bps, packets in ((1e6, 4), (100e6, 18), (10e9, 64)):
        scenario = chain_scenario([0.1, 0.1], [0.2, 0.2], bandwidth_bps=rate_bps)
        assert large_packets("device-0", "device-1", scenario) == packets


def test_a_recorded_probe_is_seen_with_the_first_step_that_ends_after_its_arrival() -> None:
    steps = [Event(EventKind.COMPUTE, "a", "", 0, 0, 0, step, "F", step, step + 1.0, 0) for step in range(3)]
    probe = link_probe("a", "b", 0, SMALL_BYTES, 0.0, 1.5)
    assert {step: probe in events for step, events in seen_with_steps([*steps, probe]).items()} == {
        0: False,
        1: True,
        2: False,
    }
