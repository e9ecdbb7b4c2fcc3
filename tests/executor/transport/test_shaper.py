"""The emulated links carry what their traces say, whoever sends over them."""

import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path

import numpy as np
import pytest
import simpy

from executor.core.clock import RunClock
from executor.transport.link_shaper import LinkShaper
from planner.scenario.cluster import Cluster, Device, Link
from sim.kernel.events import Flow
from sim.kernel.piecewise import RateTable, join_tables
from sim.network.shared_links import SharedLinks, max_min_rates
from traces.common.errors import RunError
from traces.trace import LinkTrace


def make_cluster(trace: LinkTrace | None = None) -> Cluster:
    devices = (Device("a", "cpu", "east", 1), Device("b", "cpu", "west", 1))
    return Cluster(devices, (Link("east", "west", 100e6, 0.01, trace), Link("west", "east", 100e6, 0.01, trace)))


def make_shaper(tmp_path: Path, cluster: Cluster, clock: RunClock | None = None) -> LinkShaper:
    return LinkShaper(tmp_path / "ledger", cluster, clock or RunClock(time.monotonic()))


def test_a_lone_message_takes_what_the_trace_says(tmp_path: Path) -> None:
    trace = LinkTrace(np.array([0.0, 0.1, 0.2]), np.array([80e6, 0.0, 40e6]), 0.4)
    cluster = make_cluster(trace)
    shaper = make_shaper(tmp_path, cluster)
    bits = 9e6
    left_s = shaper.transmit(cluster.path("a", "b"), bits, 0.02)
    assert left_s == pytest.approx(0.02 + float(trace.time_to_send(bits, 0.02)), abs=1e-9)
    shaper.close()


def test_messages_one_after_the_other_waste_nothing(tmp_path: Path) -> None:
    cluster = make_cluster()
    shaper = make_shaper(tmp_path, cluster)
    path = cluster.path("a", "b")
    ends_s = [shaper.transmit(path, 1e6, 0.0) for _ in range(3)]
    assert ends_s == pytest.approx([0.01, 0.02, 0.03], abs=1e-9)
    shaper.close()


def test_network_interfaces_of_hosts_limit_what_leaves_and_comes(tmp_path: Path) -> None:
    plain = make_cluster()
    slow = tuple(
        replace(each, host=f"host-{each.name}", interface_bps=rate_bps)
        for each, rate_bps in zip(plain.devices, (50e6, 20e6), strict=True)
    )
    cluster = Cluster(slow, plain.links)
    shaper = make_shaper(tmp_path, cluster)
    assert shaper.transmit(cluster.path("a", "b"), 1e6, 0.0) == pytest.approx(0.05, abs=1e-9)
    # Each way has a rate of its own.
    assert shaper.transmit(cluster.path("b", "a"), 1e6, 0.0) == pytest.approx(0.05, abs=1e-9)
    shaper.close()


def test_two_threads_share_a_link_and_directions_do_not(tmp_path: Path) -> None:
    cluster = make_cluster()
    shaper = make_shaper(tmp_path, cluster)
    ends_s: dict[str, float] = {}

    def send(name: str, source: str, target: str) -> None:
        ends_s[name] = shaper.transmit(cluster.path(source, target), 10e6, 0.0)

    jobs = [("one", "a", "b"), ("two", "a", "b"), ("back", "b", "a")]
    threads = [threading.Thread(target=send, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Together the two need exactly the link's time for both; the other direction is free.
    assert max(ends_s["one"], ends_s["two"]) == pytest.approx(0.2, abs=1e-9)
    assert ends_s["back"] == pytest.approx(0.1, abs=1e-9)
    shaper.close()


@pytest.mark.timed
def test_a_path_of_two_links_leaves_the_fast_one_to_others(tmp_path: Path) -> None:
    devices = (Device("a", "cpu", "east", 1), Device("b", "cpu", "middle", 1), Device("c", "cpu", "west", 1))
    links = (Link("east", "middle", 100e6, 0.0), Link("middle", "west", 10e6, 0.0))
    cluster = Cluster(devices, links)
    flows = {"both": ("a", "c", 5e6), "slow": ("b", "c", 5e6), "fast": ("a", "b", 90e6)}
    environment = simpy.Environment()
    numbers = {link.name: number for number, link in enumerate(links)}
    tables = join_tables([RateTable((0.0,), (link.bandwidth_bps,)) for link in links])
    shared = SharedLinks(environment, tables, numbers, max_min_rates)
    expected_s: dict[str, float] = {}
    for name, (source, target, bits) in flows.items():
        path = tuple(link.name for link in cluster.path(source, target))
        shared.start(Flow(path, bits, 1, inf, partial(expected_s.__setitem__, name)))
    environment.run()

    shaper = make_shaper(tmp_path, cluster, RunClock(time.monotonic() + 0.1))
    ends_s: dict[str, float] = {}

    def send(name: str, source: str, target: str, bits: float) -> None:
        ends_s[name] = shaper.transmit(cluster.path(source, target), bits, 0.0)

    threads = [threading.Thread(target=send, args=(name, *flow)) for name, flow in flows.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    shaper.close()
    # Turns are taken in pieces, so shares differ from max-min by a few pieces; the links waste nothing.
    assert ends_s == pytest.approx(expected_s, rel=0.1)


def test_a_link_that_stays_dark_is_an_error_with_its_name(tmp_path: Path) -> None:
    cluster = make_cluster(LinkTrace(np.array([0.0, 0.01]), np.array([10e6, 0.0]), 0.02, loops=False))
    shaper = make_shaper(tmp_path, cluster)
    with pytest.raises(RunError, match="link east->west carries nothing"):
        shaper.transmit(cluster.path("a", "b"), 1e6, 0.0)
    shaper.close()


# Forks, so that one interpreter loads the modules for all.
PROCESSES = """
import os
import sys
from pathlib import Path
from executor.core.clock import RunClock
from executor.transport.link_shaper import LinkShaper
from planner.scenario.cluster import Cluster, Device, Link
devices = (Device("a", "cpu", "east", 1), Device("b", "cpu", "west", 1))
cluster = Cluster(devices, (Link("east", "west", 100e6, 0.01), Link("west", "east", 100e6, 0.01)))
print("ready", flush=True)
clock = RunClock(float(input()))
children = []
for _ in range(3):
    child = os.fork()
    if not child:
        break
    children.append(child)
else:
    sys.exit(sum(os.waitpid(each, 0)[1] for each in children) > 0)
shaper = LinkShaper(Path(sys.argv[1]), cluster, clock)
clock.sleep_until(0.0)
# In one piece: without a buffer `print` writes the end of the line apart.
os.write(1, f"{shaper.transmit(cluster.path('a', 'b'), 20e6, 0.0)}\\n".encode())
"""


@pytest.mark.timed
def test_processes_share_a_link(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROCESSES, str(tmp_path / "ledger")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        ends, _ = parent.communicate(f"{time.monotonic() + 0.3}\n", timeout=30)
    assert parent.returncode == 0
    ends_s = [float(each) for each in ends.split()]
    assert len(ends_s) == 3
    assert max(ends_s) == pytest.approx(0.6, abs=1e-9)
