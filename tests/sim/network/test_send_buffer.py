"""A sender with a buffer: when acknowledgements let it write on, alone and while the other direction sends too."""

import math
from collections import deque
from dataclasses import replace

import numpy as np
import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.scenario.cluster import Link
from planner.scenario.effects import NetworkEffects
from sim.kernel.events import Flow, Timer
from sim.kernel.piecewise import RateTable, join_tables
from sim.network.connection import Connection, Message
from sim.network.routes import PathLatency, Route
from sim.network.single_link import FifoLink
from tests.helpers.scenarios import effect_runs
from traces.trace import LinkTrace

WINDOW_BYTES = 2.8e6


class BothWays:
    """Two devices, each with a link and a connection to the other; all buffers are open from the start."""

    def __init__(
        self,
        rate_bps: float,
        latency_s: float,
        window_bytes: float = WINDOW_BYTES,
        initial_bytes: float = math.inf,
        idle_s: float = math.inf,
        handover_s: float = 0.0,
        end_s: float = math.inf,
        trace: LinkTrace | None = None,
        back_s: float | None = None,
        connections: int = 1,
    ) -> None:
        self.environment = simpy.Environment()
        rates = RateTable((0.0,), (rate_bps,)) if end_s == math.inf else RateTable((0.0, end_s), (rate_bps, 0.0))
        tables = join_tables([rates])
        self.links = [FifoLink(self.environment, tables, 0) for _ in range(2)]
        self.delivered: deque[Message] = deque()
        effects = NetworkEffects(
            cold_start=True,
            window_bytes=window_bytes,
            initial_window_bytes=min(initial_bytes, window_bytes),
            idle_s=idle_s,
            handover_s=handover_s,
        )
        self.connections = []
        latencies_s = latency_s, latency_s if back_s is None else back_s
        for way, (source, target) in enumerate((("a", "b"), ("b", "a"))):
            link = Link(source, target, rate_bps, latencies_s[way], trace)
            route = Route(source, target, (link,), (link,), connections, math.inf)
            there, back = self.links[way], self.links[1 - way]
            way_back = PathLatency([Link(target, source, rate_bps, latencies_s[1 - way])])
            self.connections.append(
                Connection(self.environment, route, there, effects, way_back, back, self.delivered, way == 0)
            )

    def departed_s(self, *messages: tuple[int, float, float]) -> list[float]:
        """When messages depart, each given by its way (0 or 1), the time at which it is ready, and its bytes."""
        for number, (way, ready_s, size_bytes) in enumerate(messages):
            self.connections[way].send(Message(0, number, int(size_bytes), ready_s))
        # A sender that looks again and again at one instant would never end.
        events = 0
        while self.environment.peek() < math.inf:
            self.environment.step()
            events += 1
            assert events < 100_000
        return [message.departed_s for message in sorted(self.delivered, key=lambda message: message.number)]


def test_a_long_message_alone_takes_what_a_real_one_takes() -> None:
    """Real runs of `ropebridge run --emulate-wan` with gloo: 50 MB in 1.72, 0.727 and 3.45 s."""
    for rate_bps, latency_s, real_s in ((1e9, 0.05, 1.72), (1e9, 0.02, 0.727), (0.4e9, 0.1, 3.45)):
        both = BothWays(rate_bps * 1448 / 1514, latency_s, handover_s=0.0005)
        (departed_s,) = both.departed_s((0, 0.0, 50e6))
        assert departed_s + latency_s == pytest.approx(real_s, rel=0.035)


def test_acknowledgements_wait_behind_the_bytes_of_the_other_direction() -> None:
    # Windows of 100 bytes and buffers of 150, a byte per second, 2 s each way; the other link is busy until 400 s.
    both = BothWays(8.0, 2.0, 100.0)
    both.links[1].start(Flow(("b->a",), 3200.0, 1, math.inf, lambda departed_s: None))
    # 150 bytes leave until 150 s. Of the 50 others the sender hears at 402 s.
    (departed_s,) = both.departed_s((0, 0.0, 200.0))
    assert departed_s == pytest.approx(402 + 50, abs=1e-3)


def test_bytes_that_come_later_do_not_hold_an_acknowledgement() -> None:
    both = BothWays(8.0, 2.0, 100.0)
    # At 53 s the first 50 bytes have arrived, and their acknowledgement is on its way.
    Timer(
        both.environment, 53.0, lambda _: both.links[1].start(Flow(("b->a",), 3200.0, 1, math.inf, lambda gone_s: None))
    )
    (departed_s,) = both.departed_s((0, 0.0, 200.0))
    assert departed_s == pytest.approx(200, abs=1e-3)


@settings(max_examples=100)
@given(
    effect_runs.SIZES_BYTES,
    effect_runs.RATES_BPS,
    st.floats(0, 2),
    st.floats(0, 2),
    st.floats(50, 2e4),
    st.one_of(st.just(math.inf), st.floats(0, 2)),
    effect_runs.SHARES,
    effect_runs.WINDOWS_BYTES,
    st.integers(1, 4),
)
def test_a_simulation_gives_connections_the_window_and_buffer_of_its_effects(
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
    scenario, plan = effect_runs.two_stages(size_bytes, rate_bps, messages=3, there_s=there_s, back_s=back_s)
    effects = NetworkEffects(
        share=share,
        cold_start=True,
        idle_s=idle_s,
        window_bytes=window_bytes,
        initial_window_bytes=initial_bytes,
    )
    record = effect_runs.run(effect_runs.with_network(scenario, effects), replace(plan, connections=connections))
    alone = BothWays(
        share * rate_bps, there_s, window_bytes, initial_bytes, idle_s, back_s=back_s, connections=connections
    )
    expected_s = alone.departed_s(*((0, 1.0 + number, size_bytes) for number in range(3)))
    departed_s = [message.end_s for message in effect_runs.sends(record)]
    assert departed_s == pytest.approx(expected_s, rel=effect_runs.EXACT)


SIZES_BYTES = st.one_of(st.integers(0, 200_000), st.integers(0, 40).map(lambda windows: 14480 * windows))
MESSAGES = st.lists(st.tuples(st.integers(0, 1), st.sampled_from([0.0, 0.01, 0.3]), SIZES_BYTES), max_size=8)
LATENCIES = st.lists(st.floats(0.001, 0.3), min_size=1, max_size=6)


@given(MESSAGES, st.sampled_from([2e7, 1e8, 1e9]), LATENCIES, st.floats(1e4, 1e5))
def test_everything_departs_in_order_whatever_the_sizes_and_latencies(
    messages: list[tuple[int, float, int]], rate_bps: float, latencies_s: list[float], window_bytes: float
) -> None:
    times_s = np.arange(len(latencies_s)) * 0.02
    trace = LinkTrace(times_s, np.full(len(times_s), rate_bps), len(times_s) * 0.02, np.array(latencies_s))
    for used in (None, trace):
        both = BothWays(rate_bps, latencies_s[0], window_bytes, 14480.0, 0.2, trace=used)
        departed_s = both.departed_s(*messages)
        assert len(departed_s) == len(messages)
        for way in (0, 1):
            own = [
                (ready_s, s, left_s) for (w, ready_s, s), left_s in zip(messages, departed_s, strict=True) if w == way
            ]
            assert all(left_s >= ready_s + 8 * s / rate_bps * (1 - 1e-9) for ready_s, s, left_s in own)
            assert [left_s for _, _, left_s in own] == sorted(left_s for _, _, left_s in own)


@pytest.mark.parametrize("latency_s", [0.013, 0.02, 0.08, 0.1])
def test_an_empty_message_holds_nobody(latency_s: float) -> None:
    assert len(BothWays(1e8, latency_s, initial_bytes=14480.0).departed_s((1, 0.0, 0.0), (1, 0.01, 1e6))) == 2


def test_many_small_messages_fit_into_one_buffer() -> None:
    assert len(BothWays(1e8, 0.02).departed_s((0, 0.0, 5e6), *[(0, 0.0, 500.0)] * 2000)) == 2001


@pytest.mark.parametrize("rate_bps", [1e11, 4e11, 2.4e12])
def test_quick_links_are_full(rate_bps: float) -> None:
    for way in (0, 1):
        (departed_s,) = BothWays(rate_bps, 1e-6, handover_s=0.0005).departed_s((way, 0.0, 1e9))
        assert departed_s == pytest.approx(8e9 / rate_bps, rel=0.01)


def test_a_link_that_ends_stalls_the_sender() -> None:
    both = BothWays(8.0, 2.0, 100.0, end_s=170.0)
    # The first message leaves; of the second, a buffer of 150 bytes cannot leave until 170 s.
    assert len(both.departed_s((0, 0.0, 100.0), (0, 0.0, 400.0))) == 1
    assert both.environment.now < 1000


def test_slow_start_doubles_every_round_trip_and_idle_windows_halve() -> None:
    # A path that carries a window in no time, and a round trip of 1 s: 1, 2 and 4 kB go 0, 1 and 2 s later.
    assert BothWays(1e9, 0.5, 1e6, 1000.0).departed_s((0, 0.0, 7000.0)) == pytest.approx([2.0], abs=0.01)
    # The window is open for 8 kB; timeouts are 1.5 s with the round trip. Halved twice it is open for 2 kB.
    for pause_s, later_s in ((1.4, 0.0), (3.1, 1.0)):
        both = BothWays(1e9, 0.5, 1e6, 1000.0, 0.5)
        first_s, second_s = both.departed_s((0, 0.0, 7000.0), (0, 2.0 + pause_s, 4000.0))
        assert second_s - first_s - pause_s == pytest.approx(later_s, abs=0.02)


@pytest.mark.parametrize(("rate_bps", "latency_s", "size_bytes"), [(1e8, 0.04, 20e6), (5e7, 0.04, 10e6)])
def test_directions_that_start_together_do_not_stay_in_step(
    rate_bps: float, latency_s: float, size_bytes: float
) -> None:
    """A lead of either direction changes the rate little, as between real processes, which have one."""
    taken_s = []
    for lead_s in (0.0, 0.001, 0.1):
        messages = [(way, way * lead_s, size_bytes) for way in (0, 1) for _ in range(20)]
        taken_s.append(max(BothWays(rate_bps, latency_s).departed_s(*messages)))
    assert taken_s[1:] == pytest.approx([taken_s[0]] * 2, rel=0.03)
    # Links are idle while acknowledgements come back.
    assert taken_s[0] > 1.1 * 20 * 8 * size_bytes / rate_bps


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0.1, 50)), min_size=1, max_size=10), st.floats(0, 100))
def test_a_queue_knows_who_has_left_it(flows: list[tuple[float, float]], asked_s: float) -> None:
    environment = simpy.Environment()
    link = FifoLink(environment, join_tables([RateTable((0.0,), (8.0,))]), 0)
    for start_s, size_bytes in flows:
        Timer(environment, start_s, lambda _, b=size_bytes: link.start(Flow(("l",), 8 * b, 1, math.inf, print)))  # type: ignore[misc]
    environment.run()
    assert link.leaves_s(asked_s) >= asked_s
    passed_s = link.passed_s(asked_s)
    # Who joined until then has left by `asked_s`; who joined later has not.
    assert link.leaves_s(math.nextafter(passed_s, -1.0)) <= asked_s
    assert passed_s == asked_s or link.leaves_s(passed_s) > asked_s
