"""The test bed carries what the scenario's links carry: the arithmetic, real TCP through it, and runs under it."""

import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.backend import TorchBackend, choose_emulator
from executor.wan.emulated_link import EmulatedLink, RateCurve, queue_bytes
from executor.wan.packets import InTransitQueue, Route, count_segments, frames_bytes, without_segments
from executor.wan.testbed import missing
from planner.adapt.observation import Observation
from planner.cost.network import PAYLOAD_BYTES
from planner.events.event import EventKind
from planner.plan.plan import Plan
from planner.runs.metrics import measure
from planner.scenario.cluster import Cluster, Link
from planner.scenario.faults import LinkOutage
from tests.helpers.networks.isolated_program import run_isolated
from tests.helpers.processes.command import COMMAND
from tests.helpers.processes.process_watch import PATIENCE_S, left_behind, processes_of, started, wait_until
from tests.helpers.scenarios.builders import chain_plan, chain_scenario, mesh_scenario
from tests.helpers.strategies.trace_strategies import link_traces
from traces.common.errors import InputError, RunError
from traces.trace import LinkTrace

FRAME_BYTES = 1514

AMOUNTS = st.lists(st.tuples(st.floats(0, 5), st.floats(1, 1e7)), min_size=1, max_size=20)


def link(bandwidth_bps: float = 8e6, latency_s: float = 0.0, **others: Any) -> Link:
    return Link("a", "b", bandwidth_bps, latency_s, **others)


# ---- arithmetic


@given(link_traces(), AMOUNTS)
def test_a_curve_finishes_when_the_trace_says(trace: LinkTrace, amounts: list[tuple[float, float]]) -> None:
    curve, now_s = RateCurve(link(trace=trace)), 0.0
    for pause_s, bits in amounts:
        start_s = now_s + pause_s
        expected_s = start_s + float(trace.time_to_send(bits, start_s))
        finish_s = curve.finish_s(start_s, bits)
        if expected_s == inf:
            assert finish_s == inf
            return
        # A rounding of the amount is a rounding divided by the rate, and in between may lie an outage.
        earlier_s, later_s = (float(start_s + trace.time_to_send(bits + slack, start_s)) for slack in (-2e-6, 2e-6))
        assert earlier_s * (1 - 1e-9) - 1e-9 <= finish_s <= later_s * (1 + 1e-9) + 1e-9
        now_s = max(start_s, finish_s)


@given(link_traces(loops=True), st.lists(st.floats(0.01, 50), min_size=2, max_size=6), st.floats(0, 20))
def test_outages_carry_nothing_and_everything_else_does(
    trace: LinkTrace, lengths_s: list[float], start_s: float
) -> None:
    edges_s = np.cumsum(lengths_s)
    outages = [(float(a), float(b)) for a, b in zip(edges_s[::2], edges_s[1::2], strict=False)]
    bits = 1e6
    finish_s = RateCurve(link(trace=trace), outages).finish_s(start_s, bits)
    if finish_s == inf:
        assert not trace.bandwidth_bps.any()
        return
    out = sum(
        float(trace.bits_between(max(a, start_s), min(b, finish_s)))
        for a, b in outages
        if max(a, start_s) < min(b, finish_s)
    )
    assert float(trace.bits_between(start_s, finish_s)) - out == pytest.approx(bits, rel=1e-6, abs=1)


def test_before_the_run_a_link_is_as_at_its_start_and_never_dark() -> None:
    stepped = LinkTrace(np.array([0.0, 1.0]), np.array([4e6, 1e6]), 2.0)
    assert RateCurve(link(trace=stepped)).finish_s(-100.0, 4e6) == pytest.approx(-99.0)
    assert RateCurve(link(trace=stepped)).finish_s(-0.5, 4e6) == pytest.approx(0.5)
    dark = LinkTrace(np.array([0.0, 1.0]), np.array([0.0, 1e6]), 2.0)
    assert RateCurve(link(8e6, trace=dark)).finish_s(-100.0, 8e6) == pytest.approx(-99.0)


def test_the_latency_is_that_of_the_moment_of_departure() -> None:
    trace = LinkTrace(np.array([0.0, 1.0]), np.array([1e6, 1e6]), 2.0, np.array([0.1, 0.3]))
    emulated = EmulatedLink(link(1e6, trace=trace), [], 0)
    emulated.start_run(50.0)
    assert emulated.accept(50.0, 25_000) == pytest.approx(50.2 + 0.1)
    assert emulated.accept(51.0, 25_000) == pytest.approx(51.2 + 0.3)


# Up to several times what a queue holds.
PACKETS = st.lists(st.tuples(st.floats(0, 0.5), st.integers(60, 8_000_000)), min_size=1, max_size=60)


@given(PACKETS, st.floats(0, 0.05))
def test_a_queue_holds_its_bytes_and_keeps_the_order(packets: list[tuple[float, int]], jitter_s: float) -> None:
    described = link(8e6, 0.02, jitter_s=jitter_s)
    emulated, now_s = EmulatedLink(described, [], 3), 0.0
    leaving: list[tuple[float, int]] = []
    free_s, last_s = 0.0, 0.0
    for pause_s, size_bytes in packets:
        now_s += pause_s
        waiting = sum(size for end_s, size in leaving if end_s > now_s)
        release_s = emulated.accept(now_s, size_bytes, 3)
        if waiting and waiting + size_bytes > queue_bytes(described):
            assert release_s is None
            continue
        assert release_s is not None
        free_s = max(free_s, now_s) + 8 * size_bytes / 8e6
        leaving.append((free_s, size_bytes))
        early_s = max(last_s, free_s + 0.02)
        # What comes before the start of a run counts from a time far ahead of it.
        assert early_s - 1e-6 <= release_s <= max(last_s, free_s + 0.02 + jitter_s) + 1e-6
        last_s = release_s
    assert emulated.count.carried_frames == 3 * len(leaving)
    assert emulated.count.dropped_frames == 3 * (len(packets) - len(leaving))


def lost_of(seed: int, packets: Sequence[int]) -> list[int]:
    """The numbers of the frames that get lost of packets of so many frames."""
    emulated, first, lost = EmulatedLink(link(loss=0.02), [], seed), 0, []
    for frames in packets:
        lost += [first + number for number in emulated.lose(frames)]
        first += frames
    return lost


def test_losses_are_single_frames_however_they_are_packed() -> None:
    frames = 40_000
    lost = lost_of(1, [1] * frames)
    assert lost == lost_of(1, [40] * (frames // 40)) != lost_of(2, [1] * frames)
    # Four standard deviations of the binomial.
    assert len(lost) == pytest.approx(0.02 * frames, abs=4 * (0.02 * 0.98 * frames) ** 0.5)


def test_a_link_that_stays_dark_is_an_error_with_its_name() -> None:
    trace = LinkTrace(np.array([0.0, 0.01]), np.array([10e6, 0.0]), 0.02, loops=False)
    emulated = EmulatedLink(link(trace=trace), [], 0)
    emulated.start_run(7.0)
    with pytest.raises(RunError, match="link a->b carries nothing for 86400 s from 0"):
        emulated.accept(7.0, 100_000)


def test_packets_cross_one_link_after_the_other_and_share_them() -> None:
    first, second = EmulatedLink(link(8e6, 0.1), [], 0), EmulatedLink(Link("b", "c", 4e6, 0.2), [], 0)
    both, last = Route((first, second), 1), Route((second,), 2)
    in_transit = InTransitQueue()
    packet = bytes(10) + bytes([0x45]) + bytes(1490 - 1)
    size_bytes = frames_bytes(packet, 1)
    assert size_bytes == 1504
    crossing_s = (8 * size_bytes / 8e6, 8 * size_bytes / 4e6)
    in_transit.put(packet, both, 10.0)
    in_transit.put(packet, both, 10.0)
    arrives_s = 10.0 + crossing_s[0] + 0.1
    # One that enters the second link just before the first packet gets there goes first.
    in_transit.put(packet, last, arrives_s - 1e-4)
    came = []
    while in_transit.next_s < inf:
        due_s = in_transit.next_s
        came += [(due_s, target) for target, _ in in_transit.arrived(due_s)]
    assert [target for _, target in came] == [2, 1, 1]
    expected_s = [arrives_s - 1e-4 + (number + 1) * crossing_s[1] + 0.2 for number in range(3)]
    assert [due_s for due_s, _ in came] == pytest.approx(expected_s, abs=1e-6)


# ---- packets


def ones_sum(data: bytes) -> int:
    padded = data + bytes(len(data) % 2)
    total = sum(struct.unpack(f"!{len(padded) // 2}H", padded))
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def pseudo_sum(tcp_bytes: int) -> int:
    """The sum over the pseudo-header of TCP, which the kernel leaves in the field of the check sum."""
    return ones_sum(socket.inet_aton("10.99.0.2") + socket.inet_aton("10.99.0.3") + struct.pack("!HH", 6, tcp_bytes))


def tcp_packet(payload: bytes, sequence: int, flags: int, segment_bytes: int, identity: int) -> bytes:
    """A packet as the kernel hands it over; a super-packet if ``segment_bytes`` is not 0."""
    tcp_bytes = 32 + len(payload)
    addresses = socket.inet_aton("10.99.0.2") + socket.inet_aton("10.99.0.3")
    ip = bytearray(struct.pack("!BBHHHBBH", 0x45, 0, 20 + tcp_bytes, identity, 0x4000, 64, 6, 0) + addresses)
    struct.pack_into("!H", ip, 10, 0xFFFF - ones_sum(bytes(ip)))
    tcp = struct.pack("!HHIIBBHHH", 4000, 5000, sequence, 9, 0x80, flags, 500, pseudo_sum(tcp_bytes), 0) + bytes(12)
    header = struct.pack("<BBHHHH", 1, 1 if segment_bytes else 0, 52, segment_bytes, 20, 16)
    return header + bytes(ip) + tcp + payload


FIN_PSH_ACK_CWR = 0x99


@given(st.data(), st.integers(2, 45), st.integers(500, 1448), st.integers(0, 2**32 - 1))
def test_a_super_packet_that_loses_segments_is_what_the_others_are(
    data: st.DataObject, segments: int, step: int, sequence: int
) -> None:
    size = data.draw(st.integers((segments - 1) * step + 1, segments * step))
    payload = np.random.default_rng(0).bytes(size)
    packet = tcp_packet(payload, sequence, FIN_PSH_ACK_CWR, step, 65_530)
    assert count_segments(packet) == segments
    assert frames_bytes(packet, segments) == size + segments * (52 + 14)
    lost = sorted(data.draw(st.sets(st.integers(0, segments - 1), min_size=1)))
    kept, expected = without_segments(packet, segments, lost), []
    runs = "".join("-" if number in lost else "x" for number in range(segments)).split("-")
    first = 0
    for run in runs:
        end = first + len(run)
        if run:
            flags = FIN_PSH_ACK_CWR & (0xFF if end == segments else ~0x09) & (0xFF if first == 0 else ~0x80)
            single = len(run) == 1
            expected.append(
                tcp_packet(
                    payload[first * step : end * step],
                    (sequence + first * step) % 2**32,
                    flags,
                    0 if single else step,
                    (65_530 + first) % 2**16,
                )
            )
        first = end + 1
    assert [part for part, _ in kept] == expected
    assert [count for _, count in kept] == [len(run) for run in runs if run]


# ---- real TCP


@cache
def lack() -> str | None:
    return missing()


DURATION_S = 3.5
STEPS = LinkTrace(np.array([0.0, 1.0, 2.0]), np.array([80e6, 30e6, 60e6]), 10.0)
OUTAGE_S = (1.0, 1.6)
LATENCY_S = 0.02

# Source and target of each flow, and the link between them.
FLOWS: dict[str, tuple[str, dict[str, Any]]] = {
    "steady": ("tcp", {"bandwidth_bps": 100e6, "latency_s": 0.005}),
    "stepped": ("tcp", {"bandwidth_bps": 60e6, "latency_s": 0.005, "trace": STEPS}),
    "ping": ("ping", {"bandwidth_bps": 100e6, "latency_s": LATENCY_S}),
    "lossy": ("tcp", {"bandwidth_bps": 50e6, "latency_s": 0.005, "loss": 0.01, "jitter_s": 0.002}),
    "outage": ("tcp", {"bandwidth_bps": 40e6, "latency_s": 0.005}),
}


@pytest.fixture(scope="module")
def traffic(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What all flows measured, each between two hosts of its own, all at the same time."""
    if lack() is not None:
        pytest.skip(str(lack()))
    scenario = mesh_scenario(2 * len(FLOWS), [0.001] * 2 * len(FLOWS), [0.002] * 2 * len(FLOWS))
    links = []
    for number, (_, described) in enumerate(FLOWS.values()):
        ends = (f"device-{2 * number}", f"device-{2 * number + 1}")
        links += [Link(*pair, **described) for pair in (ends, ends[::-1])]
    number = list(FLOWS).index("outage")
    outage = LinkOutage(f"device-{2 * number}->device-{2 * number + 1}", *OUTAGE_S)
    cluster = Cluster(scenario.cluster.devices, tuple(links))
    folder = tmp_path_factory.mktemp("job")
    whole = replace(scenario, cluster=cluster, faults=(outage,))
    flows = [[kind, 2 * number, 2 * number + 1, DURATION_S] for number, (kind, _) in enumerate(FLOWS.values())]
    measured = run_isolated(Path(__file__).with_name("wan_traffic.py"), folder, whole, flows, timeout_s=60)
    return dict(zip(FLOWS, measured, strict=True))


def bytes_until(arrivals: list[list[float]], time_s: float) -> float:
    return float(np.interp(time_s, [at for at, _ in arrivals], [total for _, total in arrivals]))


def wire_bits(arrivals: list[list[float]], start_s: float, end_s: float) -> float:
    """Bits on the wire of the payload that arrived between two times."""
    payload_bytes = bytes_until(arrivals, end_s) - bytes_until(arrivals, start_s)
    return 8 * payload_bytes * FRAME_BYTES / PAYLOAD_BYTES


def assert_follows(arrivals: list[list[float]], trace: LinkTrace) -> None:
    """Never ahead of what the link had carried by then, whoever is late; and the better part of what it could.

    How close TCP comes when nobody has to wait for its turn is measured, not asserted: `ropebridge bench fidelity`.
    """
    for time_s in np.arange(0.5, DURATION_S, 0.1):
        offered = float(trace.bits_between(0.0, time_s))
        assert wire_bits(arrivals, 0.0, time_s) <= offered + 8 * FRAME_BYTES
    assert wire_bits(arrivals, 0.3, DURATION_S) >= 0.5 * float(trace.bits_between(0.3, DURATION_S))


@pytest.mark.timed
def test_tcp_follows_a_steady_link(traffic: dict[str, Any]) -> None:
    assert_follows(traffic["steady"]["arrivals"], LinkTrace([0.0], [100e6], 10.0))


@pytest.mark.timed
def test_tcp_follows_a_stepped_trace(traffic: dict[str, Any]) -> None:
    assert_follows(traffic["stepped"]["arrivals"], STEPS)


@pytest.mark.timed
def test_a_round_trip_is_two_latencies(traffic: dict[str, Any]) -> None:
    round_trip_s = min(traffic["ping"]["round_trips_s"])
    # The quickest of many: late by no more than a turn of another process.
    assert 2 * LATENCY_S <= round_trip_s <= 2 * LATENCY_S + 0.01


@pytest.mark.timed
def test_an_outage_lets_nothing_through_and_everything_arrives(traffic: dict[str, Any]) -> None:
    flow = traffic["outage"]
    start_s, end_s = OUTAGE_S
    # What left before it is still under way for the latency.
    assert wire_bits(flow["arrivals"], start_s + 0.02, end_s) < 8 * 65536
    assert wire_bits(flow["arrivals"], 0.0, start_s) > 0.25 * 40e6
    assert wire_bits(flow["arrivals"], end_s + 0.5, DURATION_S) > 0.25 * 40e6
    assert flow["right"]


@pytest.mark.timed
def test_what_is_lost_on_the_way_is_sent_again(traffic: dict[str, Any]) -> None:
    flow = traffic["lossy"]
    assert flow["right"]
    assert flow["arrivals"][-1][1] > 1e6


# ---- runs


class Scripted:
    """Changes the plan after step 1, whatever it sees."""

    def decide(self, observation: Observation, plan: Plan) -> Plan | None:
        return plan.with_microbatches(0, (2,) * 4, (2, 1)) if observation.step == 1 else None


def test_a_run_over_emulated_links() -> None:
    if lack() is not None:
        pytest.skip(str(lack()))
    scenario = chain_scenario(
        [0.004, 0.004], [0.008, 0.008], output_bytes=[250_000, 1000], bandwidth_bps=100e6, latency_s=0.02
    )
    plan = chain_plan(scenario, microbatches=[1] * 8, depths=[4, 1])
    record = TorchBackend("paced", emulator="relay").run(scenario, plan, Scripted(), 6)
    (decision,) = record.decisions
    assert decision.observed_step == 1
    assert record.network is not None
    assert record.network.emulator == "relay"
    assert record.network.tcp["tcp_congestion_control"] in ("cubic", "reno")
    assert record.network.tcp["tcp_slow_start_after_idle"] == "0"
    assert {event.step for event in record.events if event.kind is EventKind.COMPUTE} == set(range(6))
    # The line alone needs this long for a step's activations; loopback as it is would need no time.
    assert measure(record).step_s > 8 * 250_000 * 8 / 100e6


def test_a_relay_that_is_killed_ends_the_run_with_the_cause(tmp_path: Path) -> None:
    if lack() is not None:
        pytest.skip(str(lack()))
    run = ["run", "two-regions", "--strategy=megatron", "--compute", "paced", "--emulator", "relay", "--steps", "500"]
    with started(run, tmp_path) as (process, mark):
        wait_until(lambda: len(processes_of("executor.rank.worker", mark)) == 2, "the workers do not start")
        time.sleep(2.0)
        (relay,) = processes_of("executor.wan.relay", mark)
        os.kill(relay, signal.SIGKILL)
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 1
        assert errors.splitlines()[0] == "ropebridge: the relay of the emulated links ended with status -9"
    assert left_behind(tmp_path) == []


# A process that can make namespaces neither as it is nor in a user namespace: see user_namespaces(7).
FORBID = """
import ctypes, os, sys
libc, user, group = ctypes.CDLL(None), os.getuid(), os.getgid()
assert libc.unshare(0x10000000) == 0
open("/proc/self/setgroups", "w").write("deny")
open("/proc/self/uid_map", "w").write(f"0 {user} 1")
open("/proc/self/gid_map", "w").write(f"0 {group} 1")
open("/proc/sys/user/max_user_namespaces", "w").write("0")
PR_CAPBSET_DROP, CAP_SYS_ADMIN = 24, 21
assert libc.prctl(PR_CAPBSET_DROP, CAP_SYS_ADMIN, 0, 0, 0) == 0
os.execv(sys.argv[1], sys.argv[1:])
"""


def test_a_machine_that_forbids_namespaces() -> None:
    if lack() is not None:
        pytest.skip(str(lack()))
    command = [*COMMAND, "run", "two-regions", "--strategy=megatron", "--compute", "paced", "--emulator", "relay"]
    done = subprocess.run(
        [sys.executable, "-c", FORBID, *command], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "the kernel refuses a user and network namespace" in line
    assert "set user.max_user_namespaces to 10000" in line


def test_what_emulates_where_the_relay_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executor.backend.missing", lambda: "no TUN")
    told: list[str] = []
    assert choose_emulator("auto", told.append) == "shaper"
    assert told == ["links are emulated inside the processes, not below TCP: no TUN"]
    with pytest.raises(InputError, match="no TUN"):
        choose_emulator("relay", told.append)
