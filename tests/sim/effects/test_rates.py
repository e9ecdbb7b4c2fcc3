"""Rates of messages with effects on the network, and size curves, against closed forms."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.plan.plan import Plan
from planner.scenario.cluster import Link
from planner.scenario.effects import NetworkEffects
from planner.scenario.scenario import Scenario
from planner.scenario.size_curve import SizeCurve
from tests.helpers.scenarios.builders import layered_plan, mesh_scenario
from tests.helpers.scenarios.effect_runs import (
    BY_EVENTS,
    EXACT,
    RATES_BPS,
    SHARES,
    SIZES_BYTES,
    WINDOWS_BYTES,
    on_trace,
    run,
    sends,
    two_stages,
    with_network,
)
from tests.helpers.strategies.run_strategies import TIMES_S, with_links
from traces.trace import LinkTrace


def two_pairs(one_bytes: int, other_bytes: int, link: Link) -> tuple[Scenario, Plan]:
    """At 0 s devices 0 and 2 send a message each over one link from region a to b: devices 1 and 3 stand there."""
    scenario = mesh_scenario(
        4,
        [0.0, 1.0],
        [1.0, 1.0],
        output_bytes=[1, 0],
        parameter_bytes=[0, 0],
        global_batch=one_bytes + other_bytes,
        regions=["a", "b", "a", "b"],
    )
    others = [Link("b", "a", 1e9, link.latency_s), Link("a", "a", 1e9, 0.0), Link("b", "b", 1e9, 0.0)]
    stages = [(1, 1, 1), (2, 1, 1)]
    plan = layered_plan(scenario, [(stages, [one_bytes]), (stages, [other_bytes])])
    return with_links(scenario, [link, *others]), plan


def pair_ends_s(one_bits: float, other_bits: float, link_bps: float, one_bps: float, other_bps: float) -> list[float]:
    """When two messages have left that start together, each with a rate of its own that it never exceeds.

    None gets less than half of the link unless it cannot use it; the rest is the other's.
    """
    one_share = min(one_bps, max(link_bps / 2, link_bps - other_bps))
    other_share = min(other_bps, max(link_bps / 2, link_bps - one_bps))
    first_s = min(one_bits / one_share, other_bits / other_share)
    one_rest = max(0.0, one_bits - first_s * one_share)
    other_rest = max(0.0, other_bits - first_s * other_share)
    return [first_s + one_rest / min(one_bps, link_bps), first_s + other_rest / min(other_bps, link_bps)]


@st.composite
def rising_traces(draw: st.DrawFn) -> LinkTrace:
    """Rates above zero, so that a rounding never falls into an outage; the last one holds."""
    pieces = draw(st.lists(st.tuples(st.floats(0.1, 5), RATES_BPS), min_size=2, max_size=6))
    ends_s = np.cumsum([length_s for length_s, _ in pieces])
    rates_bps = np.array([rate_bps for _, rate_bps in pieces])
    return LinkTrace(np.append(0.0, ends_s[:-1]), rates_bps, float(ends_s[-1]), None, loops=False)


# With and without the kernel's events.
RATE_EFFECTS = st.builds(
    NetworkEffects,
    share=SHARES,
    payload_efficiency=SHARES,
    window_bytes=WINDOWS_BYTES,
    cold_start=st.booleans(),
    initial_window_bytes=st.just(BY_EVENTS.initial_window_bytes),
).map(lambda effects: replace(effects, cold_start=effects.cold_start and math.isinf(effects.window_bytes)))


def windows_bps(effects: NetworkEffects, round_trip_s: float, connections: int) -> float:
    """Payload per second that the windows of some connections let through."""
    return connections * 8 * effects.window_bytes / round_trip_s if round_trip_s else math.inf


@settings(max_examples=60)
@given(RATE_EFFECTS, SIZES_BYTES, RATES_BPS, TIMES_S, TIMES_S, st.integers(1, 8))
def test_a_constant_line_takes_payload_share_and_windows(
    effects: NetworkEffects, size_bytes: int, rate_bps: float, there_s: float, back_s: float, connections: int
) -> None:
    scenario, plan = two_stages(size_bytes, rate_bps, there_s=there_s, back_s=back_s)
    plan = replace(plan, connections=connections)
    plain_s = 8 * size_bytes / rate_bps
    limited_bps = windows_bps(effects, there_s + back_s, connections)
    slowed_s = max(plain_s / (effects.share * effects.payload_efficiency), 8 * size_bytes / limited_bps)
    for network, crossing_s in ((NetworkEffects(), plain_s), (effects, slowed_s)):
        (there,) = sends(run(with_network(scenario, network), plan))
        assert (there.start_s, there.end_s) == (1.0, pytest.approx(1.0 + crossing_s, rel=EXACT))


@settings(max_examples=60)
@given(RATE_EFFECTS, SIZES_BYTES, rising_traces(), TIMES_S, st.integers(1, 8))
def test_a_trace_takes_payload_share_and_windows(
    effects: NetworkEffects, size_bytes: int, trace: LinkTrace, latency_s: float, connections: int
) -> None:
    scenario, plan = two_stages(size_bytes, 1e6, there_s=latency_s, back_s=latency_s)
    scenario, plan = on_trace(scenario, trace), replace(plan, connections=connections)
    limited_bps = windows_bps(effects, 2 * latency_s, connections) / effects.payload_efficiency
    reached_bps = np.minimum(effects.share * trace.bandwidth_bps, limited_bps)
    slowed = LinkTrace(trace.times_s, reached_bps, trace.duration_s, None, loops=False)
    bits = 8 * size_bytes
    for network, table, wire_bits in (
        (NetworkEffects(), trace, bits),
        (effects, slowed, bits / effects.payload_efficiency),
    ):
        (there,) = sends(run(with_network(scenario, network), plan))
        assert there.end_s == pytest.approx(1.0 + float(table.time_to_send([wire_bits], 1.0)[0]), rel=EXACT)


@settings(max_examples=60)
@given(RATE_EFFECTS, SIZES_BYTES, SIZES_BYTES, RATES_BPS, TIMES_S, st.integers(1, 8))
def test_messages_that_share_a_link_take_payload_share_and_windows(
    effects: NetworkEffects, one_bytes: int, other_bytes: int, rate_bps: float, latency_s: float, connections: int
) -> None:
    scenario, plan = two_pairs(one_bytes, other_bytes, Link("a", "b", rate_bps, latency_s))
    plan = replace(plan, connections=connections)
    for network in (NetworkEffects(), effects):
        limited_bps = windows_bps(network, 2 * latency_s, connections) / network.payload_efficiency
        bits = [8 * size_bytes / network.payload_efficiency for size_bytes in (one_bytes, other_bytes)]
        link_bps = network.share * rate_bps
        if network.cold_start:
            # Windows are open: what the first one sends is on the link before the other one's.
            expected_s = [bits[0] / link_bps, sum(bits) / link_bps]
        else:
            expected_s = pair_ends_s(*bits, link_bps, limited_bps, limited_bps)
        record = run(with_network(scenario, network), plan)
        ends_s = [sends(record, device=device)[0].end_s for device in ("device-0", "device-2")]
        assert ends_s == pytest.approx(expected_s, rel=1e-8)


@pytest.mark.parametrize(("one", "other"), [(1, 1), (1, 5), (5, 1), (3, 3), (4, 2), (2, 7)])
def test_buffers_of_two_messages_take_turns_on_a_link(one: int, other: int) -> None:
    window_bytes, rate_bps = 1000, 8000.0
    scenario, plan = two_pairs(one * window_bytes, other * window_bytes, Link("a", "b", rate_bps, 0.0))
    record = run(with_network(scenario, NetworkEffects(window_bytes=window_bytes, cold_start=True)), plan)
    ends_s = [sends(record, device=device)[0].end_s for device in ("device-0", "device-2")]
    # A window is a second. A buffer holds one and a half, which are all that the other message waits for.
    start_s = sends(record, device="device-0")[0].start_s
    assert max(ends_s) == pytest.approx(start_s + one + other, rel=1e-4)
    assert min(ends_s) <= start_s + 2 * min(one, other) + 1.5


def test_devices_of_one_region_have_one_connection() -> None:
    # 1,000 bytes in windows of 100 per second, whatever the plan says of connections between regions.
    for regions, crossing_s in ((["a", "a"], 10.0), (["a", "b"], 2.5)):
        scenario = mesh_scenario(
            2, [1.0, 1.0], [1.0, 1.0], link=lambda a, b: (1e6, 0.5), global_batch=1, regions=regions
        )
        scenario = with_network(scenario, NetworkEffects(window_bytes=100.0))
        plan = replace(layered_plan(scenario, [([(1, 1, 1), (2, 1, 1)], [1])]), connections=4)
        (there,) = sends(run(scenario, plan))
        assert there.end_s - there.start_s == pytest.approx(crossing_s, rel=EXACT)


CURVES = st.builds(SizeCurve, st.just(0.0), st.floats(1e-6, 1e-5), st.floats(2e-4, 1e-3), st.floats(1e4, 1e6))


def with_curve(link: Link, curve: SizeCurve) -> Link:
    return replace(link, size_curve=curve)


@settings(max_examples=60)
@given(CURVES, SIZES_BYTES, RATES_BPS, SHARES, SHARES, st.integers(1, 4), st.one_of(st.none(), rising_traces()))
def test_a_message_of_a_size_goes_no_faster_than_the_curve(
    curve: SizeCurve,
    size_bytes: int,
    rate_bps: float,
    share: float,
    efficiency: float,
    connections: int,
    trace: LinkTrace | None,
) -> None:
    scenario, plan = two_stages(size_bytes, rate_bps)
    plan = replace(plan, connections=connections)
    if trace is not None:
        scenario = on_trace(scenario, trace)
    there, back = scenario.cluster.links
    scenario = with_links(scenario, [with_curve(there, curve), back])
    scenario = with_network(scenario, NetworkEffects(share=share, payload_efficiency=efficiency))
    link = trace or LinkTrace(np.zeros(1), np.array([rate_bps]), 1.0)
    # The curve was measured of payload.
    reached_bps = share * np.minimum(efficiency * link.bandwidth_bps, curve.rate_bps(size_bytes))
    slowed = LinkTrace(link.times_s, reached_bps, link.duration_s, None, loops=False)
    (there_send,) = sends(run(scenario, plan))
    assert there_send.end_s == pytest.approx(1.0 + float(slowed.time_to_send([8 * size_bytes], 1.0)[0]), rel=1e-8)


@settings(max_examples=60)
@given(CURVES, SIZES_BYTES, SIZES_BYTES, RATES_BPS, SHARES, st.integers(1, 4))
def test_on_a_shared_link_each_size_has_its_own_ceiling(
    curve: SizeCurve, one_bytes: int, other_bytes: int, rate_bps: float, share: float, connections: int
) -> None:
    scenario, plan = two_pairs(one_bytes, other_bytes, with_curve(Link("a", "b", rate_bps, 0.0), curve))
    record = run(with_network(scenario, NetworkEffects(share=share)), replace(plan, connections=connections))
    own_bps = [share * curve.rate_bps(size_bytes) for size_bytes in (one_bytes, other_bytes)]
    expected_s = pair_ends_s(8 * one_bytes, 8 * other_bytes, share * rate_bps, *own_bps)
    ends_s = [sends(record, device=device)[0].end_s for device in ("device-0", "device-2")]
    assert ends_s == pytest.approx(expected_s, rel=1e-8)
