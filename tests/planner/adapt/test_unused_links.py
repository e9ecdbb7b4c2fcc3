"""Probes of links that a plan does not use: which paths they take, and what a policy sees of them."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from experiments.benches.planning.random_clusters import random_cluster
from planner.adapt.observation import Observer, seen_with_steps
from planner.adapt.unused_links import SMALL_BYTES, UnusedPath, large_packets, link_probe, unused_paths
from planner.check.paths import used_links
from planner.events.event import Event, EventKind
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.scenario.scenario import Scenario
from tests.helpers.scenarios.builders import chain_scenario


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


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 4))
def test_each_link_between_regions_is_used_or_probed(seed: int, stages: int) -> None:
    scenario = random_cluster(seed)
    cluster = scenario.cluster
    assume(len(cluster.regions) > 1)
    plan = plan_of(scenario, tuple(device.name for device in cluster.devices)[-stages:])
    paths = unused_paths(plan, scenario)
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
    # In a region with devices of the plan, one of these sends and receives.
    taking_part = {cluster.by_name[device].region: device for device in plan.devices}
    for device in {device for pair in paths for device in pair}:
        assert device in plan.devices or cluster.by_name[device].region not in taking_part


def test_a_policy_sees_the_least_of_three_delays_once_they_have_come() -> None:
    scenario = random_cluster(1)
    plan, observer = plan_of(scenario, (scenario.cluster.devices[0].name,)), Observer()
    seen = []
    for step, delay_s in enumerate([0.3, 0.1, 0.2, 0.4, 0.5]):
        probe = link_probe("a", "b", step, SMALL_BYTES, 10.0 * step, 10.0 * step + delay_s)
        seen += observer.observe([probe], step, plan).unused
    assert [round(each.latency_s, 6) for each in seen] == [0.3, 0.1, 0.1, 0.1, 0.2]
    assert {each.rate_bps for each in seen} == {None}
    # Nothing came with this step.
    assert observer.observe([], 5, plan).unused == ()
    # A probe does not make a step longer, and belongs to no path of the plan.
    compute = Event(EventKind.COMPUTE, "a", "", 0, 0, 0, 6, "F", 60.0, 61.0, 0)
    late = link_probe("b", "a", 4, SMALL_BYTES, 40.0, 60.5)
    found = observer.observe([compute, late], 6, plan)
    assert (found.end_s, found.paths, found.unused) == (61.0, (), (UnusedPath("b", "a", 20.5),))


def test_a_policy_sees_the_highest_of_three_rates() -> None:
    scenario = random_cluster(1)
    plan, observer = plan_of(scenario, (scenario.cluster.devices[0].name,)), Observer()
    seen = []
    # Of step 4 only the large probe comes, of which nothing tells when it had to come.
    for step, took_s in enumerate([0.01, 0.04, 0.02, 0.05, 0.001, 0.08]):
        small = link_probe("a", "b", step, SMALL_BYTES, 10.0 * step, 10.0 * step + 0.1)
        large = link_probe("a", "b", step, 5000, 10.0 * step, 10.0 * step + 0.1 + took_s)
        seen += observer.observe([large] if step == 4 else [small, large], step, plan).unused
    assert [each.rate_bps for each in seen] == pytest.approx([4e6, 4e6, 4e6, 2e6, 2e6])


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
