"""Hosts of the server: they train, are killed, and another one goes on; and the bar, in the slow half."""

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from executor.backend import TorchBackend
from executor.recovery.checkpoints import CheckpointFolder
from experiments.benches.execution.job_queue import measure_jobs
from experiments.benches.processes import marked_processes
from experiments.runs.jobs.attempt import MODULE, LossFile
from experiments.runs.scenario import choose_scenario
from planner.systems.registry import make_plan
from tests.helpers.networks.several_hosts import free_port
from tests.helpers.processes.command import COMMAND, ropebridge
from tests.helpers.processes.process_watch import (
    addresses_listened_at,
    left_behind,
    processes_of,
    started_process,
    wait_until,
)

STEPS = 400
RANK = "executor.rank.worker"
# Each status is a connection with TLS: asked for all the time, they would take a third of a core.
STATUS_PAUSE_S = 1.0


def work(name: str, tmp_path: Path, options: Sequence[str]) -> list[str]:
    return [*COMMAND, "jobs", "work", name, "--shared", str(tmp_path / "shared"), "--device", "cpu=2", *options]


def losses(tmp_path: Path) -> list[str]:
    path = tmp_path / "shared" / "job" / "losses.jsonl"
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.slow
def test_a_job_goes_on_elsewhere_when_server_and_host_are_killed(tmp_path: Path) -> None:
    for name in ("shared", "here", "there", "elsewhere", "again"):
        (tmp_path / name).mkdir()
    port = free_port()
    serve = [*COMMAND, "serve", str(tmp_path / "queue"), "--listen", f"127.0.0.1:{port}", "--lease", "3 s"]
    options = ["--server", f"https://127.0.0.1:{port}", "--token-file", str(tmp_path / "queue" / "token")]
    checkpoints = CheckpointFolder(tmp_path / "shared" / "job" / "checkpoints")

    def state() -> str:
        done = ropebridge("jobs", "status", "job", "--json", *options)
        return str(json.loads(done.stdout)["state"]) if done.returncode == 0 else ""

    with started_process(serve, tmp_path / "here") as (server, server_mark):
        wait_until(
            lambda: ropebridge("jobs", "status", *options).returncode == 0, "the server does not answer", STATUS_PAUSE_S
        )
        assert addresses_listened_at(server_mark) == {"127.0.0.1"}
        submit = ["jobs", "submit", "digits", "--strategy", "megatron", "--steps", str(STEPS), "--name", "job"]
        assert ropebridge(*submit, *options).returncode == 0
        with started_process(work("one", tmp_path, options), tmp_path / "there") as (host, host_mark):
            wait_until(lambda: len(losses(tmp_path)) > STEPS // 8, "nothing is trained")
            server.kill()
            reached = len(losses(tmp_path))
            wait_until(lambda: len(losses(tmp_path)) > reached, "training ends with the server")
            # Its ranks train on, and write checkpoints of steps that it has not heard of.
            (launcher,) = processes_of(MODULE, host_mark)
            os.kill(launcher, signal.SIGSTOP)
            heard = len(losses(tmp_path))
            wait_until(lambda: max(checkpoints.steps) > heard + STEPS // 8, "training waits for the launcher")
            host.kill()
            wait_until(lambda: not marked_processes(host_mark), "a rank outlives its host")
    assert len(losses(tmp_path)) < STEPS, "the job was too short for this test"
    with started_process(serve, tmp_path / "again") as (server, _):
        wait_until(lambda: state() == "queued", "the job of a lost host is not queued again", STATUS_PAUSE_S)
        with started_process(work("two", tmp_path, options), tmp_path / "elsewhere") as (host, _):
            wait_until(lambda: state() == "finished", "the job does not finish", STATUS_PAUSE_S)
            assert "resumed from the checkpoint of step" in ropebridge("jobs", "logs", "job", *options).stdout
            host.send_signal(signal.SIGINT)
            assert host.wait(30.0) == 130
        assert not left_behind(tmp_path / "elsewhere")
        server.send_signal(signal.SIGINT)
        assert server.wait(30.0) == 130
    scenario = choose_scenario("digits")
    path = tmp_path / "undisturbed.safetensors"
    record = TorchBackend("real", parameters=path).run(scenario, make_plan("megatron", scenario), None, STEPS)
    assert [tuple(json.loads(line)) for line in losses(tmp_path)] == list(enumerate(record.losses))
    expected, found = load_file(path), load_file(tmp_path / "shared" / "job" / "run" / "parameters.safetensors")
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.slow
def test_ranks_outlive_their_launchers_and_a_stopped_job_ends_on_its_host(tmp_path: Path) -> None:
    for name in ("shared", "here", "there"):
        (tmp_path / name).mkdir()
    port = free_port()
    serve = [*COMMAND, "serve", str(tmp_path / "queue"), "--listen", f"127.0.0.1:{port}", "--lease", "8 s"]
    options = ["--server", f"https://127.0.0.1:{port}", "--token-file", str(tmp_path / "queue" / "token")]

    with started_process(serve, tmp_path / "here") as (server, _):
        submit = ["jobs", "submit", "digits", "--strategy", "megatron", "--steps", "50000", "--name", "job"]
        # The server's first start also writes the token, which the host reads.
        wait_until(lambda: ropebridge("jobs", "status", *options).returncode == 0, "the server does not answer")
        assert ropebridge(*submit, *options).returncode == 0
        with started_process(work("one", tmp_path, options), tmp_path / "there") as (host, mark):
            wait_until(lambda: losses(tmp_path), "nothing is trained")
            ranks = processes_of(RANK, mark)
            assert len(ranks) == 2
            for _ in range(2):
                (launcher,) = processes_of(MODULE, mark)
                os.kill(launcher, signal.SIGKILL)
                reached = len(losses(tmp_path))
                wait_until(lambda: len(losses(tmp_path)) > reached, "nobody follows the ranks")  # noqa: B023
            assert processes_of(RANK, mark) == ranks
            assert [json.loads(line)[0] for line in losses(tmp_path)][:-1] == list(range(len(losses(tmp_path)) - 1))
            assert "stops as soon as" in ropebridge("jobs", "stop", "job", *options).stdout
            follow = subprocess.run([*COMMAND, "jobs", "logs", "job", "-f", *options], capture_output=True, check=True)
            assert b"of 50000" in follow.stdout
            assert json.loads(ropebridge("jobs", "status", "job", "--json", *options).stdout)["state"] == "stopped"
            assert not processes_of(RANK, mark)
            # The host is free again.
            assert host.poll() is None
            host.send_signal(signal.SIGTERM)
            host.wait(30.0)
        server.send_signal(signal.SIGTERM)
        server.wait(30.0)


@given(cut=st.integers(0, 200), kept=st.integers(0, 5))
@settings(max_examples=30)
def test_the_losses_of_a_killed_attempt_are_read_up_to_its_last_whole_line(cut: int, kept: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "losses.jsonl"
        file = LossFile(path)
        assert (file.read(), file.last()) == ({}, -1)
        for step in range(5):
            file.add(step, step / 3)
        path.write_bytes(path.read_bytes()[:cut])
        found = file.read()
        assert found == {step: step / 3 for step in range(len(found))}
        assert file.last() == len(found) - 1
        file.keep(kept)
        file.add(min(kept, len(found)), 7.0)
        assert list(file.read()) == list(range(min(kept, len(found)) + 1))


@pytest.mark.slow
def test_every_job_ends_once_whatever_is_killed() -> None:
    result = measure_jobs(quick=True, tell=print)
    assert all(check.holds for check in result.checks), result.text()
