"""How much strangers without a key can slow a training: steps with and without them, in turn within one run."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median

from executor.core.clock import read_origin
from executor.core.subprocesses import python_environment
from executor.rank.telemetry import read_samples
from experiments.benches.faults.case import Case
from experiments.benches.faults.running import Running
from experiments.benches.faults.strangers import WAYS
from experiments.benches.processes import places_listened_at
from experiments.benches.result import BenchResult, Row, at_least, at_most
from traces.common.atomic import scratch_folder

ROUNDS, QUICK_ROUNDS = 12, 3

MOST_SLOWED = 1.05

# Number of strangers, and seconds with and without them in each round. The head may still be occupied with connections
# for some seconds after the strangers have stopped: these do not count.
_STRANGERS = 4
_ATTACKED_S, _QUIET_S = 8.0, 14.0
_BEGINNING_S, _AFTERWARDS_S = 1.0, 6.0

# More than the run has time for.
_STEPS = 10**6
_START_S = 120.0


def measure_strangers(quick: bool, tell: Callable[[str], None], count: int | None = None) -> BenchResult:
    """Let strangers come and go while a training runs, and compare the times of its steps.

    Args:
        quick: Whether to let them come less often.
        tell: Function that shows progress.
        count: How often they come; None for the bench's own number.
    """
    rounds = count or (QUICK_ROUNDS if quick else ROUNDS)
    case = Case("line", "none", "momentum", "shaper", 2, _STEPS)
    rows: list[Row] = []
    with scratch_folder() as folder, Running(case, folder) as running:
        whole_s = _START_S + rounds * (_ATTACKED_S + _QUIET_S)
        training = threading.Thread(target=running.carry_out, args=((), 1.0, whole_s), daemon=True)
        training.start()
        samples, origin_s = _first_step(running.scratch)
        places = sorted(places_listened_at(running.mark))
        tell(f"the job listens at {', '.join(f'{address}:{port}' for address, port in places)}")
        with _strangers(places) as processes:
            for number in range(rounds):
                quiet_s = _step_s(samples, origin_s, _AFTERWARDS_S if number else 0.0, _QUIET_S)
                _signal(processes, signal.SIGCONT)
                attacked_s = _step_s(samples, origin_s, _BEGINNING_S, _ATTACKED_S)
                _signal(processes, signal.SIGSTOP)
                rows.append({"quiet_s": quiet_s, "attacked_s": attacked_s, "ratio": attacked_s / quiet_s})
                tell(f"a step takes {quiet_s:.4f} s, among strangers {attacked_s:.4f} s")
            tried = [_tried(each) for each in processes]
        tell(f"attempts of the strangers at these places: {tried}")
        running.interrupt()
        training.join()
    slowed = median(float(row["ratio"]) for row in rows)
    checks = [
        at_most("median of a step among strangers, to one without", slowed, MOST_SLOWED),
        # Strangers that have ended early slow nothing. Only the head answers them; other places let them wait.
        at_least("attempts of each stranger at the head", min(map(max, tried)), len(WAYS)),
    ]
    return BenchResult(rows, checks)


def _first_step(scratch: Path) -> tuple[Path, float]:
    """Wait for the first step of a training; return a rank's file of steps, and second 0 of the run."""
    until_s = time.monotonic() + _START_S
    while time.monotonic() < until_s:
        for job in scratch.glob("ropebridge-*"):
            samples = job / "resources-0.jsonl"
            if samples.exists() and samples.stat().st_size and (origin_s := read_origin(job / "origin")) is not None:
                return samples, origin_s
        time.sleep(0.05)
    raise RuntimeError(f"the training has done no step within {_START_S:.0f} s")


def _step_s(samples: Path, origin_s: float, left_out_s: float, lasts_s: float) -> float:
    """Wait for some seconds; return the median time of the steps in them, without those in the first ``left_out_s``."""
    begin_s = time.monotonic() - origin_s + left_out_s
    time.sleep(lasts_s)
    end_s = time.monotonic() - origin_s
    ends_s = [each.time_s for each in read_samples(samples) if begin_s <= each.time_s <= end_s]
    if len(ends_s) < 2:
        raise RuntimeError(f"no two steps have ended within {lasts_s - left_out_s:.0f} s")
    return median(later_s - earlier_s for earlier_s, later_s in pairwise(ends_s))


@contextmanager
def _strangers(places: Sequence[tuple[str, int]]) -> Iterator[list["subprocess.Popen[str]"]]:
    """Return a context with stopped strangers, which attack these places whenever they are continued."""
    command = [sys.executable, "-m", "experiments.benches.faults.strangers", json.dumps(places)]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=python_environment())
        for _ in range(_STRANGERS)
    ]
    try:
        for each in processes:
            assert each.stdout is not None
            if each.stdout.readline() != "ready\n":
                raise RuntimeError("a stranger could not begin")
        _signal(processes, signal.SIGSTOP)
        yield processes
    finally:
        for each in processes:
            each.kill()
            each.wait()


def _tried(process: "subprocess.Popen[str]") -> list[int]:
    """End a stranger; return its number of attempts at each place."""
    process.terminate()
    process.send_signal(signal.SIGCONT)
    return [int(each) for each in json.loads(process.communicate()[0] or "[0]")]


def _signal(processes: Sequence["subprocess.Popen[str]"], number: signal.Signals) -> None:
    for each in processes:
        os.kill(each.pid, number)
