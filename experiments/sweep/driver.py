"""Carries out a sweep: skips points that are done, carries out the rest, and writes the table."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from pathlib import Path

from experiments.runs.progress import SweepWatch
from experiments.sweep.definition import Sweep
from experiments.sweep.folder import LOGS, TABLE, claimed, write_sweep_json
from experiments.sweep.outcomes import FAILED, Outcome, OutcomeLog, read_outcomes
from experiments.sweep.points import Point
from experiments.sweep.table import RUN_METRICS, write_table
from experiments.sweep.worker import Engine, PointTask
from traces.common.errors import RunError

DIED = "the process that carried it out died, twice: out of memory, or killed"


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a sweep.

    Attributes:
        carried_out: Number of points that were carried out this time.
        failed: Number of points that failed, this time or before.
        first_error: Error of the first point that failed; empty if none did.
    """

    points: int
    carried_out: int
    failed: int
    duration_s: float
    table: Path
    first_error: str


def carry_out_sweep(
    sweep: Sweep,
    points: Sequence[Point],
    folder: Path,
    engine: Engine,
    showing: Callable[[int, int], AbstractContextManager[SweepWatch]],
    *,
    failed_again: bool,
) -> Result:
    """Carry out the points of a sweep that are not done yet, and write the table.

    What is done when this is interrupted stays done, and is in the table.

    Args:
        sweep: The sweep to carry out.
        points: All of its points.
        folder: The folder of its table and logs.
        engine: What carries out points.
        showing: Gives what shows the progress, called with the numbers of points that are left and of all points.
        failed_again: Whether points that have failed are carried out again.

    Raises:
        InputError: The folder holds something else.
        RunError: There are no workers, or what they wrote cannot be seen yet.
    """
    start_s = time.perf_counter()
    with claimed(folder, sweep):
        logs = folder / LOGS
        before = read_outcomes(logs)
        write_sweep_json(folder, sweep, len(points), RUN_METRICS)
        done = {key for key, outcome in before.items() if not (failed_again and outcome.status == FAILED)}
        # What is drawn twice is carried out once.
        left = list({point.key: point for point in points if point.key not in done}.values())
        try:
            with showing(len(left), len(left) + len({point.key for point in points} & done)) as watch:
                _carry_out(PointTask(sweep.folder.resolve(), sweep.common, logs.resolve()), left, engine, watch, before)
        finally:
            outcomes = read_outcomes(logs)
            metrics = write_table(folder / TABLE, sweep, points, outcomes)
            write_sweep_json(folder, sweep, len(points), metrics)
    if missing := sum(point.key not in outcomes for point in points):
        # Folders of a network show what other machines wrote with a delay.
        raise RunError(
            f"what came out of {missing} points is not to be seen yet in {logs}; call the same command again"
        )
    errors = [outcomes[point.key].error for point in points if outcomes[point.key].status == FAILED]
    duration_s = time.perf_counter() - start_s
    return Result(len(points), len(left), len(errors), duration_s, folder / TABLE, errors[0] if errors else "")


def _carry_out(
    task: PointTask, points: Sequence[Point], engine: Engine, watch: SweepWatch, before: Mapping[str, Outcome]
) -> None:
    """Carry out points; a point during which a worker died is carried out again by a worker of its own."""
    suspects: list[Point] = []
    queue = list(points)
    while queue:
        lost = _portions_lost(task, queue, engine, watch)
        queue = []
        after = read_outcomes(task.log) if lost else {}
        for portion in lost:
            ended = [after[point.key] for point in portion if after.get(point.key) != before.get(point.key)]
            watch(len(ended), sum(outcome.status == FAILED for outcome in ended))
            unfinished = [point for point in portion if after.get(point.key) == before.get(point.key)]
            suspects += unfinished[:1]
            queue += unfinished[1:]
    if suspects:
        _carry_out_alone(task, suspects, engine, watch)


def _portions_lost(
    task: PointTask, points: Sequence[Point], engine: Engine, watch: SweepWatch
) -> list[Sequence[Point]]:
    """Carry out points; return the portions whose worker has died."""
    lost = []
    with closing(engine.carry_out(task, points, alone=False)) as portions:
        for portion in portions:
            if portion.tally is None:
                lost.append(portion.points)
            else:
                watch(portion.tally.done, portion.tally.failed)
    return lost


def _carry_out_alone(task: PointTask, points: Sequence[Point], engine: Engine, watch: SweepWatch) -> None:
    """Carry out points whose workers died; those whose workers die again have failed."""
    with closing(OutcomeLog(task.log)) as log, closing(engine.carry_out(task, points, alone=True)) as portions:
        for portion in portions:
            if portion.tally is None:
                for point in portion.points:
                    log.write(Outcome(point.key, FAILED, DIED, {}, 0.0, time.time()))
                log.keep()
                watch(len(portion.points), len(portion.points))
            else:
                watch(portion.tally.done, portion.tally.failed)
