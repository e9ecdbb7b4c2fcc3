"""Workers that take outer steps, and are lost, leave or come: the others go on, as training in one process does."""

import shutil
import signal
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from executor.backend import TorchBackend
from executor.control.record.joined_attempts import with_earlier_attempts
from executor.core.job import CheckpointConfig
from executor.recovery.claim import resumption
from planner.plan.outer_step import OuterStep
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.runs.event_totals import step_ends_s
from planner.scenario.effects import ComputeEffects, Straggler
from planner.scenario.faults import Absence
from planner.scenario.scenario import Scenario
from planner.systems.registry import make_policy
from sim.simulator import Simulator
from tests.executor.runtime.test_outer_steps import LAYERS, OPTIMIZERS, scenario_of, separate, updates_sent
from tests.helpers.processes.blows import strike
from tests.helpers.processes.separate import Separate, train_separately
from tests.helpers.strategies.scripted_policy import Scripted
from tests.sim.test_outer_steps import regions as timed_regions

BARRIER = OuterStep(learning_rate=0.7, momentum=0.9)
STREAM = OuterStep(fragments=2, pattern="strided", overlap_steps=2, mixing=0.5)
STEPS = 16


def three(outer: OuterStep, every: int, method: str) -> tuple[Scenario, Plan]:
    """Three workers, of which the second one has two stages on one device."""
    scenario = scenario_of(3, OPTIMIZERS[2])
    return scenario, separate(scenario, (4, 4, 4), every, outer, method)


def of_workers(plan: Plan, names: Sequence[str], samples: Sequence[int]) -> Plan:
    """A plan of workers of one stage."""
    pipelines = tuple(
        Pipeline((Stage(0, LAYERS, (Replica(name),), 2),), (count - 1, 1))
        for name, count in zip(names, samples, strict=True)
    )
    return replace(plan, pipelines=pipelines)


def assert_ends_like(target: Path, losses: Sequence[float], expected: Separate, weights: Sequence[float]) -> None:
    assert losses == pytest.approx(expected.losses, rel=1e-5)
    mean = {
        name: sum(weight * each[name] for weight, each in zip(weights, expected.parameters, strict=True))
        for name in expected.common
    }
    torch.testing.assert_close(load_file(target), mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("rank", "number", "outer", "method"),
    [
        pytest.param(0, signal.SIGKILL, STREAM, "diloco-streaming", id="first of three, streaming"),
        pytest.param(1, signal.SIGSTOP, BARRIER, "diloco", id="two stages, stopped"),
        pytest.param(2, signal.SIGKILL, BARRIER, "diloco", id="last", marks=pytest.mark.slow),
        pytest.param(1, signal.SIGKILL, STREAM, "diloco-streaming", id="two stages, streaming", marks=pytest.mark.slow),
    ],
)
def test_a_worker_that_is_lost_begins_anew_with_the_common_parameters(
    rank: int, number: signal.Signals, outer: OuterStep, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    scenario, plan = three(outer, 4, method)
    target, told = tmp_path / "parameters.safetensors", list[str]()
    threading.Thread(target=strike, args=(tmp_path, rank, 6, number), daemon=True).start()
    record = TorchBackend("real", parameters=target, backup_every=1, tell=told.append).run(scenario, plan, None, STEPS)
    resumed = resumed_from(told)
    assert resumed >= 5
    expected = train_separately(scenario, plan, STEPS, anew={resumed: f"device-{rank}"})
    assert_ends_like(target, record.losses, expected, (1 / 3,) * 3)


def scripted(outer: OuterStep, method: str) -> tuple[Scenario, Plan, Plan, Plan]:
    """Three workers of one stage, and the plans without the first one, and without the last."""
    scenario, plan = three(outer, 4, method)
    names = [device.name for device in scenario.cluster.devices]
    plan = of_workers(plan, names, (4, 4, 4))
    return scenario, plan, of_workers(plan, names[1:], (7, 5)), of_workers(plan, names[:2], (5, 7))


@pytest.mark.parametrize(
    ("outer", "method"),
    [
        pytest.param(STREAM, "diloco-streaming", id="streaming"),
        pytest.param(replace(STREAM, exchange="allgather"), "diloco-streaming", id="allgather", marks=pytest.mark.slow),
        pytest.param(BARRIER, "diloco", id="barrier", marks=pytest.mark.slow),
    ],
)
def test_workers_leave_and_come_back(outer: OuterStep, method: str, tmp_path: Path) -> None:
    """While pseudo-gradients are under way, which are taken first; also to one worker that is left, and back."""
    scenario, plan, without_first, without_last = scripted(outer, method)
    alone = of_workers(plan, ["device-1"], (12,))
    later = {2: without_first, 5: plan, 8: without_last, 11: alone, 14: plan}
    target = tmp_path / "parameters.safetensors"
    record = TorchBackend("real", parameters=target).run(scenario, plan, Scripted(later), 20)
    firsts = [decision.first_step for decision in record.decisions]
    assert firsts == [4, 7, 10, 13, 16]
    expected = train_separately(scenario, plan, 20, dict(zip(firsts, later.values(), strict=True)))
    assert_ends_like(target, record.losses, expected, (1 / 3,) * 3)
    simulated = Simulator().run(scenario, plan, Scripted(later), 20)
    # Means and the next fragment may overtake each other.
    arranged = sorted if outer == STREAM else list
    assert arranged(updates_sent(record)) == arranged(updates_sent(simulated))
    assert [each.migration for each in record.decisions] == [each.migration for each in simulated.decisions]


def share_out_by_the_first_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let policies not answer the speeds of devices, which vary on a busy machine."""
    monkeypatch.setattr("planner.systems.regional.worker_shares.LEAST_SAVED", 1.0)
    monkeypatch.setattr("planner.systems.regional.exchange_policy.learn_slowdowns", lambda *args: None)


def resumed_from(told: Sequence[str]) -> int:
    """The step from which the run went on after its only loss."""
    (lost,) = [line for line in told if line.startswith("lost: ")]
    return int(lost.split("steps from ")[1].split()[0]) - 1


def goes_on_without(rank: int, scenario: Scenario, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Kill a rank, check that the policy takes its worker back and that training equals that in one process.

    Returns the plan meanwhile.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    share_out_by_the_first_plan(monkeypatch)
    slow = ComputeEffects(stragglers=tuple(Straggler(name, 40.0) for name in plan.devices))
    scenario = replace(scenario, effects=replace(scenario.effects, compute=slow))
    threading.Thread(target=strike, args=(tmp_path, rank, 5, signal.SIGKILL), daemon=True).start()
    target, told, steps = tmp_path / "parameters.safetensors", list[str](), 80
    backend = TorchBackend("real", parameters=target, backup_every=1, tell=told.append)
    record = backend.run(scenario, plan, make_policy("auto", scenario), steps)
    rest, back = record.decisions
    assert back.plan == plan
    changes = {resumed_from(told): rest.plan, back.first_step: plan}
    expected = train_separately(scenario, plan, steps, changes)
    assert_ends_like(target, record.losses, expected, plan.exchange_weights)
    return rest.plan


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "outer", "method"),
    [
        pytest.param(0, STREAM, "diloco-streaming", id="first, streaming"),
        pytest.param(2, BARRIER, "diloco", id="last"),
    ],
)
def test_the_policy_goes_on_without_a_worker_that_is_lost_until_it_is_back(
    rank: int, outer: OuterStep, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario, plan, *_ = scripted(outer, method)
    rest = goes_on_without(rank, scenario, plan, tmp_path, monkeypatch)
    assert f"device-{rank}" not in rest.devices


@pytest.mark.parametrize(
    ("layout", "rank"),
    [
        ("stages", 0),
        ("stages", 1),
        ("replicas", 0),
        ("replicas", 1),
    ],
)
@pytest.mark.slow
def test_a_worker_of_two_devices_loses_one_of_them(
    layout: str, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is left out, with the other device, unless that is the first replica of its stage."""
    scenario, plan, *_ = scripted(STREAM, "diloco-streaming")
    both = (Replica("device-0"), Replica("device-1"))
    stages = (
        (Stage(0, 2, both[:1], 2), Stage(2, LAYERS, both[1:], 1))
        if layout == "stages"
        else (Stage(0, LAYERS, both, 1),)
    )
    single = Pipeline((Stage(0, LAYERS, (Replica("device-2"),), 1),), (4, 2))
    plan = replace(plan, pipelines=(Pipeline(stages, (4, 2)), single))
    rest = goes_on_without(rank, scenario, plan, tmp_path, monkeypatch)
    assert rest.devices == (("device-0", "device-2") if (layout, rank) == ("replicas", 1) else ("device-2",))


@pytest.mark.slow
def test_one_worker_takes_the_place_of_another_one(tmp_path: Path) -> None:
    """With other settings and weights at once; the new one begins from the one that stays."""
    scenario, plan, *_ = scripted(STREAM, "diloco-streaming")
    names = [device.name for device in scenario.cluster.devices]
    plan = of_workers(plan, names[:2], (6, 6))
    how = replace(plan.synchronisation, interval_steps=3, outer=replace(STREAM, overlap_steps=1))
    later = {
        2: of_workers(plan, names[1:], (7, 5)),
        6: replace(of_workers(plan, names[::2], (4, 8)), synchronisation=how),
    }
    target = tmp_path / "parameters.safetensors"
    record = TorchBackend("real", parameters=target).run(scenario, plan, Scripted(later), 14)
    firsts = [decision.first_step for decision in record.decisions]
    expected = train_separately(scenario, plan, 14, dict(zip(firsts, later.values(), strict=True)))
    assert_ends_like(target, record.losses, expected, (1 / 3, 2 / 3))
    simulated = Simulator().run(scenario, plan, Scripted(later), 14)
    assert updates_sent(record) == updates_sent(simulated)


@pytest.mark.parametrize("step", [6, pytest.param(10, marks=pytest.mark.slow)])
def test_a_run_goes_on_from_a_checkpoint_after_a_worker_has_left_and_come_back(step: int, tmp_path: Path) -> None:
    """A worker is away in steps 4 to 8, so that checkpoints have other numbers of workers."""
    scenario, plan, without_first, _ = scripted(STREAM, "diloco-streaming")
    folder, target = tmp_path / "checkpoints", tmp_path / "parameters.safetensors"
    backend = TorchBackend("real", parameters=target, checkpoints=CheckpointConfig(folder, 1, kept=20))
    whole = backend.run(scenario, plan, Scripted({2: without_first, 7: plan}), 14)
    expected = load_file(target)
    for newer in (each for each in folder.glob("**/step-*") if int(each.name[5:]) > step):
        shutil.rmtree(newer)
    present = without_first if step < 9 else plan
    assert resumption(folder, scenario, 14, print) == (step, present)
    resumed = replace(backend, checkpoints=CheckpointConfig(folder, 1, step, kept=20))
    rest = resumed.run(scenario, present, Scripted({7: plan}) if step < 9 else None, 14)
    assert rest.losses == whole.losses[step:]
    torch.testing.assert_close(load_file(target), expected, rtol=0, atol=0)


def test_a_resumed_run_takes_a_worker_back_that_was_left_out_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_out_by_the_first_plan(monkeypatch)
    scenario, plan, without_first, _ = scripted(STREAM, "diloco-streaming")
    folder = tmp_path / "checkpoints"
    backend = TorchBackend("real", checkpoints=CheckpointConfig(folder, 1))
    first = backend.run(scenario, plan, Scripted({2: without_first}), 8)
    step, present = resumption(folder, scenario, STEPS, print)
    assert (step, present) == (8, without_first)
    resumed = replace(backend, checkpoints=CheckpointConfig(folder, 1, step))
    rest = resumed.run(scenario, present, make_policy("auto", scenario), STEPS)
    assert [decision.plan for decision in rest.decisions] == [plan]
    whole = with_earlier_attempts(rest, folder, print)
    assert (whole.plan, len(whole.losses)) == (first.plan, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["diloco", "diloco-streaming"])
def test_a_paced_run_and_the_simulator_go_on_without_a_worker_alike(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps take 0.2 s, pseudo-gradients 0.1 s on a link; a process is away for two seconds, its worker for longer."""
    share_out_by_the_first_plan(monkeypatch)
    outer = OuterStep(fragments=2, overlap_steps=1) if method == "diloco-streaming" else OuterStep()
    scenario, plan = timed_regions([0.2, 0.2, 0.2], [0.05, 0.05], 4, outer, 0.02)
    plan = replace(plan, synchronisation=replace(plan.synchronisation, method=method))
    scenario = replace(scenario, faults=(Absence("device-2", 2.5, 4.5),))
    simulated, real = (
        backend.run(scenario, plan, make_policy("auto", scenario), 50)
        for backend in (Simulator(backup_every=2), TorchBackend("paced", emulator="shaper", backup_every=2))
    )
    ends_s = [step_ends_s(record.events)[-1] for record in (simulated, real)]
    assert [len(record.decisions) for record in (simulated, real)] == [2, 2]
    assert ends_s[1] == pytest.approx(ends_s[0], rel=0.05)


@pytest.mark.timed
def test_all_wait_for_what_is_under_way_when_a_worker_leaves() -> None:
    """It takes 0.8 s on the links, and four steps as long."""
    scenario, plan = timed_regions([0.2, 0.2, 0.2], [0.4, 0.4], 4, OuterStep(exchange="allgather"), 0.02)
    plan = replace(plan, synchronisation=replace(plan.synchronisation, method="diloco"))
    first, second, _ = plan.pipelines
    later = {2: replace(plan, pipelines=(first, replace(second, microbatches=(2,))))}
    simulated, real = (
        backend.run(scenario, plan, Scripted(later), 6)
        for backend in (Simulator(), TorchBackend("paced", emulator="shaper"))
    )
    assert step_ends_s(simulated.events)[4] == pytest.approx(0.8 + 0.82 + 0.4)
    assert step_ends_s(real.events) == pytest.approx(step_ends_s(simulated.events), abs=0.3)
