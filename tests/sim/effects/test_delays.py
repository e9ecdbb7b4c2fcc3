"""Ready notices, cold starts and latencies of messages against closed forms."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.events.event import EventKind
from planner.scenario.effects import NetworkEffects
from sim.network.send_window import SendWindow
from tests.helpers.scenarios.builders import layered_plan, mesh_scenario
from tests.helpers.scenarios.effect_runs import (
    BY_EVENTS,
    EXACT,
    RATES_BPS,
    SHARES,
    SIZES_BYTES,
    computed,
    on_trace,
    run,
    sends,
    two_stages,
    with_network,
)
from tests.helpers.strategies.run_strategies import with_links
from traces.trace import LinkTrace


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


@settings(max_examples=100)
@given(SIZES_BYTES, RATES_BPS, st.floats(0, 2), st.floats(0, 2), st.floats(50, 2e4), SHARES, st.integers(1, 4))
def test_messages_wait_for_the_window_of_their_connections(
    size_bytes: int,
    rate_bps: float,
    there_s: float,
    back_s: float,
    initial_bytes: float,
    share: float,
    connections: int,
) -> None:
    """Senders whose acknowledgements could wait send other parts of a window: not at the same time, but nearly."""
    scenario, plan = two_stages(size_bytes, rate_bps, messages=3, there_s=there_s, back_s=back_s)
    effects = NetworkEffects(share=share, cold_start=True, idle_s=math.inf, initial_window_bytes=initial_bytes)
    window = SendWindow(connections * initial_bytes, math.inf, math.inf)
    departed_s, payload_bps = 0.0, share * rate_bps
    record = run(with_network(scenario, effects), replace(plan, connections=connections))
    for number, message in enumerate(sends(record)):
        start_s = max(1.0 + number, departed_s)
        alone_s = 8 * size_bytes / payload_bps
        waiting_s = window.waiting_s(start_s, size_bytes, payload_bps, there_s + back_s)
        departed_s = start_s + waiting_s + alone_s
        assert message.end_s == pytest.approx(departed_s, abs=0.15 * (departed_s - 1.0))


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


@settings(max_examples=30)
@given(
    st.floats(0.01, 2),
    st.sampled_from([0.0, 0.3]),
    st.floats(500, 2e4),
    st.integers(1000, 30_000),
    st.booleans(),
    st.sampled_from([0.2, math.inf]),
)
def test_windows_wait_for_the_latency_of_a_trace_as_for_a_declared_one(
    latency_s: float, other_s: float, window_bytes: float, output_bytes: int, notice: bool, idle_s: float
) -> None:
    effects = NetworkEffects(
        cold_start=True, idle_s=idle_s, initial_window_bytes=50.0, window_bytes=window_bytes, ready_notice=notice
    )
    scenario = mesh_scenario(
        3,
        [1.0] * 3,
        [1.0] * 3,
        output_bytes=[output_bytes] * 3,
        link=lambda a, b: (1e5, latency_s if a < b else 2 * latency_s),
        global_batch=6,
    )
    declared = with_network(scenario, effects)
    links = [
        replace(
            link,
            latency_s=other_s,
            trace=LinkTrace(np.array([0.0, 1.0]), np.full(2, 1e5), 2.0, np.full(2, link.latency_s)),
        )
        for link in scenario.cluster.links
    ]
    plan = layered_plan(declared, [([(1, 1, 2), (2, 1, 2), (3, 1, 1)], [2, 2, 2])])
    runs = [run(each, plan, steps=2) for each in (declared, with_links(declared, links))]
    ends_s = [[event.end_s for event in each.events] for each in runs]
    assert ends_s[1] == pytest.approx(ends_s[0], rel=1e-9)


@pytest.mark.parametrize(("backs_s", "ends_s"), [((1.0, 1.0), 4.1), ((1.0, 2.0), 5.1), ((2.0, 2.0), 6.1)])
def test_acknowledgements_have_the_latency_of_their_time(backs_s: tuple[float, float], ends_s: float) -> None:
    """A message waits for two acknowledgements: one sets out before 3 s, when the latency of the way back changes."""
    scenario, plan = two_stages(3000, 80_000.0, there_s=9.0, back_s=9.0)
    there, back = scenario.cluster.links
    rates_bps, of_there = np.full(2, 80_000.0), np.full(2, 0.5)
    links = [
        replace(there, trace=LinkTrace(np.array([0.0, 3.0]), rates_bps, 100.0, of_there)),
        replace(back, trace=LinkTrace(np.array([0.0, 3.0]), rates_bps, 100.0, np.array(backs_s))),
    ]
    effects = NetworkEffects(cold_start=True, idle_s=math.inf, initial_window_bytes=1000.0, window_bytes=1000.0)
    (message,) = sends(run(with_network(with_links(scenario, links), effects), plan))
    assert message.end_s == pytest.approx(ends_s, abs=0.001)
