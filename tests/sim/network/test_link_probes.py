"""Simulated probes of links that a plan does not use: delays of the links at that time, whatever the run sends."""

from dataclasses import replace

import pytest

from planner.adapt.unused_links import LINK_PROBE_BYTES, is_link_probe
from planner.events.event import Event
from planner.plan.plan import Plan
from planner.scenario.cluster import Cluster, Link
from planner.scenario.faults import LinkOutage
from planner.scenario.scenario import Scenario
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import chain_scenario, layered_plan
from tests.helpers.strategies.scripted_policy import Scripted
from traces.trace import LinkTrace

RATE_BPS = 8.0 * LINK_PROBE_BYTES


def one_device_of_two(trace: LinkTrace | None = None, **link: float) -> tuple[Scenario, Plan]:
    """Return a plan of steps of two seconds on one of two devices; a probe takes a second on the links between them."""
    scenario = chain_scenario([0.5, 0.5], [0.5, 0.5], global_batch=1)
    links = (
        Link("region-0", "region-1", RATE_BPS, 0.25, trace, **link),
        Link("region-1", "region-0", RATE_BPS, 0.5),
    )
    plan = layered_plan(scenario, [([(2, 1, 1)], [1])])
    return replace(scenario, cluster=Cluster(scenario.cluster.devices, links)), plan


def probes(scenario: Scenario, plan: Plan, steps: int = 4) -> list[Event]:
    """Return the probes of a run on the way out."""
    events = Simulator().run(scenario, plan, Scripted({}), steps).events
    return [event for event in events if is_link_probe(event) and event.device == "device-0"]


def test_each_step_sends_one_probe_each_way_which_takes_the_links_time() -> None:
    scenario, plan = one_device_of_two()
    policy = Scripted({})
    record = Simulator().run(scenario, plan, policy, 3)
    found = [event for event in record.events if is_link_probe(event)]
    assert sorted((event.device, event.step, event.start_s, event.arrived_s) for event in found) == [
        *(("device-0", step, 2.0 * step, 2.0 * step + 1.25) for step in range(3)),
        *(("device-1", step, 2.0 * step, 2.0 * step + 1.5) for step in range(3)),
    ]
    assert [seen.unused for seen in policy.seen] == [
        (("device-0", "device-1", 1.25), ("device-1", "device-0", 1.5))
    ] * 3


def test_the_run_is_the_same_with_and_without_probes() -> None:
    scenario, plan = one_device_of_two()
    watched = Simulator().run(scenario, plan, Scripted({}), 3).events
    assert [e for e in watched if not is_link_probe(e)] == list(Simulator().run(scenario, plan, None, 3).events)


def test_a_probe_has_the_latency_and_the_jitter_of_its_moment() -> None:
    changing = LinkTrace([0.0, 3.5], [RATE_BPS, 2 * RATE_BPS], 100.0, [0.25, 1.0])  # type: ignore[arg-type]
    scenario, plan = one_device_of_two(changing, jitter_s=0.1)
    delays_s = [event.arrived_s - event.start_s for event in probes(scenario, plan)]
    # One frame is delayed by half of the jitter in the mean.
    assert delays_s == pytest.approx([1.0 + 0.25 + 0.05] * 2 + [0.5 + 1.0 + 0.05] * 2)


def test_a_probe_waits_while_its_link_is_down_and_is_seen_late() -> None:
    scenario, plan = one_device_of_two()
    down = replace(scenario, faults=(LinkOutage("region-0->region-1", 1.5, 7.5),))
    policy = Scripted({})
    Simulator().run(down, plan, policy, 5)
    out = {seen.step: dict(_delays(seen.unused)).get("device-0") for seen in policy.seen}
    # Those of steps 1 to 3 wait for the end of the outage; that of step 4 has the least delay of the latest three.
    assert out == {0: 1.25, 1: None, 2: None, 3: None, 4: 1.25}


def test_a_link_that_carries_nothing_any_more_loses_probes() -> None:
    dead = LinkTrace([0.0, 2.0], [RATE_BPS, 0.0], 10.0, loops=False)  # type: ignore[arg-type]
    assert [event.step for event in probes(*one_device_of_two(dead))] == [0]


def _delays(unused: tuple[tuple[str, str, float], ...]) -> list[tuple[str, float]]:
    return [(source, delay_s) for source, _, delay_s in unused]
