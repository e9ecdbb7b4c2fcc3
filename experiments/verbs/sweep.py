"""The verb ``ropebridge sweep``: simulates a scenario with many values of parameters, into one table."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from experiments.runs.console import CommandInterruptedError
from experiments.runs.progress import duration_text, showing_sweep
from experiments.sweep.definition import Sweep
from experiments.sweep.driver import Result, Study, carry_out_study, sweep_study
from experiments.sweep.engines import make_engine
from experiments.sweep.engines.local import usable_cores
from experiments.sweep.folder import check_folder
from experiments.sweep.points import Point, points_of
from experiments.sweep.sweep_file import read_sweep
from experiments.sweep.worker import PointTask, scenario_of
from traces.common.atomic import missing_folders
from traces.common.errors import InputError, RunError


def sweep(
    path: Path,
    folder: Path | None,
    engine: str,
    jobs: int | None,
    as_json: bool,
    failed_again: bool,
    tell: Callable[[str], None],
) -> str:
    """Carry out a sweep by `carry_out`; return its result as text or JSON."""
    result = carry_out(path, folder, engine, jobs, failed_again, tell)
    return json.dumps(summary(result)) if as_json else describe(result)


def carry_out(
    path: Path, folder: Path | None, engine: str, jobs: int | None, failed_again: bool, tell: Callable[[str], None]
) -> Result:
    """Carry out the sweep in a file, or the part of it that is not done yet.

    Args:
        path: The sweep file.
        folder: The folder for table and logs; None for the default one.
        engine: Name of the engine that carries out points.
        jobs: Number of points at a time; None for the number of this machine's cores.
        failed_again: Whether to carry out failed points again.
        tell: Called with lines about the progress.

    Raises:
        InputError: The sweep is not valid, or the folder holds anything but this sweep.
        RunError: Every point failed.
    """
    chosen = read_sweep(path)
    points = points_of(chosen)
    _refuse_wrong_scenario(chosen, points)
    place = folder if folder is not None else Path("sweeps") / path.stem
    return carry_out_in(place, sweep_study(chosen, points), engine, jobs, failed_again, tell)


def carry_out_in(
    place: Path, study: Study, engine: str, jobs: int | None, failed_again: bool, tell: Callable[[str], None]
) -> Result:
    """Carry out a study, or the part of it that is not done yet, in a folder; see `carry_out` for the rest.

    If every point fails, a new folder is removed: the corrected study would be refused there.

    Raises:
        InputError: The folder holds anything but this study.
        RunError: Every point failed.
    """
    if jobs is not None and not (type(jobs) is int and jobs >= 1):
        raise InputError(f"{jobs!r} is not allowed", where="jobs", valid="give a whole number, 1 or more")
    check_folder(place, study.sweep)
    missing = missing_folders(place)
    made = make_engine(engine, jobs or usable_cores(), place, study.sweep.slurm)
    try:
        result = carry_out_study(study, place, made, showing_sweep, failed_again=failed_again)
    except CommandInterruptedError:
        tell(f"finished points are kept in {place}; the same command carries out the rest")
        raise
    if result.failed == result.points:
        for each in missing[-1:]:
            shutil.rmtree(each, ignore_errors=True)
        raise RunError(f"none of {result.points} points could be carried out; the first: {result.first_error}")
    return result


def _refuse_wrong_scenario(sweep: Sweep, points: Sequence[Point]) -> None:
    """Raise InputError if the scenario is not valid by itself and not valid with the first point's values either.

    One of these alone is no error of the sweep: the scenario may lack a value that a parameter provides, and a single
    point may have a value that is not valid.
    """
    task, first = PointTask(sweep.folder, sweep.common, Path()), points[0].values
    try:
        scenario_of(task, {name: value for name, value in first.items() if name == "scenario"})
    except InputError:
        scenario_of(task, first)


def summary(result: Result) -> dict[str, object]:
    """Return the numbers of points, the time taken and the paths of a result, for JSON."""
    return {
        "points": result.points,
        "carried_out": result.carried_out,
        "failed": result.failed,
        "seconds": result.duration_s,
        "points_per_s": result.carried_out / result.duration_s,
        "folder": str(result.table.parent),
        "table": str(result.table),
    }


def describe(result: Result) -> str:
    """Return a few lines of text on the points of a result, with the path of its table."""
    lines = [f"{result.points} points, {result.carried_out} of them carried out in {duration_text(result.duration_s)}"]
    if result.failed:
        lines.append(f"{result.failed} failed, the first with: {result.first_error}")
    return "\n".join([*lines, str(result.table)])
