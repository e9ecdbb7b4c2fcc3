"""The emulated links carry what their traces say, whoever sends over them."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from executor.clock import RunClock
from executor.shaper import LinkShaper, create_ledger
from planner.cluster import Cluster, Device, Link
from traces.trace import LinkTrace


def make_cluster(trace: LinkTrace | None = None) -> Cluster:
    devices = (Device("a", "cpu", "east", 1), Device("b", "cpu", "west", 1))
    return Cluster(devices, (Link("east", "west", 100e6, 0.01, trace), Link("west", "east", 100e6, 0.01, trace)))


def make_shaper(tmp_path: Path, cluster: Cluster, clock: RunClock | None = None) -> LinkShaper:
    create_ledger(tmp_path / "ledger", cluster)
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


PROCESS = """
import sys
from pathlib import Path
from executor.clock import RunClock
from executor.shaper import LinkShaper
from planner.cluster import Cluster, Device, Link
devices = (Device("a", "cpu", "east", 1), Device("b", "cpu", "west", 1))
cluster = Cluster(devices, (Link("east", "west", 100e6, 0.01), Link("west", "east", 100e6, 0.01)))
clock = RunClock(float(sys.argv[2]))
shaper = LinkShaper(Path(sys.argv[1]), cluster, clock)
clock.sleep_until(0.0)
print(shaper.transmit(cluster.path("a", "b"), 20e6, 0.0))
"""


def test_processes_share_a_link(tmp_path: Path) -> None:
    cluster = make_cluster()
    create_ledger(tmp_path / "ledger", cluster)
    origin_s = time.monotonic() + 2.0
    command = [sys.executable, "-c", PROCESS, str(tmp_path / "ledger"), str(origin_s)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    ends_s = [float(process.communicate(timeout=30)[0]) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert max(ends_s) == pytest.approx(0.6, abs=1e-9)
