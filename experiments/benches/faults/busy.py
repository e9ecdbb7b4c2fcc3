"""A training on a machine whose cores are all kept busy by others: no rank that lives is taken for lost."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from experiments.benches.faults.case import STEPS, Case
from experiments.benches.faults.judging import MOST_DIFFERENCE, undisturbed
from experiments.benches.faults.running import Ended, Running
from experiments.benches.result import BenchResult, Row, at_most
from experiments.runs.folder import read_record
from planner.events.event import EventKind
from planner.runs.event_totals import step_ends_s
from planner.runs.record import RunRecord
from traces.common.atomic import scratch_folder

MINUTES, QUICK_MINUTES = 30, 1

# Processes that do nothing but compute, for each core.
_PER_CORE = 2

# Seconds in which a run must have ended that should take a minute.
_LIMIT_S = 300.0


def measure_busy(quick: bool, tell: Callable[[str], None], count: int | None = None) -> BenchResult:
    """Train for some minutes beside processes that keep all cores busy.

    Args:
        quick: Whether to train for one minute.
        tell: Function that shows progress.
        count: Number of minutes; None for the bench's own number.
    """
    minutes = count or (QUICK_MINUTES if quick else MINUTES)
    with _busy_cores() as others:
        _, record = _train(STEPS)
        step_s = step_ends_s(record.events)[-1] / STEPS
        tell(f"{others} other processes: {step_s:.3f} s a step")
        ended, record = _train(max(STEPS, round(60 * minutes / step_s)))
    ends_s = step_ends_s(record.events)
    done = Counter(
        (event.device, event.action, event.step, event.microbatch)
        for event in record.events
        if event.kind is EventKind.COMPUTE
    )
    expected = undisturbed(_case(STEPS), ()).losses
    differences = [abs(one - other) / (1 + abs(other)) for one, other in zip(record.losses, expected, strict=False)]
    row: Row = {
        "others": others,
        "steps": len(ends_s),
        "minutes": ends_s[-1] / 60,
        "longest_step_s": max(later - earlier for earlier, later in zip([0.0, *ends_s], ends_s, strict=False)),
        "given_up": ended.said.count("lost: "),
        "absences": sum(event.kind is EventKind.FAULT for event in record.events),
        "done_twice": sum(times > 1 for times in done.values()),
        "difference": max(differences),
    }
    return BenchResult(
        [row],
        [
            at_most("ranks given up", int(row["given_up"]) + int(row["absences"]), 0),
            at_most("actions done twice", int(row["done_twice"]), 0),
            at_most("largest difference of a loss, over 1 + its value", float(row["difference"]), MOST_DIFFERENCE),
        ],
    )


def _case(steps: int) -> Case:
    return Case("replicas", "none", "momentum", "shaper", 2, steps)


def _train(steps: int) -> tuple[Ended, RunRecord]:
    case = _case(steps)
    with scratch_folder() as folder, Running(case, folder) as running:
        ended = running.carry_out((), 1.0, _LIMIT_S + steps)
        if ended.status != 0:
            raise RuntimeError(f"the training ended with status {ended.status}: {ended.said}")
        return ended, read_record(running.output)


@contextmanager
def _busy_cores() -> Iterator[int]:
    """Return a context in which other processes keep all cores busy; it yields their number."""
    count = _PER_CORE * (os.cpu_count() or 1)
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield count
    finally:
        for each in others:
            each.kill()
            each.wait()
