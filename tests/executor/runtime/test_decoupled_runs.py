"""Decoupled DiLoCo in real processes: what a run did, done again in one process; struck workers; checkpoints."""

import math
import os
import shutil
import signal
import tempfile
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from executor.backend import TorchBackend
from executor.core.job import CheckpointConfig
from executor.core.liveness import beat_path
from executor.recovery.checkpoint_file import read_header
from executor.recovery.checkpoints import CheckpointFolder
from executor.recovery.claim import resumption
from executor.recovery.export import newest_parameters
from planner.events.event import OUTER_ACTION, EventKind
from planner.plan.outer_step import OuterStep
from planner.plan.plan import Pipeline, Plan, Replica, Stage, Synchronisation
from planner.runs.event_totals import worker_steps
from planner.runs.metrics import measure
from planner.runs.record import RunRecord
from planner.scenario.faults import Absence
from planner.scenario.scenario import Scenario
from sim.simulator import Simulator
from tests.executor.runtime.test_decoupled import apart
from tests.executor.runtime.test_outer_steps import LAYERS, OPTIMIZERS, TOLERANCE, scenario_of
from tests.helpers.processes.apart import Apart
from tests.helpers.processes.blows import await_step, strike
from traces.common.errors import InputError, RunError


def again(record: RunRecord) -> Apart:
    """What a run did, by its rows: each step of a worker, what it sent and took over, and each outer step."""
    other = Apart(record.scenario, record.plan)
    worker_of = {name: index for index, name in enumerate(record.plan.devices)}
    (hub,) = record.plan.synchronisation.outer.syncers
    steps = [(end_s, 0, worker, ()) for end_s, worker, _ in worker_steps(record.events)]
    happened: list[tuple[float, int, int, tuple[int, ...]]] = [*steps]
    merged: dict[float, list[int]] = {}
    for event in record.events:
        if event.kind is EventKind.SEND and event.peer == hub:
            happened.append((event.start_s, 1, worker_of[event.device], ()))
        elif event.action == OUTER_ACTION and event.device == hub:
            merged.setdefault(event.end_s, []).append(worker_of[event.peer])
        elif event.action == OUTER_ACTION:
            happened.append((event.end_s, 3, worker_of[event.device], (event.step,)))
    happened += [(end_s, 2, -1, tuple(sorted(workers))) for end_s, workers in merged.items()]
    for _, what, worker, more in sorted(happened):
        match what:
            case 0:
                other.train(worker)
            case 1:
                other.send(worker, other.layers)
            case 2:
                other.merge(more, other.layers)
            case 3:
                for layer in other.layers:
                    other.take(worker, layer, more[0])
    return other


def assert_done_again(record: RunRecord, target: Path) -> None:
    other = again(record)
    torch.testing.assert_close(load_file(target), other.common_parameters, rtol=1e-5, atol=TOLERANCE)


def test_unequal_workers_do_what_one_process_does_that_applies_the_same_updates(tmp_path: Path) -> None:
    """At the speed of the profile one takes three times as long as the other."""
    scenario = scenario_of(3, OPTIMIZERS[2])
    plan = apart(scenario, (3, 9), 2, OuterStep(mixing=0.5, quorum=1, overlap_steps=1))
    target = tmp_path / "parameters.safetensors"
    record = TorchBackend("real", parameters=target, at_profile_speed=True).run(scenario, plan, None, 8)
    assert_done_again(record, target)
    steps = Counter(worker for _, worker, _ in worker_steps(record.events))
    assert steps[0] > steps[1]
    assert 8 * 12 - 9 < 3 * steps[0] + 9 * steps[1] <= 8 * 12
    assert len(record.losses) == measure(record).steps


@pytest.mark.slow
def test_two_syncers_end_a_run_in_which_a_worker_was_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    scenario = scenario_of(4, OPTIMIZERS[2])
    one, two, *hubs = (device.name for device in scenario.cluster.devices)
    pipelines = tuple(Pipeline((Stage(0, LAYERS, (Replica(name),), 2),), (5, 1)) for name in (one, two))
    outer = OuterStep(fragments=2, mixing=0.5, quorum=1, syncers=tuple(hubs))
    how = Synchronisation("diloco-decoupled", interval_steps=2, outer=outer)
    plan = Plan(scenario.name, scenario.model.name, "hand", "1f1b", pipelines, synchronisation=how)
    threading.Thread(target=strike, args=(tmp_path, 1, 5, signal.SIGKILL), daemon=True).start()
    record = TorchBackend("real", at_profile_speed=True).run(scenario, plan, None, 120)
    assert sum(Counter(worker for _, worker, _ in worker_steps(record.events)).values()) == 240
    given = Counter((event.device, event.peer) for event in record.events if event.kind is EventKind.MIGRATE)
    assert given == {(one, hub): 1 for hub in hubs} | {(hub, two): 1 for hub in hubs}


@pytest.mark.slow
def test_stages_and_replicas_form_a_worker(tmp_path: Path) -> None:
    scenario = scenario_of(5, OPTIMIZERS[1])
    one, two, three, four, hub = (device.name for device in scenario.cluster.devices)
    halves = (Stage(0, 1, (Replica(one), Replica(two)), 2), Stage(1, LAYERS, (Replica(three),), 1))
    pipelines = (Pipeline(halves, (4, 2)), Pipeline((Stage(0, LAYERS, (Replica(four),), 2),), (4, 2)))
    how = Synchronisation("diloco-decoupled", interval_steps=2, outer=OuterStep(fragments=2, quorum=1, syncers=(hub,)))
    plan = Plan(scenario.name, scenario.model.name, "hand", "1f1b", pipelines, synchronisation=how)
    record = TorchBackend("real").run(scenario, plan, None, 8)
    assert sum(Counter(worker for _, worker, _ in worker_steps(record.events)).values()) == 16
    assert len(record.losses) == measure(record).steps
    # The first device of each stage takes outer steps over; the second replica gets them from it.
    takers = {event.device for event in record.events if event.action == OUTER_ACTION} - {hub}
    assert takers == {one, three, four}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_struck_worker_stops_nobody(number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    scenario = scenario_of(3, OPTIMIZERS[2])
    plan = apart(scenario, (6, 6), 2, OuterStep(mixing=0.5, quorum=1))
    said: list[str] = []
    threading.Thread(target=strike, args=(tmp_path, 1, 5, number), daemon=True).start()
    record = TorchBackend("real", at_profile_speed=True, tell=said.append).run(scenario, plan, None, 120)
    assert [line for line in said if line.startswith("lost: device-1")]
    ends_s = {worker: sorted(end for end, w, _ in worker_steps(record.events) if w == worker) for worker in (0, 1)}
    gaps_s = [later - earlier for earlier, later in zip(ends_s[0], ends_s[0][1:], strict=False)]
    assert max(gaps_s) < 5 * sorted(gaps_s)[len(gaps_s) // 2]
    steps = [step for _, worker, step in worker_steps(record.events) if worker == 1]
    assert sorted(steps) == list(range(len(steps)))
    assert len(ends_s[0]) + len(ends_s[1]) == 240
    (absence,) = [event for event in record.events if event.kind is EventKind.FAULT]
    assert absence.device == "device-1"
    # The optimizer's state of the other worker reaches the new process by way of the syncer.
    given = sorted((event.start_s, event) for event in record.events if event.kind is EventKind.MIGRATE)
    assert [(event.device, event.peer) for _, event in given] == [("device-0", "device-2"), ("device-2", "device-1")]
    assert len({event.size_bytes for _, event in given}) == 1
    assert all(event.start_s < event.arrived_s for _, event in given), given


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_quorum_of_all_goes_on_without_a_struck_worker(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    scenario = scenario_of(3, OPTIMIZERS[2])
    # The grace has no time to spare without an overlap, and changes nothing.
    plan = apart(scenario, (6, 6), 2, OuterStep(grace_s=None))
    threading.Thread(target=strike, args=(tmp_path, 1, 5, number), daemon=True).start()
    record = TorchBackend("real", at_profile_speed=True).run(scenario, plan, None, 120)
    (absence,) = [event for event in record.events if event.kind is EventKind.FAULT]
    merged: dict[float, set[str]] = {}
    for event in record.events:
        if event.action == OUTER_ACTION and event.device == "device-2":
            merged.setdefault(event.end_s, set()).add(event.peer)
    alone = [end_s for end_s, names in merged.items() if names == {"device-0"}]
    last_s = max(end_s for end_s, worker, _ in worker_steps(record.events) if worker == 1)
    # The syncer may notice the loss before the head does.
    there = [end_s for end_s in alone if absence.start_s - 1 < end_s < absence.end_s]
    # An exchange takes 0.15 s; a process that is killed may be replaced between two of them.
    assert there or absence.end_s - absence.start_s < 0.3
    assert all(absence.start_s - 1 < end_s < absence.end_s + 1 or end_s > last_s - 1 for end_s in alone)
    assert len(merged) > 2 * len(alone)


@pytest.mark.slow
def test_a_quorum_of_all_goes_on_without_a_worker_that_the_syncer_has_never_heard() -> None:
    """What the worker says first takes 1.5 s to the syncer, and it is away from 0.3 s on."""
    scenario = scenario_of(4, OPTIMIZERS[2])
    *_, late, hub = scenario.cluster.devices
    links = tuple(
        replace(link, latency_s=1.5) if {link.source, link.target} == {late.region, hub.region} else link
        for link in scenario.cluster.links
    )
    faults = (Absence(late.name, 0.3, 5.0),)
    scenario = replace(scenario, cluster=replace(scenario.cluster, links=links), faults=faults)
    plan = apart(scenario, (4, 4, 4), 2, OuterStep(mixing=0.5))
    record = TorchBackend("real", at_profile_speed=True, emulator="shaper").run(scenario, plan, None, 90)
    (absence,) = [event for event in record.events if event.kind is EventKind.FAULT]
    assert absence.device == late.name
    assert absence.end_s > 4
    merged: dict[float, set[str]] = {}
    for event in record.events:
        if event.action == OUTER_ACTION and event.device == hub.name:
            merged.setdefault(event.end_s, set()).add(event.peer)
    without = [end_s for end_s, names in merged.items() if 1 < end_s < 4 and names == {"device-0", "device-1"}]
    assert len(without) > 5
    assert {"device-0", "device-1", late.name} in merged.values()


@pytest.mark.slow
def test_the_loss_of_a_syncer_ends_the_run_with_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    scenario = scenario_of(3)
    plan = apart(scenario, (6, 6), 2, OuterStep())
    job = threading.Thread(target=strike_syncer, args=(tmp_path, 2), daemon=True)
    job.start()
    with pytest.raises(RunError, match=r"device 'device-2'.*takes the outer steps, was lost"):
        TorchBackend("real", at_profile_speed=True).run(scenario, plan, None, 200)


def strike_syncer(folder: Path, rank: int) -> None:
    """It writes no samples of its resources, so that the steps of another rank tell when."""
    job = await_step(folder, 0, 5)
    os.kill(int(beat_path(job, rank).read_text()), signal.SIGKILL)


@pytest.mark.slow
def test_a_run_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """Each worker with its own step, optimizer and error feedback; the syncer with its momentum and versions."""
    scenario = scenario_of(3, OPTIMIZERS[2])
    outer = OuterStep(mixing=0.5, quorum=1, overlap_steps=1, compression="int4", density=0.5)
    plan = apart(scenario, (3, 9), 2, outer)
    folder = tmp_path / "checkpoints"

    def run(plan: Plan, steps: int, first_step: int = 0) -> RunRecord:
        checkpoints = CheckpointConfig(folder, 6, first_step)
        return TorchBackend("real", at_profile_speed=True, checkpoints=checkpoints).run(scenario, plan, None, steps)

    run(plan, 24)
    own_steps = steps_of_a_consistent_checkpoint(folder, 18)
    # As if the run had been killed before its end.
    for each in (CheckpointFolder(folder), *CheckpointFolder(folder).others):
        each.drop(24)
    step, found = resumption(folder, scenario, 30, print)
    assert (step, found) == (18, plan)
    assert 3 * own_steps[0] + 9 * own_steps[1] > 18 * 12
    with pytest.raises(InputError, match=r"--steps: .* give 2\d or more"):
        run(plan, 19, step)
    rest = run(plan, 30, step)
    done = {worker: sorted(own for _, w, own in worker_steps(rest.events) if w == worker) for worker in (0, 1)}
    for worker, own in done.items():
        assert own == list(range(own_steps[worker], own_steps[worker] + len(own)))
    assert 30 * 12 - 9 < 3 * (done[0][-1] + 1) + 9 * (done[1][-1] + 1) <= 30 * 12


def steps_of_a_consistent_checkpoint(path: Path, step: int) -> list[int]:
    """Each worker's own step in a checkpoint of two workers, and a syncer, that agree on what was sent."""
    folder = CheckpointFolder(path)
    found = folder.of_step(step, read_header(folder.parts(step)[0]).model)
    layers = [layer for layer in range(LAYERS) if "version" in found.of_pipeline(2).outer(layer)]
    assert layers
    own_steps = []
    for worker in (0, 1):
        own_steps.append(int(found.of_pipeline(worker).outer(layers[0])["own_step"]))
        for layer in layers:
            own, common = found.of_pipeline(worker).outer(layer), found.of_pipeline(2).outer(layer)
            counted, base, sent = own["exchanged"].tolist()
            waiting = common.get(f"facts{worker}", torch.tensor([-1])).tolist()[0]
            known = max(waiting, int(common["merged"][worker]))
            assert base <= int(common["version"])
            assert sent <= known < max(counted, 1) <= own_steps[worker] + 1
    return own_steps


def test_without_any_worker_a_run_ends_with_an_error() -> None:
    """In both backends; the processes that replace the lost ones late are told as well."""
    scenario = replace(scenario_of(3), faults=(Absence("device-0", 1.0, math.inf), Absence("device-1", 1.5, math.inf)))
    plan = apart(scenario, (6, 6), 2, OuterStep(mixing=0.5, quorum=1))
    for backend in (Simulator(), TorchBackend("paced")):
        with pytest.raises(RunError, match="all workers are lost, and none returns"):
            backend.run(scenario, plan, None, 400)


@pytest.mark.slow
def test_a_worker_that_is_lost_after_its_last_step_does_not_keep_the_run_from_ending() -> None:
    """Its process is replaced while the others end; the new one is told, too."""
    scenario = scenario_of(3)
    plan = apart(scenario, (4, 8), 2, OuterStep(mixing=0.5, quorum=1))
    quiet = TorchBackend("paced").run(scenario, plan, None, 45)
    first_s, last_s = sorted(
        max(end_s for end_s, own, _ in worker_steps(quiet.events) if own == worker) for worker in (0, 1)
    )
    at_s = (first_s + last_s) / 2
    scenario = replace(scenario, faults=(Absence("device-0", at_s, at_s + 0.3),))
    record = TorchBackend("paced").run(scenario, plan, None, 45)
    assert len(list(worker_steps(record.events))) == len(list(worker_steps(quiet.events)))


@pytest.mark.slow
@pytest.mark.parametrize("worker", [0, 1])
def test_a_run_goes_on_from_a_checkpoint_without_a_worker_that_has_never_returned(worker: int, tmp_path: Path) -> None:
    """That worker begins with its first step that was not finished, as one does that returns during a run."""
    lost, name = f"device-{worker}", "device-2"
    whole = scenario_of(3, OPTIMIZERS[2])
    scenario = replace(whole, faults=(Absence(lost, 2.0, math.inf),))
    plan = apart(scenario, (6, 6), 2, OuterStep(mixing=0.5, quorum=1))
    folder = tmp_path / "checkpoints"

    def run(scenario: Scenario, steps: int, first_step: int = 0) -> RunRecord:
        checkpoints = CheckpointConfig(folder, 4, first_step)
        return TorchBackend("real", at_profile_speed=True, checkpoints=checkpoints).run(scenario, plan, None, steps)

    first = run(scenario, 80)
    assert resumption(folder, whole, 100, print)[0] == 80
    found = CheckpointFolder(folder)
    every = (found, *found.others)
    # As if the run had been killed before its end.
    for each in every:
        each.drop(80)
    part = f"{name}.safetensors"
    for spoil in (
        lambda own: (own.of_pipeline(1 - worker).path / "step-00000076" / f"device-{1 - worker}.safetensors").unlink(),
        lambda own: (own.of_pipeline(worker).path / "step-00000076" / part).unlink(),
        lambda own: (own.of_pipeline(2).path / "step-00000076" / part).write_bytes(b"no checkpoint"),
    ):
        other = CheckpointFolder(tmp_path / "spoilt")
        shutil.copytree(folder, other.path)
        spoil(other)
        assert resumption(other.path, whole, 100, print)[0] == 72
        # What is newer must not mix with what the next run writes.
        assert max(step for each in (other, *other.others) for step in each.steps) == 72
        shutil.rmtree(other.path)
    step, _ = resumption(folder, whole, 100, print)
    assert step == 76
    without = tmp_path / "without"
    shutil.copytree(folder, without)
    smaller = replace(plan, pipelines=(replace(plan.pipelines[1 - worker], microbatches=(11, 1)),))
    backend = TorchBackend("real", at_profile_speed=True, checkpoints=CheckpointConfig(without, 4, step))
    outer = {event.step for event in backend.run(whole, smaller, None, 200).events if event.device == name}
    assert min(step for step in outer if step >= 0) > 0
    stored = newest_parameters(folder, whole)[1]
    (index, own), *others = found.newest(read_header(found.parts(step)[0]).model, print).with_state
    assert (index, others) == (1 - worker, [])
    assert stored["0." + next(iter(own.tensors(0)))] is not None
    rest = run(whole, 100, step)
    ends = {w: sorted((own, end_s) for end_s, each, own in worker_steps(rest.events) if each == w) for w in (0, 1)}
    last = max(own for _, each, own in worker_steps(first.events) if each == worker)
    assert ends[worker][0][0] == last + 1
    for each in ends.values():
        assert [own for own, _ in each] == list(range(each[0][0], each[-1][0] + 1))
    assert 100 * 12 - 6 < 6 * sum(each[-1][0] + 1 for each in ends.values()) <= 100 * 12
    # All of its common parameters are those of the syncer, and the optimizer's state is another worker's.
    taken = [event for event in rest.events if event.action == OUTER_ACTION and event.device == lost]
    assert min(event.end_s for event in taken) < ends[worker][0][1]
    assert {event.peer for event in rest.events if event.kind is EventKind.MIGRATE} <= {lost, name}
    # Its part is written again.
    assert len(found.of_step(100, read_header(found.parts(100)[0]).model).with_state) == 2
