"""Both ends of a measurement, and the arithmetic on what they find."""

import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.networks.responders import free_port, server
from tests.helpers.strategies.trace_strategies import link_traces
from traces.common.errors import InputError
from traces.probe.arrivals import Arrivals, arrivals_of
from traces.probe.bursts import MOST_BYTES, BurstRequest, parse_request
from traces.probe.conversation import DEFAULT_PORT, GREETING, Address, Conversation, PeerError, parse_address
from traces.probe.path_profile import DirectionProfile
from traces.probe.peer import BusyError, Peer
from traces.probe.responder import Responder
from traces.statistics import Interval, interval_of
from traces.trace import LinkTrace

JSON_SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
JSON_VALUES = JSON_SCALARS | st.lists(JSON_SCALARS, max_size=3) | st.just({"a": [1]})
NUMBERS = st.lists(st.integers(-1, 9) | st.floats(-0.1, 9.0), max_size=4)


@contextmanager
def serving(told: list[str] | None = None) -> Iterator[Address]:
    """A responder in a thread of this process."""
    address = Address("127.0.0.1", free_port())
    with Responder(address, {}, [].append if told is None else told.append) as responder:
        thread = threading.Thread(target=responder.serve, daemon=True)
        thread.start()
        yield address
    thread.join(timeout=30)
    assert not thread.is_alive()


# ---- addresses


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("host", Address("host", DEFAULT_PORT)),
        ("10.0.0.5:99", Address("10.0.0.5", 99)),
        ("fd00::5", Address("fd00::5", DEFAULT_PORT)),
        ("[fd00::5]", Address("fd00::5", DEFAULT_PORT)),
        ("[fd00::5]:99", Address("fd00::5", 99)),
    ],
)
def test_an_address_is_read_and_written(text: str, expected: Address) -> None:
    assert parse_address(text) == expected
    assert parse_address(str(expected)) == expected


@pytest.mark.parametrize(
    "text", ["", ":99", "host:", "host:0", "host:65536", "host:x", "[::1", "[::1]x", "[::1]:", "a b", "[]:9"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"is not an address|is not a port"):
        parse_address(text)


# ---- arithmetic


def arrivals(trace: LinkTrace, size_bytes: int, notes: int) -> Arrivals:
    """As a receiver notes them who looks often, of a burst over a link like that."""
    totals = np.unique(np.linspace(1, size_bytes, notes).astype(int))
    times_s = trace.time_to_send(8 * totals, 0.0)
    return Arrivals(tuple(times_s.tolist()), tuple(totals.tolist()), float(times_s[-1]), complete=True)


@given(st.floats(1e5, 1e10), st.integers(10_000, 10**8))
def test_a_steady_link_has_its_rate_in_every_window(rate_bps: float, size_bytes: int) -> None:
    found = arrivals(LinkTrace([0.0], [rate_bps], 1.0), size_bytes, 500)
    assert found.window_rates_bps(6) == pytest.approx([rate_bps] * 6, rel=0.01)
    assert found.last_half_bps() == pytest.approx(rate_bps, rel=0.01)


def test_slow_start_is_no_part_of_the_rate() -> None:
    slow = LinkTrace([0.0, 0.5], [1e6, 10e6], 100.0)
    found = arrivals(slow, 5_000_000, 1000)
    assert found.window_rates_bps(6) == pytest.approx([10e6] * 6, rel=0.01)
    assert found.last_half_bps() == pytest.approx(10e6, rel=0.01)


def test_silence_at_the_end_counts_unless_everything_had_come() -> None:
    halves = ((0.1, 1.0, 1.1), (1000, 100_000, 200_000))
    whole, cut = Arrivals(*halves, 2.1, complete=True), Arrivals(*halves, 2.1, complete=False)
    assert whole.last_half_bps() == pytest.approx(8 * 100_000 / 0.1)
    assert cut.last_half_bps() == pytest.approx(8 * 100_000 / 1.1)


def test_what_cannot_be_told_is_not() -> None:
    nothing, at_once = Arrivals((), (), 1.0, complete=False), Arrivals((0.2,), (5000,), 0.2, complete=True)
    assert (nothing.last_half_bps(), nothing.window_rates_bps(6), nothing.size_bytes) == (0.0, [], 0)
    assert (at_once.last_half_bps(), at_once.window_rates_bps(6)) == (None, [])


@given(link_traces(loops=True))
def test_arrivals_survive_the_way_to_the_other_end(trace: LinkTrace) -> None:
    if not trace.bandwidth_bps.all():
        return
    found = arrivals(trace, 10_000, 50)
    again = arrivals_of(json.loads(json.dumps(found.as_message())))
    assert again.totals_bytes == found.totals_bytes
    assert again.times_s == pytest.approx(found.times_s, abs=1e-6)


@given(
    st.dictionaries(st.sampled_from(["times_s", "totals_bytes", "end_s", "complete"]), JSON_VALUES)
    | st.fixed_dictionaries(
        {"times_s": NUMBERS, "totals_bytes": NUMBERS, "end_s": st.floats(-1, 20), "complete": st.booleans()}
    )
)
def test_arrivals_from_elsewhere_make_sense_or_are_an_error(message: dict[str, Any]) -> None:
    try:
        found = arrivals_of(message)
    except PeerError:
        return
    assert all(a <= b for each in (found.times_s, found.totals_bytes) for a, b in pairwise(each))
    rate_bps = found.last_half_bps()
    assert rate_bps is None or rate_bps >= 0


@given(st.dictionaries(st.sampled_from(["direction", "bytes", "seconds", "connections"]), JSON_VALUES))
def test_an_order_from_elsewhere_is_bounded_or_refused(message: dict[str, Any]) -> None:
    try:
        order = parse_request(message)
    except InputError:
        return
    assert 0 < order.size_bytes <= MOST_BYTES
    assert parse_request(order.as_message()) == order


def test_an_interval_is_that_of_six_rounds() -> None:
    assert interval_of([3.0, 1.0, 2.0]) == Interval(1.0, 2.0, 3.0)
    # One outlier among many is in one of six rounds, and does not show in its median.
    assert interval_of([1.0] * 29 + [50.0]) == Interval(1.0, 1.0, 1.0)


def direction(single_bps: float, four_bps: float, full_bytes: float | None) -> DirectionProfile:
    rates = {1: interval_of([single_bps]), 4: interval_of([four_bps])}
    return DirectionProfile(rates, {1: full_bytes, 4: full_bytes}, ())


def test_a_window_is_a_ceiling_only_where_all_signs_say_so() -> None:
    # 64 Mbit/s for 50 ms are 400 kB under way.
    assert direction(64e6, 110e6, 500e3).window_bytes(0.05) == pytest.approx(400e3)
    assert direction(64e6, 66e6, 500e3).window_bytes(0.05) is None, "more connections carry no more"
    assert direction(64e6, 110e6, None).window_bytes(0.05) is None, "the path held it up"
    assert direction(64e6, 110e6, 4e6).window_bytes(0.05) is None, "the buffer held far more than was under way"


# ---- both ends


@pytest.mark.parametrize("where", ["there", "back"])
@pytest.mark.parametrize("connections", [1, 3])
def test_a_burst_arrives_whole(where: Any, connections: int) -> None:
    told: list[str] = []
    with serving(told) as address:
        with Peer(address) as peer:
            assert min(peer.round_trips_s(5)) > 0
            for _ in range(2):
                found, _ = peer.burst(BurstRequest(where, 3_000_001, 20.0, connections))
                assert (found.size_bytes, found.complete) == (3_000_001, True)
                assert list(found.times_s) == sorted(found.times_s)
            assert len(peer.round_trips_s(5)) == 5
        until_told(told)
    there, back = (6_000_002, 0) if where == "there" else (0, 6_000_002)
    assert told == [f"127.0.0.1 measured: {there:,} bytes from there, {back:,} back"]


@pytest.mark.parametrize("where", ["there", "back"])
def test_a_burst_ends_with_its_time(where: Any) -> None:
    with serving() as address, Peer(address) as peer:
        found, _ = peer.burst(BurstRequest(where, MOST_BYTES, 0.2, 2))
        assert not found.complete
        assert 0 < found.size_bytes < MOST_BYTES
        assert found.end_s - found.times_s[0] >= 0.2
        # And the session is still good.
        assert peer.burst(BurstRequest(where, 1000, 5.0, 1))[0].size_bytes == 1000


def test_a_responder_that_ends_between_two_bursts_has_closed_the_connection() -> None:
    with ExitStack() as stack:
        with serving() as address:
            peer = stack.enter_context(Peer(address))
            assert len(peer.round_trips_s(1)) == 1
        with pytest.raises(PeerError, match=f"{address} closed the connection"):
            peer.burst(BurstRequest("there", 1000, 5.0, 1))


def until_told(told: list[str]) -> None:
    deadline_s = time.monotonic() + 30
    while not told:
        assert time.monotonic() < deadline_s, "nobody says that it is over"
        time.sleep(0.01)


def test_one_peer_at_a_time_and_a_broken_session_can_be_replaced() -> None:
    told: list[str] = []
    with serving(told) as address:
        with Peer(address) as first:
            with pytest.raises(BusyError, match="serves another peer"):
                Peer(address)
            with pytest.raises(BusyError, match="serves another peer"):
                Peer(address, replaces="0" * 32)
            with Peer(address, replaces=first.token) as second:
                assert second.burst(BurstRequest("there", 1000, 5.0, 1))[0].size_bytes == 1000
                with pytest.raises(PeerError):
                    first.round_trips_s(1)
        until_told(told)
        with Peer(address) as third:
            assert len(third.round_trips_s(2)) == 2


def raw(address: Address) -> socket.socket:
    return socket.create_connection((address.host, address.port), timeout=20)


def said(connection: socket.socket) -> bytes:
    """All that the other end says until it hangs up."""
    heard = b""
    with connection:
        try:
            while more := connection.recv(1 << 16):
                heard += more
        except ConnectionResetError:
            pass
    return heard


def framed(text: bytes) -> bytes:
    return struct.pack("!I", len(text)) + text


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        GREETING + struct.pack("!I", 1 << 30),
        GREETING + framed(b"not json"),
        GREETING + framed(b"[" * 100_000),
        GREETING + framed(b'"text"'),
        GREETING + framed(b'{"want": "everything"}'),
        GREETING + framed(b'{"join": "0123"}'),
        GREETING + framed(b'{"join": "\\ud800"}'),
    ],
)
def test_a_responder_hangs_up_on_strangers_and_serves_on(words: bytes) -> None:
    with serving() as address:
        connection = raw(address)
        connection.sendall(words)
        assert said(connection) == GREETING
        with Peer(address) as peer:
            assert len(peer.round_trips_s(1)) == 1


BURST = {"do": "burst", "direction": "back", "bytes": 1, "seconds": 1, "connections": 1}


@pytest.mark.parametrize(
    ("wish", "reason"),
    [
        ({**BURST, "bytes": 10**15}, r"a burst of 1e\+15 bytes"),
        ({**BURST, "seconds": 1e6}, r"a burst of 1e\+06 seconds"),
        ({**BURST, "connections": 999}, "a burst of 999 connections"),
        ({**BURST, "bytes": True}, "lacks its number"),
        ({**BURST, "direction": "elsewhere"}, "direction 'elsewhere'"),
        ({"do": "echo", "count": 10**9}, "1000000000 echoes"),
        ({"do": "messages", "port": 22}, "'messages' is not a service"),
        ({}, "'None' is not a service"),
    ],
)
def test_a_responder_refuses_more_than_it_gives(wish: dict[str, Any], reason: str) -> None:
    with serving() as address, raw(address) as connection:
        conversation = Conversation(connection, 20.0, "the responder")
        conversation.greet()
        conversation.send_json({"want": "session"})
        assert "session" in conversation.receive_json()
        # Twice: it serves on.
        for _ in range(2):
            conversation.send_json(wish)
            with pytest.raises(PeerError, match=f"the responder refused: .*{reason}"):
                conversation.receive_json()


def greet(connection: socket.socket) -> None:
    connection.sendall(GREETING)
    connection.recv(len(GREETING))


@pytest.mark.parametrize(
    "words", [b"", struct.pack("!I", 1 << 30), framed(b"{"), framed(b"[]"), framed(b'{"session": "x"}')]
)
def test_a_peer_survives_a_responder_that_makes_no_sense(words: bytes) -> None:
    def answer(connection: socket.socket) -> None:
        greet(connection)
        connection.sendall(words)

    def ask(address: str) -> None:
        with Peer(parse_address(address), 5.0) as peer:
            peer.round_trips_s(1)

    with server(answer) as address, pytest.raises(PeerError, match=address):
        ask(address)
