"""Probes of links that a plan does not use: of real runs, against the simulator; and what strangers send is ignored."""

import socket
import time
from dataclasses import replace

import pytest

from executor.backend import EmulatorChoice, TorchBackend
from executor.core.clock import RunClock
from executor.runtime.link_probes import _BODY, LinkProbes
from executor.wan.testbed import missing
from planner.adapt.unused_links import LINK_PROBE_BYTES, is_link_probe
from planner.events.event import Event
from planner.plan.plan import Plan
from planner.scenario.cluster import Cluster, Link
from planner.scenario.scenario import Scenario
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import chain_scenario, layered_plan
from tests.helpers.strategies.scripted_policy import Scripted
from traces.trace import LinkTrace

STEPS = 6


def one_idle_device() -> tuple[Scenario, Plan]:
    """Return a plan of two of three regions; all links differ, and the one between the others changes its latency."""
    scenario = chain_scenario([0.02] * 3, [0.02] * 3, bandwidth_bps=1e8)
    changing = LinkTrace([0.0, 1.0], [1e8, 1e8], 60.0, [0.03, 0.15])  # type: ignore[arg-type]
    pairs = ((a, b) for a in range(3) for b in range(3) if a != b)
    links = [Link(f"region-{a}", f"region-{b}", 1e8, 0.02 + 0.01 * a + 0.03 * b) for a, b in pairs]
    links = [replace(link, trace=changing) if link.name == "region-2->region-0" else link for link in links]
    cluster = Cluster(scenario.cluster.devices, tuple(links))
    plan = layered_plan(scenario, [([(2, 1, 2), (3, 1, 2)], [2, 2, 2, 2])])
    return replace(scenario, cluster=cluster), plan


@pytest.mark.parametrize("emulator", ["shaper", "relay"])
def test_real_probes_take_as_long_as_simulated_ones(emulator: EmulatorChoice) -> None:
    if emulator == "relay" and (reason := missing()) is not None:
        pytest.skip(reason)
    scenario, plan = one_idle_device()
    unchanged = Scripted({}), Scripted({})
    simulated = Simulator().run(scenario, plan, unchanged[0], STEPS)
    real = TorchBackend("paced", emulator=emulator).run(scenario, plan, unchanged[1], STEPS)
    ways = {(one, other) for one, other in (("device-0", "device-2"), ("device-1", "device-2"))}
    ways |= {(other, one) for one, other in ways}
    for record, policy in ((simulated, unchanged[0]), (real, unchanged[1])):
        probes = [event for event in record.events if is_link_probe(event)]
        assert {(each.device, each.peer) for each in probes} == ways
        # The policy sees what there is, step by step, and ends with the latency that the links have then.
        last_s = {(source, target): delay_s for seen in policy.seen for source, target, delay_s in seen.unused}
        declared_s = {way: scenario.cluster.path(*way)[0].latency_at_s(5.0) for way in ways}
        assert last_s == pytest.approx(declared_s, abs=0.02)
        # The first ones, before second 1, meet another latency.
        first = next(each for each in probes if (each.device, each.peer) == ("device-2", "device-0"))
        assert first.arrived_s - first.start_s == pytest.approx(0.03, abs=0.02)


def test_only_genuine_probes_of_this_session_are_recorded_and_each_once() -> None:
    scenario, plan = one_idle_device()
    names = [device.name for device in scenario.cluster.devices]
    rows, book = _Rows(), _Book()

    def probes(device: str, key: bytes = b"key", session: str = "session") -> LinkProbes:
        clock = RunClock(time.monotonic())
        return LinkProbes(device, names, scenario, "127.0.0.1", key, session, book, clock, rows, lambda _: None)  # type: ignore[arg-type]

    receiver, sender = probes("device-2"), probes("device-0")
    port = int(book.get("session/probes/device-2").split()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for garbage in (b"", b"x", bytes(LINK_PROBE_BYTES), bytes(LINK_PROBE_BYTES + 1), bytes(60_000)):
            stranger.sendto(garbage, ("127.0.0.1", port))
    book.values |= {f"{each}/probes/device-2": f"{port} 127.0.0.1".encode() for each in ("session", "other")}
    others = probes("device-0", key=b"another"), probes("device-0", session="other")
    for other in others:
        other.send(7, plan)
    # What is meant for another device may be sent on to this one.
    body = _BODY.pack(7, 0.0, 0)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.sendto(body + sender._proof("device-1", body), ("127.0.0.1", port))
    # A rank that begins a step again sends nothing new.
    for step in (3, 3, 2, 4):
        sender.send(step, plan)
    rows.await_count(2)
    assert [(row.device, row.peer, row.step) for row in rows.logged] == [
        ("device-0", "device-2", 3),
        ("device-0", "device-2", 4),
    ]
    receiver.close()
    sender.send(5, plan)
    time.sleep(0.1)
    assert len(rows.logged) == 2
    for each in (sender, *others):
        each.close()
    # Whoever has closed sends into nothing.
    sender.send(6, plan)


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
