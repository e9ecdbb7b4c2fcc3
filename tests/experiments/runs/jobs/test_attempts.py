"""Launchers of an attempt are killed: its ranks train on, and the next launcher follows them."""

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from executor.backend import TorchBackend
from executor.control.attachment import end_orphan, is_orphaned
from executor.core.subprocesses import python_environment
from executor.deploy.bundle import HostedRun, RunBundle
from executor.recovery.checkpoints import CheckpointFolder
from experiments.benches.cases import workers_plan
from experiments.benches.faults.moves import policy_file
from experiments.benches.processes import MARK, marked_processes
from experiments.runs.folder import read_record
from experiments.runs.jobs.attempt import MODULE, LossFile, job_of, read_ending
from experiments.runs.jobs.states import Outcome
from experiments.runs.scenario import choose_scenario
from planner.plan.plan import Plan, Synchronisation
from planner.scenario.scenario import Scenario
from planner.systems.registry import make_plan, make_policy
from tests.helpers.processes.process_watch import wait_until
from tests.helpers.processes.warm_agents import adopting_orphans

# Ranks are quicker than the start of a launcher, and keep what they publish meanwhile.
STEPS = 300

Launch = Callable[[], "subprocess.Popen[bytes]"]


def training() -> tuple[Scenario, Plan]:
    scenario = choose_scenario("digits")
    return scenario, make_plan("megatron", scenario)


def moving(tmp_path: Path) -> str:
    """A policy that moves a layer there and back every 20 steps; its file."""
    _, plan = training()
    (pipeline,) = plan.pipelines
    first, last = pipeline.stages
    end = first.end_layer - 1
    stages = (replace(first, end_layer=end), replace(last, first_layer=end))
    moved = replace(plan, pipelines=(replace(pipeline, stages=stages),))
    moves = [(step, moved if step % 40 else plan) for step in range(20, STEPS, 20)]
    path = tmp_path / "moves.py"
    path.write_text(policy_file(moves, tmp_path / "moves.log"))
    return str(path)


@contextmanager
def launching(
    tmp_path: Path, policy: str = "none", plan: Plan | None = None, every: int = 100, **variables: str
) -> Iterator[Launch]:
    """As a host does: launchers of an attempt, which are this process's children, as their agents are without them."""
    mark = uuid.uuid4().hex
    scenario, summing = training()
    RunBundle(scenario, plan or summing, HostedRun("real", STEPS, policy, 0, "", every)).write(tmp_path / "job")
    command = [sys.executable, "-m", MODULE, str(tmp_path), str(tmp_path / "shared"), str(os.getpid())]
    started: list[subprocess.Popen[bytes]] = []

    def launch() -> "subprocess.Popen[bytes]":
        with (tmp_path / "log.txt").open("ab") as log:
            environment = {**python_environment(), MARK: mark, **variables}
            started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        return started[-1]

    with adopting_orphans():
        try:
            yield launch
        finally:
            for process in started:
                process.kill()
                process.wait()
            end_orphan(job_of(tmp_path), 10.0)
    wait_until(lambda: not marked_processes(mark), "processes stay behind")


def kill_in_training(launch: Launch, tmp_path: Path) -> None:
    launcher = launch()
    losses = LossFile(tmp_path / "shared" / "losses.jsonl")
    wait_until(lambda: losses.last() > STEPS // 3, "nothing is trained", 0.01)
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    assert losses.last() < STEPS - 1, "the attempt was too short for this test"
    assert is_orphaned(job_of(tmp_path))


@pytest.mark.slow
def test_workers_between_exchanges_go_on_from_their_checkpoint(tmp_path: Path) -> None:
    """Nobody hears of their losses before the end."""
    scenario, _ = training()
    names = [device.name for device in scenario.cluster.devices[:2]]
    samples = scenario.training.global_batch // 2
    plan = workers_plan(scenario, names, samples, Synchronisation("diloco", interval_steps=5))
    shared = tmp_path / "shared"
    with launching(tmp_path, plan=plan, every=20, ROPEBRIDGE_TIMEOUTS='{"attach_s": 0.1}') as launch:
        launcher = launch()
        checkpoints = CheckpointFolder(shared / "checkpoints")
        wait_until(lambda: checkpoints.newest_step() is not None, "no checkpoint is complete", 0.01)
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
        wait_until(lambda: not is_orphaned(job_of(tmp_path)), "the agent does not end")
        # Ranks may have been ended while they wrote a newer one.
        newest = checkpoints.newest_step()
        assert newest is not None, "no checkpoint is complete"
        assert newest < STEPS, "the attempt was too short for this test"
        assert launch().wait(60.0) == 0
    assert read_ending(tmp_path).outcome is Outcome.FINISHED
    assert f"resumed from the checkpoint of step {newest}" in (tmp_path / "log.txt").read_text()
    losses = TorchBackend("real").run(scenario, plan, None, STEPS).losses
    assert list(LossFile(shared / "losses.jsonl").read().values()) == list(losses)


@pytest.mark.slow
@pytest.mark.parametrize("moves", [False, True])
def test_another_launcher_follows_the_ranks(moves: bool, tmp_path: Path) -> None:
    policy = moving(tmp_path) if moves else "none"
    with launching(tmp_path, policy) as launch:
        kill_in_training(launch, tmp_path)
        assert launch().wait(60.0) == 0
    assert read_ending(tmp_path).outcome is Outcome.FINISHED
    assert "another one follows them" in (tmp_path / "log.txt").read_text()
    scenario, plan = training()
    path = tmp_path / "undisturbed.safetensors"
    backend = TorchBackend("real", parameters=path)
    record = backend.run(scenario, plan, make_policy(policy, scenario), STEPS)
    lines = (tmp_path / "shared" / "losses.jsonl").read_text().splitlines()
    assert [tuple(json.loads(line)) for line in lines] == list(enumerate(record.losses))
    assert len(read_record(tmp_path / "shared" / "run").decisions) == len(record.decisions)
    assert bool(record.decisions) == moves
    expected, found = load_file(path), load_file(tmp_path / "shared" / "run" / "parameters.safetensors")
    assert all(torch.equal(expected[name], found[name]) for name in expected | found)


@pytest.mark.slow
def test_without_another_launcher_ranks_end(tmp_path: Path) -> None:
    with launching(tmp_path, ROPEBRIDGE_TIMEOUTS='{"attach_s": 1.0}') as launch:
        kill_in_training(launch, tmp_path)
        wait_until(lambda: not is_orphaned(job_of(tmp_path)), "the agent does not end")
        assert launch().wait(60.0) == 0
    assert "another one follows them" not in (tmp_path / "log.txt").read_text()
    assert list(LossFile(tmp_path / "shared" / "losses.jsonl").read()) == list(range(STEPS))


@pytest.mark.slow
def test_a_rank_that_is_lost_meanwhile_ends_the_others(tmp_path: Path) -> None:
    with launching(tmp_path) as launch:
        kill_in_training(launch, tmp_path)
        rank = int((job_of(tmp_path).path / "beat-1").read_text())
        os.kill(rank, signal.SIGKILL)
        wait_until(lambda: not is_orphaned(job_of(tmp_path)), "the agent does not end")
        assert launch().wait(60.0) == 0
    assert read_ending(tmp_path).outcome is Outcome.FINISHED
