"""Jobs and sweeps handed to a real Slurm, and their results read back."""

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from tests.helpers.processes.command import COMMAND, ropebridge, ropebridge_process
from tests.helpers.processes.process_watch import started, wait_until
from tests.helpers.processes.slurm_daemons import Slurm, lacking

pytestmark = pytest.mark.slow

ENTRY = {"interface": "lo", "command": COMMAND[0]}
HOSTS = {"hosts": {"north-worker": {**ENTRY, "address": "127.0.0.1"}, "south-worker": ENTRY}}

SWEEP = """
scenario: two-regions
strategy: megatron
steps: 3
parameters:
  training.global_batch: {grid: [16, 32]}
  policy: {grid: [none, depth]}
"""


@pytest.fixture(scope="module")
def _slurm(tmp_path_factory: pytest.TempPathFactory) -> object:
    if (lack := lacking()) is not None:
        pytest.skip(lack)
    with Slurm(tmp_path_factory.mktemp("slurm")) as slurm, pytest.MonkeyPatch.context() as patch:
        for name, value in slurm.environment.items():
            patch.setenv(name, value)
        yield slurm


def submitted(folder: Path, steps: int) -> Path:
    """A deployment that Slurm has been given."""
    hosts = folder.with_name("hosts.yaml")
    hosts.write_text(yaml.safe_dump(HOSTS))
    done = ropebridge(
        *("deploy", "digits", "--strategy=megatron", "--target", "slurm", "--hosts", hosts, "-o", folder),
        *("--steps", steps, "--strategy", "ddp", "--submit"),
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.usefixtures("_slurm")
def test_a_job_is_deployed_through_slurm(tmp_path: Path) -> None:
    folder = submitted(tmp_path / "job-1", steps=6)
    deadline_s = time.monotonic() + 150
    while not (folder / "job" / "run" / "summary.json").exists():
        log = folder / "slurm.log"
        assert time.monotonic() < deadline_s, ropebridge("status", folder).stdout + (
            log.read_text() if log.exists() else "no log"
        )
        assert "FAILED" not in ropebridge("status", folder).stdout, log.read_text()
        time.sleep(1)
    summary = json.loads((folder / "job" / "run" / "summary.json").read_text())
    assert summary["steps"] == 6
    assert summary["losses"][-1] < summary["losses"][0]
    assert "step 6 of 6" in ropebridge_process("logs", folder).stdout


@pytest.mark.usefixtures("_slurm")
def test_a_job_is_stopped(tmp_path: Path) -> None:
    folder = submitted(tmp_path / "job-2", steps=1_000_000)
    deadline_s = time.monotonic() + 120
    while "step " not in ropebridge_process("logs", folder).stdout:
        assert time.monotonic() < deadline_s, ropebridge("status", folder).stdout
        time.sleep(1)
    assert "RUNNING" in ropebridge("status", folder).stdout
    assert "cancelled" in ropebridge("stop", folder).stdout
    while any(word in ropebridge("status", folder).stdout for word in ("RUNNING", "COMPLETING")):
        assert time.monotonic() < deadline_s
        time.sleep(1)
    assert not (folder / "job" / "run").exists()


@pytest.mark.usefixtures("_slurm")
def test_a_sweep_goes_through_slurm(tmp_path: Path) -> None:
    import pandas

    pytest.importorskip("submitit")
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    here = ropebridge("sweep", tmp_path / "sweep.yaml", "-o", tmp_path / "here")
    assert here.returncode == 0, here.stderr
    there = ropebridge("sweep", tmp_path / "sweep.yaml", "-o", tmp_path / "there", "--engine", "slurm")
    assert there.returncode == 0, there.stderr
    tables = [
        pandas.read_parquet(tmp_path / name / "points.parquet").drop(columns="wall_s") for name in ("here", "there")
    ]
    pandas.testing.assert_frame_equal(*tables)


def queued() -> list[str]:
    """The jobs that wait or run; others are being ended."""
    command = ["squeue", "-h", "-t", "PENDING,RUNNING", "-o", "%i"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


# Each of its points takes a second or more.
LONG = """
scenario: two-regions
strategy: megatron
parameters:
  training.global_batch: {grid: [16, 32, 48, 64, 80, 96, 112, 128]}
  steps: {grid: [3000, 3001, 3002]}
"""


@pytest.mark.usefixtures("_slurm")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_jobs_of_a_command_that_ends_do_not_go_on_beside_the_next_one(number: signal.Signals, tmp_path: Path) -> None:
    import pandas

    pytest.importorskip("submitit")
    (tmp_path / "sweep.yaml").write_text(LONG)
    logs, arguments = tmp_path / "there" / "log", [str(tmp_path / "sweep.yaml"), "-o", str(tmp_path / "there")]
    with started(["sweep", *arguments, "--engine", "slurm", "-j", "2"], tmp_path) as (process, _):
        wait_until(lambda: any(path.read_text() for path in logs.glob("*.jsonl")), "no point is done")
        process.send_signal(number)
        process.wait(timeout=60)
        left = queued()
        assert bool(left) == (number == signal.SIGKILL)
        # The jobs are no children of ours: they live until the next command ends them.
        again = ropebridge("sweep", *arguments, "--engine", "slurm", "-j", "2", "--json")
    assert again.returncode == 0, again.stderr
    assert 0 < json.loads(again.stdout)["carried_out"] < 24
    wait_until(lambda: not queued(), "jobs stay behind")
    here = ropebridge("sweep", tmp_path / "sweep.yaml", "-o", tmp_path / "here")
    assert here.returncode == 0, here.stderr
    tables = [
        pandas.read_parquet(tmp_path / name / "points.parquet").drop(columns="wall_s") for name in ("here", "there")
    ]
    pandas.testing.assert_frame_equal(*tables)
