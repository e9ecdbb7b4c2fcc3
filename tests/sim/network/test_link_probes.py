"""Simulated probes of links that a plan does not use: delays and rates at that time, whatever the run sends."""

from dataclasses import replace

import pytest

from planner.adapt.unused_links import PACKET_BYTES, SMALL_BYTES, UnusedPath, is_link_probe
from planner.events.event import Event
from planner.plan.plan import Plan
from planner.scenario.cluster import Cluster, Link
from planner.scenario.faults import Absence, LinkOutage
from planner.scenario.profile import TimeTable
from planner.scenario.scenario import Scenario
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import chain_scenario, layered_plan
from tests.helpers.strategies.scripted_policy import Measuring, Scripted
from traces.trace import LinkTrace

# A large probe has the fewest packets on a link of this rate, and takes a tenth of a second.
RATE_BPS = 10 * 8.0 * 4 * PACKET_BYTES
SMALL_S = 8 * SMALL_BYTES / RATE_BPS


def one_device_of_two(trace: LinkTrace | None = None, **link: float) -> tuple[Scenario, Plan]:
    """Return a plan of steps of ten seconds on one of two devices."""
    scenario = chain_scenario([2.5, 2.5], [2.5, 2.5], global_batch=1)
    links = (
        Link("region-0", "region-1", RATE_BPS, 0.25, trace, **link),
        Link("region-1", "region-0", RATE_BPS, 0.5),
    )
    plan = layered_plan(scenario, [([(2, 1, 1)], [1])])
    return replace(scenario, cluster=Cluster(scenario.cluster.devices, links)), plan


def probes(scenario: Scenario, plan: Plan, size_bytes: int = SMALL_BYTES) -> list[Event]:
    """Return the probes of a size in a run of four steps, on the way out."""
    events = Simulator().run(scenario, plan, Measuring({}), 4).events
    found = [event for event in events if is_link_probe(event) and event.device == "device-0"]
    return [event for event in found if event.size_bytes == size_bytes]


def test_each_step_sends_two_probes_each_way_which_take_the_links_time() -> None:
    scenario, plan = one_device_of_two()
    policy = Measuring({})
    record = Simulator().run(scenario, plan, policy, 3)
    delays_s = {
        (each.device, each.step, each.start_s, each.size_bytes): each.arrived_s - each.start_s
        for each in record.events
        if is_link_probe(each)
    }
    expected_s = {}
    for device, latency_s in (("device-0", 0.25), ("device-1", 0.5)):
        for step in range(3):
            expected_s[device, step, 10.0 * step, SMALL_BYTES] = latency_s + SMALL_S
            expected_s[device, step, 10.0 * step, 4 * PACKET_BYTES] = latency_s + SMALL_S + 0.1
    assert delays_s == pytest.approx(expected_s)
    for seen in policy.seen:
        out, back = seen.unused
        assert (out.source, out.target, back.source) == ("device-0", "device-1", "device-1")
        assert (out.latency_s, back.latency_s) == pytest.approx((0.25 + SMALL_S, 0.5 + SMALL_S))
        assert (out.rate_bps, back.rate_bps) == pytest.approx((RATE_BPS, RATE_BPS))


def test_policies_that_do_not_ask_for_it_cost_nothing() -> None:
    scenario, plan = one_device_of_two()
    policy = Scripted({})
    record = Simulator().run(scenario, plan, policy, 3)
    assert not any(is_link_probe(event) for event in record.events)
    assert [seen.unused for seen in policy.seen] == [()] * 3


def test_a_link_is_probed_once_in_a_second_at_most() -> None:
    scenario, plan = one_device_of_two()
    layers = tuple(
        replace(layer, times={kind: _shorter(table, 1 / 40) for kind, table in layer.times.items()})
        for layer in scenario.model.layers
    )
    quick = replace(scenario, model=replace(scenario.model, layers=layers))
    record = Simulator().run(quick, plan, Measuring({}), 12)
    steps = [event.step for event in record.events if is_link_probe(event) and event.size_bytes == SMALL_BYTES]
    assert sorted(steps) == [0, 0, 4, 4, 8, 8]
    # Large ones cost more.
    assert {event.step for event in record.events if is_link_probe(event) and event.size_bytes > SMALL_BYTES} == {0}


def test_the_run_is_the_same_with_and_without_probes() -> None:
    scenario, plan = one_device_of_two()
    watched = Simulator().run(scenario, plan, Measuring({}), 3).events
    assert [e for e in watched if not is_link_probe(e)] == list(Simulator().run(scenario, plan, None, 3).events)


def test_a_probe_has_the_latency_and_the_jitter_of_its_moment() -> None:
    changing = LinkTrace([0.0, 17.5], [RATE_BPS, RATE_BPS], 100.0, [0.25, 1.0])  # type: ignore[arg-type]
    scenario, plan = one_device_of_two(changing, jitter_s=0.1)
    delays_s = [event.arrived_s - event.start_s for event in probes(scenario, plan)]
    # One frame is delayed by half of the jitter in the mean.
    assert delays_s == pytest.approx([SMALL_S + 0.25 + 0.05] * 2 + [SMALL_S + 1.0 + 0.05] * 2)


def test_large_probes_show_that_a_rate_has_collapsed() -> None:
    collapsing = LinkTrace([0.0, 17.5], [RATE_BPS, RATE_BPS / 20], 100.0)  # type: ignore[arg-type]
    policy = Measuring({})
    scenario, plan = one_device_of_two(collapsing)
    Simulator().run(scenario, plan, policy, 8)
    rates_bps = [path.rate_bps for seen in policy.seen for path in seen.unused if path.source == "device-0"]
    # The highest of three counts.
    assert rates_bps[:4] == pytest.approx([RATE_BPS] * 4)
    assert rates_bps[-1] == pytest.approx(RATE_BPS / 20, rel=0.01)


def test_a_probe_waits_while_its_link_is_down_and_is_seen_late() -> None:
    scenario, plan = one_device_of_two()
    down = replace(scenario, faults=(LinkOutage("region-0->region-1", 7.5, 37.5),))
    policy = Measuring({})
    Simulator().run(down, plan, policy, 5)
    out = {
        seen.step: next((_rounded(path) for path in seen.unused if path.source == "device-0"), None)
        for seen in policy.seen
    }
    # Those of steps 1 to 3 wait for the end of the outage; that of step 4 has the least delay of the latest three.
    assert out == {0: 0.25, 1: None, 2: None, 3: 7.75, 4: 0.25}


def test_a_link_that_carries_nothing_any_more_loses_probes() -> None:
    dead = LinkTrace([0.0, 2.0], [RATE_BPS, 0.0], 10.0, loops=False)  # type: ignore[arg-type]
    assert [event.step for event in probes(*one_device_of_two(dead))] == [0]


def test_a_device_that_was_away_is_probed_again_when_a_plan_uses_it() -> None:
    scenario, plan = one_device_of_two()
    away = replace(scenario, faults=(Absence("device-1", 15.0, 25.0),))
    assert [event.step for event in probes(away, plan)] == [0, 1]
    both = layered_plan(scenario, [([(1, 1, 1), (2, 1, 1)], [1])])
    record = Simulator().run(away, plan, Measuring({3: both, 5: plan}), 9)
    steps = {event.step for event in record.events if is_link_probe(event) and event.size_bytes == SMALL_BYTES}
    # With steps 5 and 6 the plan uses the links itself.
    assert steps == {0, 1, 7, 8}


def _rounded(path: UnusedPath) -> float:
    return round(path.latency_s - SMALL_S, 6)


def _shorter(table: TimeTable, factor: float) -> TimeTable:
    columns = ("forward_s", "backward_input_s", "backward_weight_s")
    return replace(table, **{name: tuple(factor * each for each in getattr(table, name)) for name in columns})
