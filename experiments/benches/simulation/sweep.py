"""Measures the speed of a sweep in one process and on all cores, and checks a sweep that is killed and resumed.

Sweeps with one process and with one process per core take turns, since the load of a shared machine changes.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from time import perf_counter, sleep

import pyarrow.parquet as pq

from experiments.benches.result import BenchResult, Row, at_least, at_most
from experiments.sweep.engines.local import usable_cores
from experiments.sweep.folder import LOGS, TABLE
from experiments.sweep.outcomes import read_outcomes
from experiments.sweep.table import WALL
from traces.common.atomic import scratch_folder
from traces.common.errors import RunError

# Number of random draws for each of the 40 combinations: 2,000 points.
DRAWS, QUICK_DRAWS = 50, 2

LEAST_EFFICIENCY = 0.9

UNDISTURBED = "undisturbed"

# The sweep file: a grid, lists and draws over scenario, plan and policy, as in a study of fluctuating links.
SWEEP = """
scenario: two-regions
steps: 20
parameters:
  training.global_batch: {{grid: [32, 64, 96, 128, 192]}}
  strategy: {{grid: [megatron, gpipe]}}
  policy: {{list: [depth, depth, none, deepcee]}}
  plan.connections: {{list: [1, 4, 1, 1]}}
  cluster.links[west-east].trace.mean: {{loguniform: [20 Mbit/s, 200 Mbit/s]}}
  cluster.links[west-east].latency: {{uniform: [5 ms, 60 ms]}}
draws: {draws}
"""

# Share of the points after which the sweep is killed.
_KILLED_AFTER = 0.4


def measure_sweep(quick: bool, tell: Callable[[str], None]) -> BenchResult:
    """Carry out the same sweep with one process, with one process per core, and with a kill in the middle."""
    cores = usable_cores()
    with scratch_folder() as folder:
        file = folder / "sweep.yaml"
        file.write_text(SWEEP.format(draws=1))
        tell("once, for what is compiled")
        _carry_out(file, folder / "first", cores)
        file.write_text(SWEEP.format(draws=QUICK_DRAWS if quick else DRAWS))
        rows = []
        for number, jobs in enumerate((1, cores) if quick else (1, cores, cores, 1)):
            tell(f"{jobs} process{'es' if jobs > 1 else ''}")
            rows.append(_carry_out(file, folder / f"undisturbed-{number}", jobs))
        tell("killed and resumed")
        rows.append(_killed_and_resumed(file, folder / "killed", cores, int(rows[0]["points"])))
        differing = [_differing_rows(folder / "undisturbed-0", folder / each) for each in ("undisturbed-1", "killed")]
    efficiency = _seconds(rows, 1) / _seconds(rows, cores) / cores
    checks = [
        at_most("rows that differ between one process and all cores", differing[0], 0),
        at_most("rows that differ after a kill and a resumption", differing[1], 0),
        at_most("points that failed", sum(int(row["failed"]) for row in rows), 0),
    ]
    if not quick:
        # In a short sweep the start of the processes dominates.
        checks.append(at_least(f"efficiency of {cores} processes", efficiency, LEAST_EFFICIENCY))
    return BenchResult(rows, checks)


def _seconds(rows: Sequence[Row], processes: int) -> float:
    return sum(float(row["seconds"]) for row in rows if row["case"] == UNDISTURBED and row["processes"] == processes)


def _carry_out(file: Path, folder: Path, jobs: int, case: str = UNDISTURBED) -> Row:
    """Carry out a sweep with the command; return its row, whose ``seconds`` are the time of the whole command."""
    start_s = perf_counter()
    done = subprocess.run(_command(file, folder, jobs), capture_output=True, text=True, check=False)
    seconds = perf_counter() - start_s
    if done.returncode != 0:
        raise RunError(f"the sweep ended with status {done.returncode}: {done.stderr.strip()}")
    summary = json.loads(done.stdout)
    return {
        "case": case,
        "processes": jobs,
        "points": summary["points"],
        "carried_out": summary["carried_out"],
        "failed": summary["failed"],
        "seconds": seconds,
        "points_per_s": summary["carried_out"] / seconds,
        # Mean time of a point in its worker; it grows with the number of processes if they slow each other down.
        "worker_s_per_point": fmean(pq.read_table(folder / TABLE).column(WALL).to_pylist()),
    }


def _killed_and_resumed(file: Path, folder: Path, jobs: int, points: int) -> Row:
    """Kill the command with SIGKILL, after which its workers must end by themselves, and resume it; return the row."""
    process = subprocess.Popen(_command(file, folder, jobs), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while process.poll() is None and len(read_outcomes(folder / LOGS)) < _KILLED_AFTER * points:
            sleep(0.05)
    finally:
        process.kill()
        if process.wait() != -signal.SIGKILL:
            raise RunError("the sweep ended before it could be killed; run the bench again")
    return _carry_out(file, folder, jobs, f"killed after {len(read_outcomes(folder / LOGS))} points, resumed")


def _command(file: Path, folder: Path, jobs: int) -> list[str]:
    return [sys.executable, "-m", "experiments", "sweep", str(file), "-o", str(folder), "-j", str(jobs), "--json"]


def _differing_rows(one: Path, other: Path) -> int:
    """Count the rows of two tables that are not equal to the last bit, apart from the points' wall times."""
    tables = [pq.read_table(folder / TABLE).drop_columns([WALL]).to_pylist() for folder in (one, other)]
    missing = abs(len(tables[0]) - len(tables[1]))
    return missing + sum(bool(first != second) for first, second in zip(*tables, strict=False))
