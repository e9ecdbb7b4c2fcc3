"""Wherever points are carried out, the table is the same."""

import importlib.util
import json
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from experiments.runs.progress import SWEEP_LINE_EVERY_S, duration_text, sweep_lines
from experiments.sweep.driver import carry_out_study, sweep_study
from experiments.sweep.engines.slurm import SlurmJobs
from experiments.sweep.points import points_of
from experiments.sweep.sweep_file import read_sweep
from tests.helpers.networks.responders import free_port
from tests.helpers.processes.command import ropebridge, ropebridge_process
from traces.common.errors import InputError

SWEEP = """
scenario: two-regions
strategy: megatron
steps: 4
parameters:
  training.global_batch: {grid: [32, 64]}
  cluster.links[0].latency: {grid: [5 ms, 20 ms, fast]}
"""

needs_submitit = pytest.mark.skipif(importlib.util.find_spec("submitit") is None, reason="submitit is not installed")
needs_dask = pytest.mark.skipif(importlib.util.find_spec("distributed") is None, reason="distributed is not installed")


@pytest.fixture
def sweep_file(tmp_path: Path) -> Path:
    path = tmp_path / "sweep.yaml"
    path.write_text(SWEEP)
    return path


def rows(folder: Path) -> list[dict[str, Any]]:
    return pq.read_table(folder / "points.parquet").drop_columns(["wall_s"]).to_pylist()


def expected(sweep_file: Path) -> list[dict[str, Any]]:
    done = ropebridge("sweep", sweep_file, "-o", sweep_file.parent / "local", "-j", 1, "--json")
    assert json.loads(done.stdout)["failed"] == 2
    return rows(sweep_file.parent / "local")


@pytest.mark.slow
@needs_submitit
def test_jobs_of_submitit(sweep_file: Path, tmp_path: Path) -> None:
    sweep = read_sweep(sweep_file)
    done: list[int] = []

    @contextmanager
    def watching(left: int, points: int) -> Any:
        yield lambda count, failed: done.append(count)

    engine = SlurmJobs(1, tmp_path / "out", {}, cluster="local")
    study = sweep_study(sweep, points_of(sweep))
    result = carry_out_study(study, tmp_path / "out", engine, watching, failed_again=False)
    assert (result.points, result.carried_out, result.failed, sum(done)) == (6, 6, 2, 6)
    assert len(done) == 4
    assert rows(tmp_path / "out") == expected(sweep_file)


@needs_submitit
def test_what_slurm_s_engine_refuses(tmp_path: Path, sweep_file: Path) -> None:
    if shutil.which("sbatch") is None:
        with pytest.raises(InputError, match="no 'sbatch'"):
            SlurmJobs(1, tmp_path / "out", {})
    with pytest.raises(InputError, match="partitoin"):
        SlurmJobs(1, tmp_path / "out", {"partitoin": "long"}, cluster="local")
    assert list(tmp_path.iterdir()) == [sweep_file]


@needs_dask
def test_tasks_of_dask(sweep_file: Path, tmp_path: Path) -> None:
    done = ropebridge("sweep", sweep_file, "-o", tmp_path / "out", "-j", 2, "--engine", "dask", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["carried_out"] == 6
    assert rows(tmp_path / "out") == expected(sweep_file)


@pytest.mark.slow
@needs_dask
def test_a_scheduler_that_is_not_there_is_named(
    sweep_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", address)
    monkeypatch.setenv("DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT", "1s")
    # Dask reads the variables when it is loaded.
    done = ropebridge_process("sweep", sweep_file, "-o", tmp_path / "out", "--engine", "dask")
    assert done.returncode == 2
    assert f"Dask's scheduler at '{address}' is out of reach" in done.stderr
    assert "Traceback" not in done.stderr


def test_nothing_is_said_before_a_point_is_done() -> None:
    now_s, lines = [0.0], list[str]()
    watch = sweep_lines(3, 0, lines.append, lambda: now_s[0])
    now_s[0] = 12.0
    watch(0, 0)
    assert lines == []
    now_s[0] = 24.0
    watch(1, 1)
    assert lines == ["1 of 3 points, 1 failed, 0.0417 points/s, 48 s left"]


def test_lines_say_how_long_it_will_take() -> None:
    now_s, lines = [0.0], list[str]()
    watch = sweep_lines(100, 20, lines.append, lambda: now_s[0])
    for second in range(1, 51):
        now_s[0] = float(second)
        watch(2, second == 5)
    assert SWEEP_LINE_EVERY_S == 10
    assert lines == [
        f"{20 + 2 * second} of 120 points, 1 failed, 2 points/s, {50 - second} s left" for second in (10, 20, 30, 40)
    ]
    assert [duration_text(seconds) for seconds in (0.4, 89, 91, 5000, 6000)] == [
        "0 s",
        "89 s",
        "2 min",
        "83 min",
        "1 h 40 min",
    ]


@pytest.mark.slow
def test_the_bench_finds_no_row_that_differs() -> None:
    done = ropebridge("bench", "sweep", "--quick", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [row["case"].split()[0] for row in result["rows"]] == ["undisturbed", "undisturbed", "killed"]
    assert [check["value"] for check in result["checks"]] == [0, 0, 0]
