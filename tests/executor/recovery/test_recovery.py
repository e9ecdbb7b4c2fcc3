"""Ranks that are killed while they train: the run goes on, and ends with what undisturbed training ends with."""

import os
import signal
import tempfile
import threading
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from executor.backend import TorchBackend
from executor.core.liveness import beat_path
from executor.wan.testbed import missing
from planner.events.event import Event, EventKind
from planner.plan.plan import Plan, Synchronisation
from planner.runs.event_totals import step_ends_s
from planner.runs.record import RunRecord
from planner.scenario.faults import Absence
from tests.helpers.processes.blows import await_step, strike
from tests.helpers.processes.training import GPT, assert_trained, chain, hybrid_plan, train_in_one_process
from tests.helpers.scenarios.builders import chain_plan, chain_scenario
from tests.helpers.strategies.scripted_policy import Scripted
from traces.common.errors import InputError, RunError

STEPS = 16

slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("rank", "number"),
    [
        pytest.param(0, signal.SIGKILL, id="first killed", marks=pytest.mark.slow),
        pytest.param(1, signal.SIGKILL, id="replica killed", marks=pytest.mark.slow),
        pytest.param(3, signal.SIGKILL, id="last killed", marks=pytest.mark.slow),
        pytest.param(0, signal.SIGSTOP, id="first stopped", marks=pytest.mark.slow),
        pytest.param(1, signal.SIGSTOP, id="replica stopped", marks=pytest.mark.slow),
        pytest.param(3, signal.SIGSTOP, id="last stopped"),
    ],
)
def test_a_rank_that_is_lost_is_replaced(
    rank: int, number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    scenario, plan = chain()
    target = tmp_path / "parameters.safetensors"
    killer = threading.Thread(target=strike, args=(tmp_path, rank, 4, number), daemon=True)
    killer.start()
    record = TorchBackend("real", parameters=target, backup_every=1).run(scenario, plan, None, STEPS)
    killer.join(0)
    assert not killer.is_alive()
    assert_trained(record, target, train_in_one_process(scenario, STEPS))
    # The launcher holds no file of the job any more.
    opened = [path for path in map(os.path.realpath, Path("/proc/self/fd").iterdir()) if str(tmp_path) in path]
    assert opened == []


def test_a_rank_that_is_stopped_for_a_while_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the run would survive its loss: that costs more than the stop."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    scenario, plan = chain()
    processes = []

    def stop() -> None:
        for step in (4, 8):
            job = await_step(tmp_path, 1, step)
            processes.append(int(beat_path(job, 1).read_text()))
            if step == 4:
                os.kill(processes[0], signal.SIGSTOP)
                time.sleep(3.0)
                os.kill(processes[0], signal.SIGCONT)

    stopper = threading.Thread(target=stop, daemon=True)
    stopper.start()
    record = TorchBackend("real", backup_every=1).run(scenario, plan, None, STEPS)
    stopper.join(10.0)
    assert len(processes) == 2
    assert len(set(processes)) == 1
    assert len({(e.device, e.action, e.step, e.microbatch) for e in computed(record)}) == len(computed(record))


@pytest.mark.parametrize(
    ("rank", "sign", "after_s"),
    [
        pytest.param(3, "beat-3", 0.0, id="while it loads", marks=pytest.mark.slow),
        # It has built its model, and is about to connect.
        pytest.param(0, "resources-0.jsonl", 0.0, id="when it is ready"),
        *(
            # Ranks connect, and measure how late messages are, before they agree on second 0.
            pytest.param(0, "resources-0.jsonl", after_s, id=f"{after_s} s later", marks=marks)
            for after_s, marks in ((0.02, slow), (0.04, ()), (0.06, slow), (0.08, slow), (0.1, slow), (0.2, slow))
        ),
    ],
)
def test_a_rank_that_is_lost_before_its_first_step_is_started_again(
    rank: int, sign: str, after_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    scenario, plan = chain()

    def strike_early() -> None:
        while not (found := list(tmp_path.glob(f"ropebridge-*/{sign}"))):
            time.sleep(0.002)
        time.sleep(after_s)
        os.kill(int(beat_path(found[0].parent, rank).read_text()), signal.SIGKILL)

    target = tmp_path / "parameters.safetensors"
    killer = threading.Thread(target=strike_early, daemon=True)
    killer.start()
    record = TorchBackend("real", emulator="shaper", parameters=target, backup_every=1).run(scenario, plan, None, STEPS)
    killer.join(0)
    assert not killer.is_alive()
    assert len({(e.device, e.action, e.step, e.microbatch) for e in computed(record)}) == len(computed(record))
    assert_trained(record, target, train_in_one_process(scenario, STEPS))


# Appended to a model's file, which each rank loads: the first rank dies when the others know second 0 from it.
SILENT_DEATH = """
import os, signal
from pathlib import Path

from executor.rank.control_client import ControlClient

if "LOCAL_WORLD_SIZE" in os.environ:
    said, died = ControlClient.send, Path(__file__).with_name("died")

    def send(self, kind, **content):
        if kind == "origin" and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        said(self, kind, **content)

    ControlClient.send = send
"""


def test_a_rank_is_lost_while_only_the_others_know_that_the_run_has_begun(tmp_path: Path) -> None:
    """They have begun copies of a step that the next session begins once more."""
    model = tmp_path / "model.py"
    model.write_text(GPT.path.read_text() + SILENT_DEATH)
    scenario, plan = chain(replace(GPT, path=model))
    target = tmp_path / "parameters.safetensors"
    record = TorchBackend("real", parameters=target, backup_every=1).run(scenario, plan, None, STEPS)
    assert (tmp_path / "died").exists()
    assert_trained(record, target, train_in_one_process(scenario, STEPS))


def computed(record: RunRecord) -> list[Event]:
    return [event for event in record.events if event.kind is EventKind.COMPUTE]


@pytest.mark.parametrize(
    "rank",
    [
        pytest.param(0, id="first", marks=pytest.mark.slow),
        pytest.param(1, id="replica"),
        pytest.param(3, id="last", marks=pytest.mark.slow),
    ],
)
def test_the_policy_goes_on_without_a_rank_that_is_lost(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    scenario, plan = chain()
    layers = len(scenario.model.layers)
    left = [device for number, device in enumerate(scenario.cluster.devices) if number != rank]
    smaller = replace(scenario, cluster=replace(scenario.cluster, devices=tuple(left)))
    rest = hybrid_plan(smaller, "1f1b", [([(1, [1.0]), (4, [1.0]), (layers - 5, [1.0])], [2] * 6)])
    target = tmp_path / "parameters.safetensors"
    killer = threading.Thread(target=strike, args=(tmp_path, rank, 4, signal.SIGKILL), daemon=True)
    killer.start()
    policy = Scripted({}, {(f"device-{rank}",): rest})
    record = TorchBackend("real", parameters=target, backup_every=1).run(scenario, plan, policy, STEPS)
    (decision,) = record.decisions
    assert decision.answers_departure
    # The policy is told of the loss, until the rank's next process can join.
    away = [each.away for each in policy.seen]
    first, gone = away.index((f"device-{rank}",)), away.count((f"device-{rank}",))
    assert away == [()] * first + [(f"device-{rank}",)] * gone + [()] * (len(away) - first - gone)
    assert decision.plan == rest
    assert_trained(record, target, train_in_one_process(scenario, STEPS))


@pytest.mark.slow
def test_ranks_that_are_lost_one_after_the_other_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one while the others wait for the first, or soon after."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    scenario, plan = chain()
    target = tmp_path / "parameters.safetensors"

    def strike_twice() -> None:
        strike(tmp_path, 3, 4, signal.SIGKILL)
        strike(tmp_path, 1, 4, signal.SIGKILL)

    killer = threading.Thread(target=strike_twice, daemon=True)
    killer.start()
    record = TorchBackend("real", parameters=target, backup_every=1).run(scenario, plan, None, STEPS)
    assert_trained(record, target, train_in_one_process(scenario, STEPS))


@pytest.mark.slow
def test_a_rank_and_its_backup_are_more_than_can_be_lost() -> None:
    """The last stage is kept a second time by the first."""
    scenario, plan = chain()
    scenario = replace(scenario, faults=(Absence("device-0", 2.0), Absence("device-3", 2.0)))
    with pytest.raises(RunError, match=r"lost devices device-0, device-3: no remaining device has a copy"):
        TorchBackend("paced", backup_every=1).run(scenario, plan, None, 4000)


def test_who_never_returns_is_not_waited_for() -> None:
    scenario, plan = chain()
    scenario = replace(scenario, faults=(Absence("device-1", 1.0),))
    with pytest.raises(RunError, match="device 'device-1': its absence in the scenario has no end"):
        TorchBackend("paced", backup_every=1).run(scenario, plan, None, 4000)


@pytest.mark.slow
def test_a_device_that_leaves_and_returns_is_waited_for(tmp_path: Path) -> None:
    """As its scenario says, and as the simulator has it."""
    scenario, plan = chain()
    # Of more steps than a run can have done when the device leaves.
    away_s, steps = 6.0, 2 * STEPS
    scenario = replace(scenario, faults=(Absence("device-1", 0.2, 0.2 + away_s),))
    target = tmp_path / "parameters.safetensors"
    record = TorchBackend("real", parameters=target, backup_every=1).run(scenario, plan, None, steps)
    assert_trained(record, target, train_in_one_process(scenario, steps))
    ends_s = step_ends_s(record.events)
    assert max(later - earlier for earlier, later in pairwise([0.0, *ends_s])) > away_s - 1


def test_what_cannot_recover_is_refused_before_anything_starts() -> None:
    scenario, _ = chain()
    two = hybrid_plan(scenario, "1f1b", [([(len(scenario.model.layers), [1.0])], [6])] * 2)
    method = replace(two, synchronisation=Synchronisation("asgd"))
    with pytest.raises(InputError, match="copies of the state of pipelines with method 'asgd' cannot be run"):
        TorchBackend("paced", backup_every=1).run(scenario, method, None, 2)


@pytest.mark.slow
def test_a_spare_device_takes_the_place_of_one_that_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    scenario, _ = chain()
    layers = len(scenario.model.layers)
    devices = scenario.cluster.devices

    def on(*numbers: int) -> Plan:
        some = replace(scenario, cluster=replace(scenario.cluster, devices=tuple(devices[each] for each in numbers)))
        return hybrid_plan(some, "1f1b", [([(2, [1.0]), (layers - 2, [1.0])], [4, 4, 4])])

    target = tmp_path / "parameters.safetensors"
    killer = threading.Thread(target=strike, args=(tmp_path, 1, 4, signal.SIGKILL), daemon=True)
    killer.start()
    policy = Scripted({8: on(3, 0)}, {("device-1",): on(0, 2)})
    record = TorchBackend("real", parameters=target, backup_every=2).run(scenario, on(0, 1), policy, STEPS)
    assert [each.plan.devices for each in record.decisions] == [on(0, 2).devices, on(3, 0).devices]
    assert_trained(record, target, train_in_one_process(scenario, STEPS))


@pytest.mark.slow
def test_messages_that_are_cut_off_in_the_middle_hold_nobody_up() -> None:
    """Copies of the state are on slow links all the time, so that some of them are half there when a rank is lost."""
    lack = missing()
    if lack is not None:
        pytest.skip(lack)
    scenario = chain_scenario(
        [2e-3] * 4, [4e-3] * 4, parameter_bytes=1_500_000, bandwidth_bps=20e6, latency_s=0.01, global_batch=4
    )
    faults = tuple(Absence(f"device-{number}", at_s, at_s + 0.1) for number, at_s in ((3, 1.0), (0, 5.0)))
    plan = chain_plan(scenario)
    record = TorchBackend("paced", emulator="relay", backup_every=1).run(
        replace(scenario, faults=faults), plan, None, 14
    )
    assert len(step_ends_s(record.events)) == 14
