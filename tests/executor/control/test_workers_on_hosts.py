"""Decoupled DiLoCo on several hosts: workers of other hosts reach the syncer, and their loss stops nobody."""

import signal
import tempfile
import threading
from collections import Counter
from pathlib import Path

import pytest

from executor.backend import TorchBackend
from planner.events.event import EventKind
from planner.plan.outer_step import OuterStep
from planner.runs.event_totals import worker_steps
from tests.executor.runtime.test_decoupled import apart
from tests.executor.runtime.test_decoupled_runs import assert_done_again
from tests.executor.runtime.test_outer_steps import OPTIMIZERS, scenario_of
from tests.helpers.networks.several_hosts import hosts_on_loopback, start_member
from tests.helpers.processes.blows import await_step

# The head has the first worker and the syncer.
PARTS = [("west", (0, 2)), ("east", (1,))]


def test_workers_of_two_hosts_do_what_one_process_does(tmp_path: Path) -> None:
    scenario = scenario_of(3, OPTIMIZERS[2])
    assert scenario.code is not None
    plan = apart(scenario, (3, 9), 2, OuterStep(mixing=0.5, quorum=1, overlap_steps=1))
    hosts, target = hosts_on_loopback(PARTS), tmp_path / "parameters.safetensors"
    member = start_member(hosts, "east", tmp_path / "east", scenario.code.path)
    record = TorchBackend("real", parameters=target, hosts=hosts).run(scenario, plan, None, 8)
    _, said = member.communicate(timeout=20)
    assert (member.returncode, said) == (0, "")
    assert_done_again(record, target)
    assert {worker for _, worker, _ in worker_steps(record.events)} == {0, 1}


@pytest.mark.slow
@pytest.mark.parametrize("returns", [True, False])
def test_a_host_that_is_lost_stops_nobody(returns: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it returns, its worker goes on with its own step; if not in time, others train the samples that are left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    scenario = scenario_of(3, OPTIMIZERS[2])
    assert scenario.code is not None
    plan = apart(scenario, (6, 6), 2, OuterStep(mixing=0.5, quorum=1))
    hosts = hosts_on_loopback(PARTS, arrival_s=30.0 if returns else 3.0)
    members = [start_member(hosts, "east", tmp_path / "east", scenario.code.path)]

    def strike() -> None:
        await_step(tmp_path, 0, 5)
        members[0].send_signal(signal.SIGKILL)
        members[0].communicate()
        if returns:
            members.append(start_member(hosts, "east", tmp_path / "east", scenario.code.path))

    striker = threading.Thread(target=strike, daemon=True)
    striker.start()
    said: list[str] = []
    backend = TorchBackend("real", at_profile_speed=True, hosts=hosts, tell=said.append)
    record = backend.run(scenario, plan, None, 120)
    striker.join()
    assert [line for line in said if line.startswith("lost: device-1")]
    steps = Counter(worker for _, worker, _ in worker_steps(record.events))
    ended = [step for _, worker, step in worker_steps(record.events) if worker == 1]
    assert sorted(ended) == list(range(len(ended)))
    assert sum(steps.values()) == 240
    given = [(event.device, event.peer) for event in record.events if event.kind is EventKind.MIGRATE]
    assert given == ([("device-0", "device-2"), ("device-2", "device-1")] if returns else [])
    if returns:
        _, printed = members[1].communicate(timeout=20)
        assert (members[1].returncode, printed) == (0, "")
