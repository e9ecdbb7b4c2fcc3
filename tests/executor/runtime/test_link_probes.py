"""Probes of links that a plan does not use: of real runs, against the simulator; and what strangers send is ignored."""

import socket
import threading
import time
from dataclasses import replace

import pytest

from executor.backend import EmulatorChoice, TorchBackend
from executor.core.clock import RunClock
from executor.runtime.link_probes import LinkProbes
from executor.wan.testbed import missing
from planner.adapt.unused_links import PACKET_BYTES, SMALL_BYTES, is_link_probe, large_packets
from planner.events.event import Event
from planner.plan.plan import Plan
from planner.scenario.cluster import Cluster, Link
from planner.scenario.scenario import Scenario
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import chain_scenario, layered_plan
from tests.helpers.strategies.scripted_policy import Measuring
from traces.trace import LinkTrace

STEPS = 6

RATE_BPS = 1e8


def one_idle_device() -> tuple[Scenario, Plan]:
    """Return a plan of two of three regions; of the links to the third one changes its latency, one is slow."""
    scenario = chain_scenario([0.02] * 3, [0.02] * 3, bandwidth_bps=RATE_BPS)
    changing = LinkTrace([0.0, 1.0], [RATE_BPS] * 2, 60.0, [0.03, 0.15])  # type: ignore[arg-type]
    slow = LinkTrace([0.0], [RATE_BPS / 100], 60.0)  # type: ignore[arg-type]
    traces = {"region-2->region-0": changing, "region-1->region-2": slow}
    pairs = ((a, b) for a in range(3) for b in range(3) if a != b)
    links = [Link(f"region-{a}", f"region-{b}", RATE_BPS, 0.02 + 0.01 * a + 0.03 * b) for a, b in pairs]
    links = [replace(link, trace=traces.get(link.name)) for link in links]
    cluster = Cluster(scenario.cluster.devices, tuple(links))
    plan = layered_plan(scenario, [([(2, 1, 2), (3, 1, 2)], [2, 2, 2, 2])])
    return replace(scenario, cluster=cluster), plan


@pytest.mark.timed
@pytest.mark.parametrize("emulator", [pytest.param("shaper", marks=pytest.mark.slow), "relay"])
def test_real_probes_take_as_long_as_simulated_ones(emulator: EmulatorChoice) -> None:
    if emulator == "relay" and (reason := missing()) is not None:
        pytest.skip(reason)
    scenario, plan = one_idle_device()
    unchanged = Measuring({}), Measuring({})
    simulated = Simulator().run(scenario, plan, unchanged[0], STEPS)
    real = TorchBackend("paced", emulator=emulator).run(scenario, plan, unchanged[1], STEPS)
    ways = {(one, other) for one, other in (("device-0", "device-2"), ("device-1", "device-2"))}
    ways |= {(other, one) for one, other in ways}
    for record, policy in ((simulated, unchanged[0]), (real, unchanged[1])):
        probes = [event for event in record.events if is_link_probe(event)]
        assert {(each.device, each.peer) for each in probes} == ways
        # The policy sees what there is, step by step, and ends with the latency that the links have then.
        last = {(path.source, path.target): path for seen in policy.seen for path in seen.unused}
        last_s = {way: path.latency_s for way, path in last.items()}
        declared_s = {way: scenario.cluster.path(*way)[0].latency_at_s(5.0) for way in ways}
        assert last_s == pytest.approx(declared_s, abs=0.02)
        # Only of the slow link a large probe takes so long that hosts do not matter.
        rates_bps = {way: path.rate_bps for way, path in last.items()}
        assert rates_bps.pop(("device-1", "device-2")) == pytest.approx(RATE_BPS / 100, rel=0.3)
        assert all(rate_bps is None or rate_bps > RATE_BPS / 8 for rate_bps in rates_bps.values())
        # The first ones, before second 1, meet another latency.
        first = next(each for each in probes if (each.device, each.peer) == ("device-2", "device-0"))
        assert first.arrived_s - first.start_s < 0.12


def test_only_genuine_packets_of_this_session_count_and_each_once() -> None:
    scenario, plan = one_idle_device()
    names = [device.name for device in scenario.cluster.devices]
    rows, book, clock = _Rows(), _Book(), RunClock(time.monotonic())

    def probes(device: str, key: bytes = b"key", session: str = "session") -> LinkProbes:
        how = (scenario, "127.0.0.1", key, session, book, clock, rows, lambda _: None)
        return LinkProbes(device, names, *how)  # type: ignore[arg-type]

    receiver, sender = probes("device-2"), probes("device-0")
    port = int(book.get("session/probes/device-2").split()[0])
    # What is sent to the receiver comes by way of a stranger, who keeps it and sends everything twice.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.bind(("127.0.0.1", 0))
        for session in ("session", "other"):
            book.values[f"{session}/probes/device-2"] = f"{stranger.getsockname()[1]} 127.0.0.1".encode()
            book.values[f"{session}/probes/device-1"] = f"{stranger.getsockname()[1]} 127.0.0.1".encode()
        others = probes("device-0", key=b"another"), probes("device-0", session="other")
        packets = 1 + large_packets("device-0", "device-2", scenario)

        def kept() -> list[bytes]:
            return [stranger.recv(2 * PACKET_BYTES) for _ in range(packets)]

        for other in others:
            other.send(7, plan)
            for packet in kept():
                stranger.sendto(packet, ("127.0.0.1", port))
        for garbage in (b"", b"x", bytes(SMALL_BYTES), bytes(PACKET_BYTES), bytes(60_000)):
            stranger.sendto(garbage, ("127.0.0.1", port))
        sender.send(3, plan)
        # Too soon after it.
        sender.send(4, plan)
        genuine = kept()
        for packet in (*genuine[:5], *genuine, *genuine):
            stranger.sendto(packet, ("127.0.0.1", port))
        rows.await_count(2)
        # A changed step, and packets for this device sent to another one and back to their sender.
        changed = [bytes([*packet[:7], 9, *packet[8:]]) for packet in genuine]
        third = probes("device-1")
        other_port = int(book.get("session/probes/device-1").split()[0])
        own_port = sender._socket.getsockname()[1]
        for packet in genuine:
            stranger.sendto(packet, ("127.0.0.1", other_port))
            stranger.sendto(packet, ("127.0.0.1", own_port))
        for packet in changed:
            stranger.sendto(packet, ("127.0.0.1", port))
        # Two seconds later, as the sender's clock says, it sends a small one alone, and eleven later both.
        for step, later_s, count in ((5, 2.0, 1), (6, 11.0, packets)):
            clock.adjust(later_s)
            sender.send(step, plan)
            for packet in [stranger.recv(2 * PACKET_BYTES) for _ in range(count)]:
                stranger.sendto(packet, ("127.0.0.1", port))
        rows.await_count(5)
        # The probes of step 3 once more.
        for packet in genuine:
            stranger.sendto(packet, ("127.0.0.1", port))
        time.sleep(0.2)
    place, large_bytes = ("device-0", "device-2"), (packets - 1) * PACKET_BYTES
    assert [(row.device, row.peer, row.step, row.size_bytes) for row in rows.logged] == [
        (*place, 3, SMALL_BYTES),
        (*place, 3, large_bytes),
        (*place, 5, SMALL_BYTES),
        (*place, 6, SMALL_BYTES),
        (*place, 6, large_bytes),
    ]
    for each in (receiver, sender, third, *others):
        each.close()
    # Whoever has closed sends nothing.
    sender.send(6, plan)


def test_emulated_links_hold_one_probe_of_a_path_back_at_a_time() -> None:
    scenario, plan = one_idle_device()
    names = [device.name for device in scenario.cluster.devices]
    rows, book, clock, links = _Rows(), _Book(), RunClock(time.monotonic()), _HeldLinks()
    receiver = LinkProbes("device-2", names, scenario, "127.0.0.1", b"key", "session", book, clock, rows, _none)  # type: ignore[arg-type]
    sender = LinkProbes("device-0", names, scenario, "127.0.0.1", b"key", "session", book, clock, rows, links.to)  # type: ignore[arg-type]
    for step in range(3):
        sender.send(step, plan)
        links.began.wait(10.0)
        clock.adjust(20.0)
    time.sleep(0.2)
    assert (links.asked, rows.logged) == (1, [])
    links.released.set()
    rows.await_count(2)
    assert [row.step for row in rows.logged] == [0, 0]
    for each in (receiver, sender):
        each.close()


def _none(target: str) -> None:
    return None


class _HeldLinks:
    """Links that carry nothing until they are released."""

    def __init__(self) -> None:
        self.asked = 0
        self.began, self.released = threading.Event(), threading.Event()

    def to(self, target: str) -> "_HeldLinks":
        self.asked += 1
        return self

    def transmit(self, bits: float, ready_s: float, flows: int) -> float:
        self.began.set()
        self.released.wait(10.0)
        return ready_s

    def delivery_s(self, departed_s: float) -> float:
        return departed_s


def test_a_receiver_that_has_closed_records_nothing() -> None:
    scenario, plan = one_idle_device()
    names = [device.name for device in scenario.cluster.devices]
    rows, book, clock = _Rows(), _Book(), RunClock(time.monotonic())
    how = (scenario, "127.0.0.1", b"key", "session", book, clock, rows, lambda _: None)
    receiver, sender = (LinkProbes(name, names, *how) for name in ("device-2", "device-0"))  # type: ignore[arg-type]
    threads = [thread for thread in threading.enumerate() if thread.name == "link-probes"]
    receiver.close()
    sender.send(3, plan)
    sender.close()
    for thread in threads:
        thread.join(10.0)
        assert not thread.is_alive()
    assert rows.logged == []


class _Rows:
    def __init__(self) -> None:
        self.logged: list[Event] = []

    def log(self, event: Event) -> None:
        self.logged.append(event)

    def await_count(self, count: int) -> None:
        until_s = time.monotonic() + 10.0
        while len(self.logged) < count and time.monotonic() < until_s:
            time.sleep(0.01)


class _Book:
    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        return self.values[key]
