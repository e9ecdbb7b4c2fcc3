"""Each effect on bytes and on compute against a closed form, and against a run without it."""
# size: one closed form for each effect, and they share their scenarios

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.events.event import Event, EventKind
from planner.plan.plan import Plan
from planner.runs.record import RunRecord
from planner.scenario.cluster import Link
from planner.scenario.effects import ComputeEffects, NetworkEffects, Slowdown, Straggler
from planner.scenario.faults import Absence
from planner.scenario.scenario import Scenario
from planner.scenario.size_curve import SizeCurve
from planner.step.evaluate import step_time_s
from sim.network.connection import SendWindow
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import chain_plan, chain_scenario, layered_plan, makespan_s, mesh_scenario
from tests.helpers.strategies.run_strategies import TIMES_S, chains, replicated, with_links
from traces.trace import LinkTrace

EXACT = 1e-9

SIZES_BYTES = st.integers(1, 100_000)
RATES_BPS = st.floats(1e3, 1e6)
SHARES = st.floats(0.1, 1)
WINDOWS_BYTES = st.one_of(st.just(math.inf), st.floats(100, 1e5))

# Slow start from a window that is never too small: every message passes through the kernel, and none takes longer.
BY_EVENTS = NetworkEffects(cold_start=True, initial_window_bytes=1e15)


def run(scenario: Scenario, plan: Plan, steps: int = 1) -> RunRecord:
    return Simulator().run(scenario, plan, None, steps)


def with_network(scenario: Scenario, network: NetworkEffects) -> Scenario:
    return replace(scenario, effects=replace(scenario.effects, network=network))


def with_compute(scenario: Scenario, compute: ComputeEffects) -> Scenario:
    return replace(scenario, effects=replace(scenario.effects, compute=compute))


def sends(record: RunRecord, action: str = "F", device: str = "device-0") -> list[Event]:
    """What a device sends for one kind of action, as it was handed over."""
    found = [e for e in record.events if e.kind is EventKind.SEND and (e.action, e.device) == (action, device)]
    return sorted(found, key=lambda event: event.start_s)


def computed(record: RunRecord, action: str, device: str) -> list[tuple[float, float]]:
    """Start and end of each of a device's actions of one kind."""
    own = (e for e in record.events if e.kind is EventKind.COMPUTE and (e.action, e.device) == (action, device))
    return [(event.start_s, event.end_s) for event in own]


def two_stages(
    size_bytes: int, rate_bps: float, *, messages: int = 1, there_s: float = 0.0, back_s: float = 0.0
) -> tuple[Scenario, Plan]:
    """Device 0 hands messages over at 1 s, 2 s, ..., with a latency of each way; the forwards go before the rest."""
    scenario = chain_scenario([1.0, 0.0], [1.0, 1.0], output_bytes=[size_bytes, 0], global_batch=messages)
    links = [Link("region-0", "region-1", rate_bps, there_s), Link("region-1", "region-0", rate_bps, back_s)]
    return with_links(scenario, links), chain_plan(scenario, schedule="gpipe", depths=[messages, messages])


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


def on_trace(scenario: Scenario, trace: LinkTrace) -> Scenario:
    there, back = scenario.cluster.links
    return with_links(scenario, [replace(there, bandwidth_bps=trace.mean_bps, trace=trace), back])


# --- rates ----------------------------------------------------------------------------------------------------

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
def test_windows_of_two_messages_take_turns_on_a_link(one: int, other: int) -> None:
    window_bytes, rate_bps = 1000, 8000.0
    scenario, plan = two_pairs(one * window_bytes, other * window_bytes, Link("a", "b", rate_bps, 0.0))
    record = run(with_network(scenario, NetworkEffects(window_bytes=window_bytes, cold_start=True)), plan)
    ends_s = [sends(record, device=device)[0].end_s for device in ("device-0", "device-2")]
    # A second each; the first of them belongs to the first message.
    expected_s = [2 * one - 1, one + other] if one <= other else [one + other, 2 * other]
    start_s = sends(record, device="device-0")[0].start_s
    assert ends_s == pytest.approx([start_s + each for each in expected_s], rel=EXACT)


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


# --- size curves ----------------------------------------------------------------------------------------------

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


# --- ready notice ---------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(SIZES_BYTES, RATES_BPS, st.floats(0, 5), st.floats(0, 5))
def test_a_message_waits_for_the_receivers_notice(
    size_bytes: int, rate_bps: float, there_s: float, back_s: float
) -> None:
    scenario, plan = two_stages(size_bytes, rate_bps, messages=2, there_s=there_s, back_s=back_s)
    transfer_s = 8 * size_bytes / rate_bps
    for notice, first_s in ((False, 1.0), (True, max(1.0, back_s))):
        first, second = sends(run(with_network(scenario, NetworkEffects(ready_notice=notice)), plan))
        assert first.end_s == pytest.approx(first_s + transfer_s, rel=EXACT)
        assert second.end_s == pytest.approx(max(2.0, first.end_s) + transfer_s, rel=EXACT)


@pytest.mark.parametrize("notice", [False, True])
def test_the_notices_of_later_steps_are_there_before_they_are_needed(notice: bool) -> None:
    # Two replicas of the second stage sum 8,000 bytes in two rounds of 8 s and 0.5 s; the first stage goes on
    # meanwhile, and hands messages of 4,000 bits for the second step over long before they begin it.
    scenario = mesh_scenario(
        3,
        [1.0, 1.0],
        [1.0, 1.0],
        output_bytes=[500, 0],
        parameter_bytes=[0, 8000],
        link=lambda a, b: (4000.0, 0.5),
        global_batch=2,
    )
    plan = layered_plan(scenario, [([(1, 1, 1), (2, 2, 1)], [2])])
    record = run(with_network(scenario, NetworkEffects(ready_notice=notice)), plan, steps=2)
    # Forward 0 to 2 s, there at 3.5 s; forward and backward until 5.5 s, back at 7 s; backward until 9 s.
    sent_s = [event.start_s for event in sends(record)]
    assert sent_s == pytest.approx([2.0, 2.0, 11.0, 11.0], rel=EXACT)
    begun_s = [event.end_s for event in record.events if event.kind is EventKind.SYNC and event.step == 0]
    assert begun_s == pytest.approx([22.5, 22.5], rel=EXACT)
    departed_s = [event.end_s for event in sends(record) if event.step == 1]
    assert departed_s == pytest.approx([12.0, 12.0], rel=EXACT)
    start_s, _ = computed(record, "F", "device-1")[1]
    assert start_s == pytest.approx(22.5, rel=EXACT)


# --- cold start -----------------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(
    SIZES_BYTES,
    RATES_BPS,
    st.floats(0, 2),
    st.floats(0, 2),
    st.floats(50, 2e4),
    st.one_of(st.just(math.inf), st.floats(0, 2)),
    SHARES,
    WINDOWS_BYTES,
    st.integers(1, 4),
)
def test_messages_wait_for_the_window_of_their_connections(
    size_bytes: int,
    rate_bps: float,
    there_s: float,
    back_s: float,
    initial_bytes: float,
    idle_s: float,
    share: float,
    window_bytes: float,
    connections: int,
) -> None:
    scenario, plan = two_stages(size_bytes, rate_bps, messages=3, there_s=there_s, back_s=back_s)
    effects = NetworkEffects(
        share=share,
        cold_start=True,
        idle_s=idle_s,
        window_bytes=window_bytes,
        initial_window_bytes=initial_bytes,
    )
    first_bytes = connections * min(initial_bytes, window_bytes)
    window = SendWindow(first_bytes, connections * window_bytes, there_s + back_s, idle_s)
    departed_s, payload_bps = 0.0, share * rate_bps
    record = run(with_network(scenario, effects), replace(plan, connections=connections))
    for number, message in enumerate(sends(record)):
        start_s = max(1.0 + number, departed_s)
        departed_s = start_s + window.waiting_s(start_s, size_bytes, payload_bps) + 8 * size_bytes / payload_bps
        assert message.end_s == pytest.approx(departed_s, rel=EXACT)


# --- latency --------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.floats(0.1, 3), st.floats(0, 10)), min_size=2, max_size=8),
    st.integers(100, 2000),
    st.sampled_from([NetworkEffects(), BY_EVENTS]),
)
def test_latency_is_that_of_the_departure_and_nothing_overtakes(
    pieces: list[tuple[float, float]], size_bytes: int, network: NetworkEffects
) -> None:
    ends_s = np.cumsum([length_s for length_s, _ in pieces])
    latencies_s = np.array([latency_s for _, latency_s in pieces])
    rates_bps = np.full(len(pieces), 8000.0)
    trace = LinkTrace(np.append(0.0, ends_s[:-1]), rates_bps, float(ends_s[-1]), latencies_s, loops=False)
    scenario, plan = two_stages(size_bytes, 8000.0, messages=6)
    record = run(with_network(on_trace(scenario, trace), network), plan)
    arrived_s, expected_s = 0.0, []
    for message in sends(record):
        latency_s = latencies_s[np.searchsorted(trace.times_s, message.end_s, side="right") - 1]
        arrived_s = max(arrived_s, message.end_s + latency_s)
        expected_s.append(arrived_s)
    # The receiver takes no time: each forward starts when its message is there.
    assert [start_s for start_s, _ in computed(record, "F", "device-1")] == expected_s


# --- transfers that block -------------------------------------------------------------------------------------


def test_sender_and_receiver_do_nothing_else_during_a_transfer() -> None:
    # A transfer lasts 1 s and arrives 0.5 s later; without blocking this is a test of the simulator's whole log.
    scenario = chain_scenario([1.0, 2.0], [2.0, 4.0], bandwidth_bps=8000.0, latency_s=0.5, global_batch=2)
    plan = chain_plan(scenario)
    blocked = run(with_compute(scenario, ComputeEffects(transfers_block=True)), plan)
    # The sender goes on when its message has left, until 2 s and 4 s.
    assert computed(blocked, "F", "device-0") == [(0.0, 1.0), (2.0, 3.0)]
    # The second message was there long ago, but it takes its 1.5 s from 9.5 s on, when the gradient has left.
    assert computed(blocked, "F", "device-1") == [(2.5, 4.5), (11.0, 13.0)]
    assert computed(blocked, "B", "device-1") == [(4.5, 8.5), (13.0, 17.0)]
    assert computed(blocked, "B", "device-0") == [(10.0, 12.0), (18.5, 20.5)]
    free = run(scenario, plan)
    assert computed(free, "F", "device-0") == [(0.0, 1.0), (1.0, 2.0)]
    assert computed(free, "F", "device-1") == [(2.5, 4.5), (8.5, 10.5)]


@settings(max_examples=150)
@given(st.one_of(chains(), replicated()), st.booleans(), st.sampled_from([NetworkEffects(), BY_EVENTS]))
def test_evaluator_and_simulator_agree_on_transfers_that_block(
    case: tuple[Scenario, Plan], blocks: bool, network: NetworkEffects
) -> None:
    scenario, plan = with_compute(case[0], ComputeEffects(transfers_block=blocks)), case[1]
    simulated_s = makespan_s(run(with_network(scenario, network), plan))
    assert step_time_s(plan, scenario) == pytest.approx(simulated_s, rel=EXACT)


@pytest.mark.parametrize(("blocks", "starts_s"), [(False, [0.0, 1.0]), (True, [0.0, 3.0])])
def test_on_a_shared_link_the_sender_waits_for_the_departure(blocks: bool, starts_s: list[float]) -> None:
    # Two senders with 4,000 bits each at 1 s have half of 4 kbit/s: until 3 s.
    scenario = mesh_scenario(
        4,
        [1.0, 0.0],
        [1.0, 0.0],
        output_bytes=[500, 0],
        parameter_bytes=[0, 0],
        global_batch=4,
        regions=["a", "b", "a", "b"],
    )
    links = [Link(source, target, 4000.0, 0.25) for source in "ab" for target in "ab"]
    stages = [(1, 1, 2), (2, 1, 1)]
    plan = layered_plan(scenario, [(stages, [1, 1]), (stages, [1, 1])])
    record = run(with_compute(with_links(scenario, links), ComputeEffects(transfers_block=blocks)), plan)
    for sender, receiver in (("device-0", "device-1"), ("device-2", "device-3")):
        assert [start_s for start_s, _ in computed(record, "F", sender)] == pytest.approx(starts_s, rel=EXACT)
        assert sends(record, device=sender)[0].end_s == pytest.approx(3.0, rel=EXACT)
        assert computed(record, "F", receiver)[0][0] == pytest.approx(3.25, rel=EXACT)


@pytest.mark.parametrize("network", [NetworkEffects(), BY_EVENTS])
def test_a_device_that_chooses_is_idle_while_it_sends(network: NetworkEffects) -> None:
    # 8,000 bits from 1 to 5 s, forward and backward until 7 s, and back from 7 to 11 s.
    scenario = chain_scenario([1.0, 1.0], [1.0, 1.0], bandwidth_bps=2000.0, global_batch=1)
    scenario = with_network(with_compute(scenario, ComputeEffects(transfers_block=True)), network)
    record = run(scenario, replace(chain_plan(scenario), order="dynamic"))
    receives = [(e.device, e.start_s, e.end_s) for e in record.events if e.kind is EventKind.RECEIVE]
    assert receives == [("device-1", 0.0, 5.0), ("device-0", 1.0, 11.0)]


# --- compute --------------------------------------------------------------------------------------------------


def durations_s(record: RunRecord) -> dict[tuple[str, str, int, int, int], float]:
    """Seconds of each action, by device, kind, stage, microbatch and step."""
    return {
        (e.device, e.action, e.stage, e.microbatch, e.step): e.end_s - e.start_s
        for e in record.events
        if e.kind is EventKind.COMPUTE
    }


@settings(max_examples=60)
@given(replicated(), st.floats(0, 1), st.lists(st.floats(0.2, 5), min_size=18, max_size=18))
def test_every_action_has_its_overhead_and_a_stragglers_takes_longer(
    case: tuple[Scenario, Plan], overhead_s: float, factors: list[float]
) -> None:
    scenario, plan = case
    factor = dict(zip(sorted(plan.devices)[::2], factors, strict=False))
    stragglers = tuple(Straggler(device, each) for device, each in factor.items())
    plain = durations_s(run(scenario, plan))
    slowed = durations_s(
        run(with_compute(scenario, ComputeEffects(launch_overhead_s=overhead_s, stragglers=stragglers)), plan)
    )
    expected = {key: (profiled_s + overhead_s) * factor.get(key[0], 1.0) for key, profiled_s in plain.items()}
    assert slowed == pytest.approx(expected, rel=1e-7, abs=1e-9)


def progress(times_s: Sequence[float], speeds: Sequence[float], start_s: float, end_s: float) -> float:
    """Integral of a speed over time; the last one holds for ever."""
    total = 0.0
    for (from_s, speed), (until_s, _) in pairwise([*zip(times_s, speeds, strict=True), (math.inf, 0.0)]):
        total += speed * max(0.0, min(until_s, end_s) - max(from_s, start_s))
    return total


SPEEDS = st.one_of(st.just(0.0), st.floats(0.1, 4))


@settings(max_examples=100)
@given(chains(), st.lists(st.tuples(st.floats(0.1, 20), SPEEDS), max_size=8), st.floats(0.1, 4), st.floats(0.3, 3))
def test_a_slowed_device_moves_on_as_its_speed_says(
    case: tuple[Scenario, Plan], pieces: list[tuple[float, float]], last: float, factor: float
) -> None:
    scenario, plan = case
    times_s = [0.0, *np.cumsum([length_s for length_s, _ in pieces]).tolist()]
    speeds = [*(speed for _, speed in pieces), last]
    slowdown = Slowdown("device-0", tuple(times_s), tuple(speeds))
    effects = ComputeEffects(slowdowns=(slowdown,), stragglers=(Straggler("device-0", factor),))
    plain, record = durations_s(run(scenario, plan)), run(with_compute(scenario, effects), plan)
    for event in record.events:
        if event.kind is EventKind.COMPUTE:
            key = (event.device, event.action, event.stage, event.microbatch, event.step)
            if event.device == "device-0":
                done_s = progress(times_s, speeds, event.start_s, event.end_s) / factor
            else:
                done_s = event.end_s - event.start_s
            assert done_s == pytest.approx(plain[key], rel=1e-7, abs=1e-9)


def test_a_slowed_device_by_hand() -> None:
    # Speed 1 until 1 s, 0 until 5 s, 0.5 until 7 s, then 2: 2 s of forward last from 0 to 7 s, 4 s of backward 2 s.
    scenario = chain_scenario([2.0], [4.0], global_batch=1)
    slowdown = Slowdown("device-0", (0.0, 1.0, 5.0, 7.0), (1.0, 0.0, 0.5, 2.0))
    record = run(with_compute(scenario, ComputeEffects(slowdowns=(slowdown,))), chain_plan(scenario))
    assert computed(record, "F", "device-0") == [(0.0, 7.0)]
    assert computed(record, "B", "device-0") == [(7.0, 9.0)]


# --- jitter ---------------------------------------------------------------------------------------------------

DEVIATION, STEPS = 0.4, 200


def jittered(seed: int, scenario: Scenario, plan: Plan) -> dict[tuple[str, str, int, int, int], float]:
    return durations_s(run(with_compute(scenario, ComputeEffects(jitter=DEVIATION, seed=seed)), plan, STEPS))


def test_jitter_is_log_normal_of_mean_one() -> None:
    scenario = chain_scenario([1.0, 1.0], [1.0, 1.0], output_bytes=[0, 0])
    factors = np.array(list(jittered(7, scenario, chain_plan(scenario)).values()))
    count = STEPS * 2 * 2 * 8
    assert len(factors) == count
    # Five standard errors.
    assert abs(factors.mean() - 1) < 5 * DEVIATION / math.sqrt(count)
    spread = math.sqrt(math.log1p(DEVIATION**2))
    assert abs(np.log(factors).mean() + spread**2 / 2) < 5 * spread / math.sqrt(count)
    assert abs(np.log(factors).std() - spread) < 5 * spread / math.sqrt(2 * count)


def test_jitter_follows_its_seed_alone() -> None:
    scenario = chain_scenario([1.0, 2.0], [3.0, 1.0], output_bytes=[0, 0], global_batch=4)
    plan = chain_plan(scenario)
    once = jittered(7, scenario, plan)
    assert jittered(7, scenario, plan) == once
    other = jittered(8, scenario, plan)
    assert not any(once[key] == pytest.approx(other[key], rel=1e-6) for key in once)
    by_step: defaultdict[tuple[str, str, int, int], set[float]] = defaultdict(set)
    for (*place, _), seconds in once.items():
        by_step[tuple(place)].add(seconds)
    assert all(len(seconds) == STEPS for seconds in by_step.values())
    # Slow links and the kernel's events change when things happen, not how long they take.
    slow = with_links(scenario, [replace(link, latency_s=3.7) for link in scenario.cluster.links])
    slow = with_network(slow, BY_EVENTS)
    later = jittered(7, slow, plan)
    assert later == pytest.approx(once, rel=1e-6)


def test_jitter_is_an_action_s_in_however_many_pieces_it_is() -> None:
    """Sums that overlap cut the last backwards, but not those of a device that leaves some time."""
    scenario = mesh_scenario(2, [1.0, 2.0], [1.0, 2.0])
    plan = layered_plan(scenario, [([(2, 2, 1)], [4, 4])])
    plan = replace(plan, synchronisation=replace(plan.synchronisation, bucket_bytes=1))
    leaving = replace(scenario, faults=(Absence("device-0", 1e9),))
    assert jittered(7, leaving, plan) == pytest.approx(jittered(7, scenario, plan), rel=1e-9)
