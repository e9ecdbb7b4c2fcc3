"""A link with random messages against queueing theory: waiting lines, and links that share.

Every seed is fixed. A mean counts as right if it lies within four standard errors of theory, which are taken from
the means of consecutive batches; each test also says how wide that may be, so that it cannot hold for want of messages.
"""

import math
from collections import deque

import numpy as np
import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from planner.cost.network import payload_bps
from planner.scenario.cluster import Link
from planner.scenario.effects import NetworkEffects
from sim.kernel.piecewise import RateTable, join_tables
from sim.network.connection import Connection, Message
from sim.network.routes import PathLatency, Route
from sim.network.single_link import FairLink
from tests.helpers.strategies.trace_strategies import link_traces
from traces.trace import LinkTrace

Floats = NDArray[np.float64]

MEAN_BYTES = 9e5
RATE_BPS = 8 * MEAN_BYTES  # a message takes 1 s by itself in the mean
BATCHES = 40


def sojourns_s(
    arrivals_s: Floats, sizes_bytes: Floats, *, connections: int = 1, ceiling_bps: float = math.inf
) -> Floats:
    """Time from ready to departed of each message, sent over the connections in turn, all over one link."""
    environment = simpy.Environment()
    link = Link("a", "b", RATE_BPS, 0.0)
    shared = FairLink(environment, join_tables([RateTable((0.0,), (RATE_BPS,))]), 0)
    route = Route("a", "b", (link,), (link,), 1, ceiling_bps)
    delivered: deque[Message] = deque()
    lines = [
        Connection(environment, route, shared, NetworkEffects(), PathLatency([]), None, delivered)
        for _ in range(min(connections, len(arrivals_s)))
    ]
    for number, (arrival_s, size_bytes) in enumerate(zip(arrivals_s.tolist(), sizes_bytes.tolist(), strict=True)):
        lines[number % len(lines)].send(Message(0, number, int(size_bytes), arrival_s))
    environment.run()
    left_s = np.full(len(arrivals_s), np.nan)
    for message in delivered:
        left_s[message.number] = message.departed_s
    return left_s - arrivals_s


def poisson_s(random: np.random.Generator, load: float, count: int) -> Floats:
    """Arrivals that keep a link busy for a share of the time."""
    return np.cumsum(random.exponential(1 / load, count))


def exponential_bytes(random: np.random.Generator, count: int) -> Floats:
    return np.ceil(random.exponential(MEAN_BYTES, count))


def constant_bytes(random: np.random.Generator, count: int) -> Floats:
    return np.full(count, MEAN_BYTES)


def two_sizes_bytes(random: np.random.Generator, count: int) -> Floats:
    """One in ten is nine times as large as the mean, the others are a ninth of it."""
    return np.where(random.random(count) < 0.1, 9 * MEAN_BYTES, MEAN_BYTES / 9)


SIZES = {"exponential": exponential_bytes, "constant": constant_bytes, "two sizes": two_sizes_bytes}


def assert_mean(values: Floats, expected: float, *, within: float) -> None:
    """The mean is as expected, as far as its own batches tell, which must be well."""
    batches = values[: len(values) // BATCHES * BATCHES].reshape(BATCHES, -1).mean(axis=1)
    error = float(batches.std(ddof=1)) / math.sqrt(BATCHES)
    assert 4 * error <= within * expected
    assert float(values.mean()) == pytest.approx(expected, abs=4 * error)


# --- one connection: first come, first served -----------------------------------------------------------------


def lindley_s(arrivals_s: Floats, sizes_bytes: Floats) -> Floats:
    """Sojourns in a waiting line by Lindley's recursion."""
    sojourns, free_s = [], 0.0
    for arrival_s, size_bytes in zip(arrivals_s.tolist(), sizes_bytes.tolist(), strict=True):
        free_s = max(free_s, arrival_s) + 8 * size_bytes / RATE_BPS
        sojourns.append(free_s - arrival_s)
    return np.array(sojourns)


@pytest.mark.parametrize("load", [0.3, 0.8])
@pytest.mark.parametrize("sizes", SIZES)
def test_one_connection_is_a_waiting_line_message_by_message(sizes: str, load: float) -> None:
    random = np.random.default_rng(1)
    arrivals_s, sizes_bytes = poisson_s(random, load, 3000), SIZES[sizes](random, 3000)
    assert sojourns_s(arrivals_s, sizes_bytes) == pytest.approx(lindley_s(arrivals_s, sizes_bytes), rel=1e-8)


@pytest.mark.parametrize("sizes", SIZES)
def test_a_waiting_line_takes_what_pollaczek_and_khinchine_say(sizes: str) -> None:
    # Mean wait = load * mean size * (1 + squared relative deviation of sizes) / 2 (1 - load); with exponential sizes
    # the mean sojourn is that of M/M/1, 1 / (mu - lambda).
    random = np.random.default_rng(2)
    load, count = 0.5, 60_000
    arrivals_s, sizes_bytes = poisson_s(random, load, count), SIZES[sizes](random, count)
    squared_deviation = {"exponential": 1.0, "constant": 0.0, "two sizes": 0.1 * 81 + 0.9 / 81 - 1}[sizes]
    expected_s = 1 + load * (1 + squared_deviation) / (2 * (1 - load))
    if sizes == "exponential":
        assert expected_s == pytest.approx(1 / (1 - load))
    assert_mean(sojourns_s(arrivals_s, sizes_bytes), expected_s, within=0.15 if sizes == "two sizes" else 0.05)


# --- many connections: processor sharing ----------------------------------------------------------------------


@pytest.mark.parametrize("sizes", SIZES)
def test_on_a_shared_link_every_message_takes_longer_by_the_same_factor_whatever_the_sizes(sizes: str) -> None:
    # M/G/1 with processor sharing: the mean sojourn of a message of x seconds is x / (1 - load), whatever the
    # distribution of sizes (Kleinrock, Queueing Systems II, 1976, section 4.4).
    random = np.random.default_rng(3)
    load, count = 0.5, 50_000
    arrivals_s, sizes_bytes = poisson_s(random, load, count), SIZES[sizes](random, count)
    alone_s = 8 * sizes_bytes / RATE_BPS
    slower = sojourns_s(arrivals_s, sizes_bytes, connections=count) / alone_s
    assert_mean(slower, 1 / (1 - load), within=0.08)
    for low, high in ((0.0, 0.25), (0.25, 0.75), (0.75, 1.0)):
        least, most = np.quantile(alone_s, [low, high])
        assert_mean(slower[(alone_s >= least) & (alone_s <= most)], 1 / (1 - load), within=0.12)


def test_sharing_and_waiting_finish_the_same_work_in_the_same_busy_times() -> None:
    # Whoever is served first, the link works whenever there is something to do.
    random = np.random.default_rng(4)
    arrivals_s, sizes_bytes = poisson_s(random, 0.7, 5000), exponential_bytes(random, 5000)
    waiting_s = arrivals_s + lindley_s(arrivals_s, sizes_bytes)
    sharing_s = arrivals_s + sojourns_s(arrivals_s, sizes_bytes, connections=5000)
    assert busy_ends_s(arrivals_s, sharing_s) == pytest.approx(busy_ends_s(arrivals_s, waiting_s), rel=1e-8)


def busy_ends_s(arrivals_s: Floats, departures_s: Floats) -> list[float]:
    """When a link fell idle: departures up to which as many have arrived as departed."""
    departed_s = np.sort(departures_s)
    following_s = np.append(arrivals_s[1:], math.inf)
    return departed_s[departed_s < following_s].tolist()


@pytest.mark.parametrize("connections", [2, 5])
def test_a_link_that_some_connections_fill_is_a_waiting_line_with_as_many_servers(connections: int) -> None:
    # Each connection carries at most 1 / k of the link: M/M/k, and Erlang's C gives who waits. Departures in another
    # order leave the number of messages on the link, and so by Little's law the mean sojourn, as they are.
    random = np.random.default_rng(5)
    load, count = 0.5, 25_000
    arrivals_s, sizes_bytes = poisson_s(random, load, count), exponential_bytes(random, count)
    sojourn_s = sojourns_s(arrivals_s, sizes_bytes, connections=count, ceiling_bps=RATE_BPS / connections)
    offered = load * connections
    parts = [offered**n / math.factorial(n) for n in range(connections)]
    waiting = offered**connections / math.factorial(connections) / (1 - load)
    waits_share = waiting / (sum(parts) + waiting)
    assert_mean(sojourn_s, connections + waits_share / (1 - load), within=0.05)


@given(link_traces(), link_traces(), st.lists(st.floats(0, 5e3), min_size=1, max_size=20))
def test_the_rate_of_a_path_is_that_of_its_slowest_link_whenever_it_is_asked_for(
    first: LinkTrace, second: LinkTrace, times_s: list[float]
) -> None:
    """Times may go back, as those of the two directions of a link do."""
    path = (*(Link("a", "b", 1e9, 0.01, trace=trace) for trace in (first, second)), Link("b", "c", 5e7, 0.01))
    effects = NetworkEffects(cold_start=True)
    environment = simpy.Environment()
    route = Route("a", "c", path, (), 1, math.inf)
    shared = FairLink(environment, join_tables([RateTable((0.0,), (RATE_BPS,))]), 0)
    connection = Connection(environment, route, shared, effects, PathLatency([]), None, deque())
    for time_s in times_s:
        slowest_bps = min(5e7, *(float(trace.bandwidth_at(time_s)) for trace in (first, second)))
        assert connection._payload_bps(time_s) == payload_bps(effects, slowest_bps)


def test_windows_of_broken_size_leave_nothing_of_a_message_out() -> None:
    # Three windows of 333.25 bytes leave a quarter of a byte.
    environment, link = simpy.Environment(), Link("a", "b", 8000.0, 0.0)
    shared = FairLink(environment, join_tables([RateTable((0.0,), (8000.0,))]), 0)
    effects = NetworkEffects(window_bytes=333.25, cold_start=True)
    delivered: deque[Message] = deque()
    connection = Connection(
        environment, Route("x", "y", (link,), (link,), 1, math.inf), shared, effects, PathLatency([]), None, delivered
    )
    for number in range(3):
        connection.send(Message(0, number, 1000, 0.0))
    environment.run()
    assert [message.departed_s for message in delivered] == pytest.approx([1.0, 2.0, 3.0], rel=1e-9)
