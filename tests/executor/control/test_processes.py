"""Whatever happens, a run leaves no process and no temporary folder behind, and says what happened."""

import os
import signal
import socket
import time
from pathlib import Path

import pytest

from experiments.benches.processes import marked_processes
from tests.helpers.processes.process_watch import PATIENCE_S, left_behind, processes_of, started, wait_until

PACED = ["run", "two-regions", "--strategy=megatron", "--compute", "paced"]
RUN = [*PACED, "--emulate-wan", "--steps", "500"]


def workers(mark: str) -> list[int]:
    return processes_of("executor.rank.worker", mark)


def await_a_step(folder: Path) -> None:
    files = folder / "scratch"
    wait_until(lambda: any(path.stat().st_size for path in files.rglob("resources-*.jsonl")), "no step is done")


def assert_launcher_agent_and_ranks(launcher: int, mark: str) -> None:
    commands = marked_processes(mark)
    agents = processes_of("executor.control.node_agent", mark)
    assert set(commands) == {launcher, *agents, *workers(mark)}, commands
    assert (len(agents), len(workers(mark)), len(commands)) == (1, 2, 4)


@pytest.mark.slow
def test_a_run_with_backups_has_no_more_processes(tmp_path: Path) -> None:
    options = ["--steps", "100000", "--backup-every", "5", "-o", str(tmp_path / "run")]
    with started([*PACED, *options], tmp_path) as (process, mark):
        await_a_step(tmp_path)
        assert_launcher_agent_and_ranks(process.pid, mark)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE_S)


def test_an_agent_that_is_killed_ends_the_run(tmp_path: Path) -> None:
    with started(RUN, tmp_path) as (process, mark):
        wait_until(lambda: len(workers(mark)) == 2, "the workers do not start")
        (agent,) = processes_of("executor.control.node_agent", mark)
        os.kill(agent, signal.SIGKILL)
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 1
        assert "the agent of this host has ended" in errors
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_an_interrupt_ends_everything(number: signal.Signals, tmp_path: Path) -> None:
    target = tmp_path / "run"
    with started([*RUN, "-o", str(target)], tmp_path) as (process, mark):
        wait_until(lambda: len(workers(mark)) == 2, "the workers do not start")
        time.sleep(1.0)
        process.send_signal(number)
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 130
        assert "interrupted" in errors
    assert left_behind(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == ["scratch"]


def test_an_interrupt_while_the_processes_start_ends_everything(tmp_path: Path) -> None:
    with started([*RUN, "-o", str(tmp_path / "run")], tmp_path) as (process, mark):
        wait_until(lambda: len(marked_processes(mark)) > 1, "the agent does not start")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 130
    assert left_behind(tmp_path) == []


def test_workers_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    with started(RUN, tmp_path) as (process, mark):
        wait_until(lambda: len(workers(mark)) == 2, "the workers do not start")
        process.kill()
        wait_until(lambda: not marked_processes(mark), "workers or their agent outlive the launcher")
    assert left_behind(tmp_path) == []


def test_a_killed_rank_ends_the_run_with_its_name(tmp_path: Path) -> None:
    with started(RUN, tmp_path) as (process, mark):
        await_a_step(tmp_path)
        os.kill(workers(mark)[1], signal.SIGKILL)
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 1
        assert "was ended by SIGKILL" in errors
        assert "device '" in errors
    assert left_behind(tmp_path) == []


def test_a_rank_that_stands_still_ends_the_run_with_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is a launcher, an agent and its ranks, and nothing else."""
    monkeypatch.setenv("ROPEBRIDGE_TIMEOUTS", '{"stopped_s": 2}')
    with started([*PACED, "--steps", "500", "-o", str(tmp_path / "run")], tmp_path) as (process, mark):
        await_a_step(tmp_path)
        assert_launcher_agent_and_ranks(process.pid, mark)
        os.kill(workers(mark)[1], signal.SIGSTOP)
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert errors.startswith("ropebridge: rank ")
    assert "its process was stopped by a signal, and not continued for 2 s" in errors
    assert left_behind(tmp_path) == []


BROKEN_MODEL = """
import torch
class Broken(torch.nn.Module):
    calls = 0
    def forward(self, x):
        Broken.calls += 1
        if Broken.calls > 6:
            {breakdown}
        return x
class Model:
    def __init__(self):
        self.layers = [torch.nn.Linear(4, 4), Broken()]
    def loss(self, outputs, targets):
        return torch.nn.functional.mse_loss(outputs, targets)
    def samples(self, first, count):
        return torch.ones(count, 4), torch.ones(count, 4)
def build():
    return Model()
"""

BROKEN_SCENARIO = """
name: broken
cluster:
  devices:
    - {name: left, kind: t4, region: here}
    - {name: right, kind: t4, region: here}
  links:
    - {inside: here, bandwidth: 1 Gbit/s, latency: 0 ms}
model:
  name: broken
  code: model.py
  layers:
    - {name: first, parameters: 80 B, output: 16 B, activation: 16 B, forward: 32 FLOP}
    - {name: second, parameters: 0 B, output: 16 B, activation: 16 B, forward: 0 FLOP}
training: {global_batch: 4, microbatch: 1}
"""


@pytest.mark.parametrize(
    ("breakdown", "cause"),
    [
        ("raise RuntimeError('the layer breaks down')", "RuntimeError: the layer breaks down"),
        *(
            pytest.param(breakdown, cause, marks=pytest.mark.slow)
            for breakdown, cause in {
                "raise SystemExit(3)": "SystemExit: 3",
                "raise BaseException('bare')": "BaseException: bare",
                "raise GeneratorExit": "GeneratorExit: no message",
                "raise KeyboardInterrupt": "KeyboardInterrupt: no message",
                "import os; os._exit(0)": "ExitCalledError: os._exit(0) was called, which would end ropebridge",
            }.items()
        ),
    ],
)
def test_a_rank_whose_model_fails_ends_the_run_with_the_cause(breakdown: str, cause: str, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(BROKEN_MODEL.format(breakdown=breakdown))
    (tmp_path / "broken.yaml").write_text(BROKEN_SCENARIO)
    arguments = [
        "run",
        str(tmp_path / "broken.yaml"),
        "--strategy=megatron",
        "--on-this-device",
        "-o",
        str(tmp_path / "run"),
    ]
    with started(arguments, tmp_path) as (process, _):
        output, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 1
        assert output == ""
        name = f"rank 1 (device 'right', host {socket.gethostname()})"
        line = BROKEN_MODEL.splitlines().index("            {breakdown}") + 1
        assert errors == f"ropebridge: {name}: {tmp_path / 'model.py'}:{line}: {cause}\n"
    assert left_behind(tmp_path) == []
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_rank_that_ends_too_soon_is_named(tmp_path: Path) -> None:
    """Without an error, and with nobody who would miss it."""
    (tmp_path / "model.py").write_text(BROKEN_MODEL.format(breakdown="import ctypes; ctypes.CDLL(None)._exit(0)"))
    (tmp_path / "broken.yaml").write_text(BROKEN_SCENARIO)
    with started(
        ["run", str(tmp_path / "broken.yaml"), "--strategy=megatron", "--on-this-device", "--backup-every", "1"],
        tmp_path,
    ) as (
        process,
        _,
    ):
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert f"rank 1 (device 'right', host {socket.gethostname()}) ended before the end of the run" in errors
