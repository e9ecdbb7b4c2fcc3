"""Carries out a sweep or a backtest: skips finished points, carries out the rest, and writes the table."""

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from pathlib import Path

from experiments.runs.progress import SweepWatch
from experiments.sweep.definition import Sweep
from experiments.sweep.folder import LOGS, TABLE, claimed, write_sweep_json
from experiments.sweep.outcomes import FAILED, Outcome, OutcomeLog, read_outcomes
from experiments.sweep.points import Point
from experiments.sweep.table import RUN_METRICS, write_table
from experiments.sweep.worker import Engine, PointTask, Task
from traces.common.errors import RunError

DIED = "the process that carried it out died, twice: out of memory, or killed"


@dataclass(frozen=True, slots=True)
class Study:
    """Points that belong together, what is done for each, and how their outcomes become the rows of one table.

    Attributes:
        sweep: Settings and parameters, which describe the points.
        make_task: Takes the folder of the logs; returns what is done for each point.
        metrics: Names of the first columns of metrics, in order.
        compared: Takes the points and the outcomes so far; returns the outcomes that the table shows, which may have
            metrics that compare points with each other.
        kind: What the points make up: ``sweep`` or ``backtest``.
    """

    sweep: Sweep
    points: Sequence[Point]
    make_task: Callable[[Path], Task]
    metrics: tuple[str, ...]
    compared: Callable[[Sequence[Point], Mapping[str, Outcome]], Mapping[str, Outcome]]
    kind: str


def sweep_study(sweep: Sweep, points: Sequence[Point]) -> Study:
    """Return the study of a sweep, whose points are not compared with each other."""

    def make_task(log: Path) -> PointTask:
        return PointTask(sweep.folder.resolve(), sweep.common, log)

    return Study(sweep, points, make_task, RUN_METRICS, lambda _, outcomes: outcomes, "sweep")


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a study.

    Attributes:
        carried_out: Number of points that this call carried out.
        failed: Number of points that failed, in this call or in an earlier one.
        first_error: Error of the first failed point; empty if none failed.
    """

    points: int
    carried_out: int
    failed: int
    duration_s: float
    table: Path
    first_error: str


def carry_out_study(
    study: Study,
    folder: Path,
    engine: Engine,
    showing: Callable[[int, int], AbstractContextManager[SweepWatch]],
    *,
    failed_again: bool,
) -> Result:
    """Carry out the unfinished points of a study, with ``failed_again`` also failed ones, and write the table.

    After an interruption the table has all points that were finished by then. ``showing`` takes the numbers of
    unfinished and of all points, and returns a context manager that yields the callback for progress.

    Raises:
        InputError: The folder holds anything but this study.
        RunError: No worker could be started, or the workers' logs are not visible yet.
    """
    start_s = time.perf_counter()
    sweep, points = study.sweep, study.points
    with claimed(folder, sweep):
        logs = folder / LOGS
        before = read_outcomes(logs)
        write_sweep_json(folder, sweep, len(points), study.metrics, study.kind)
        done = {key for key, outcome in before.items() if not (failed_again and outcome.status == FAILED)}
        # Points with equal keys have equal values, and are carried out once.
        left = list({point.key: point for point in points if point.key not in done}.values())
        try:
            with showing(len(left), len(left) + len({point.key for point in points} & done)) as watch:
                _carry_out(study.make_task(logs.resolve()), left, engine, watch, before)
        finally:
            outcomes = read_outcomes(logs)
            shown = study.compared(points, outcomes)
            metrics = write_table(folder / TABLE, sweep, points, shown, study.metrics)
            write_sweep_json(folder, sweep, len(points), metrics, study.kind)
    if missing := sum(point.key not in outcomes for point in points):
        # Network folders show the writes of other machines with a delay.
        raise RunError(f"the outcomes of {missing} points are not visible yet in {logs}; call the same command again")
    errors = [outcomes[point.key].error for point in points if outcomes[point.key].status == FAILED]
    duration_s = time.perf_counter() - start_s
    return Result(len(points), len(left), len(errors), duration_s, folder / TABLE, errors[0] if errors else "")


def _carry_out(
    task: Task, points: Sequence[Point], engine: Engine, watch: SweepWatch, before: Mapping[str, Outcome]
) -> None:
    """Carry out points; repeat the points that a worker's death may be due to, each in a worker of its own."""
    suspects: list[Point] = []
    queue = list(points)
    while queue:
        lost = list(_lost_points(task, queue, engine, watch, alone=False))
        queue = []
        after = read_outcomes(task.log) if lost else {}
        for portion in lost:
            ended = [after[point.key] for point in portion if after.get(point.key) != before.get(point.key)]
            watch(len(ended), sum(outcome.status == FAILED for outcome in ended))
            unfinished = [point for point in portion if after.get(point.key) == before.get(point.key)]
            suspects += unfinished[:1]
            queue += unfinished[1:]
    if suspects:
        # A point whose worker dies again, without other points in it, has failed.
        with (
            closing(OutcomeLog(task.log)) as log,
            closing(_lost_points(task, suspects, engine, watch, alone=True)) as failing,
        ):
            for failed in failing:
                for point in failed:
                    log.write(Outcome(point.key, FAILED, DIED, {}, 0.0, time.time()))
                log.keep()
                watch(len(failed), len(failed))


def _lost_points(
    task: Task, points: Sequence[Point], engine: Engine, watch: SweepWatch, *, alone: bool
) -> Generator[Sequence[Point], None, None]:
    """Carry out points; yield those of each portion whose worker died."""
    with closing(engine.carry_out(task, points, alone=alone)) as portions:
        for portion in portions:
            if portion.tally is None:
                yield portion.points
            else:
                watch(portion.tally.done, portion.tally.failed)
