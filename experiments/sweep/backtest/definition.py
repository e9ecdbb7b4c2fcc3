"""The definition of a backtest, its checks, and its points: every policy and every rival in every window."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.runs.scenario import DEFAULT_STRATEGY
from experiments.sweep.backtest.comparison import METRICS, compared
from experiments.sweep.backtest.task import NONE, POLICY, START, STATIC, TRACE, BacktestTask
from experiments.sweep.backtest.windows import links_by_text
from experiments.sweep.definition import PLAN, Sweep, check_names, scenario_path, user_file
from experiments.sweep.driver import Study
from experiments.sweep.parameters import Parameter
from experiments.sweep.points import Point, combinations, digest_of, digests
from experiments.sweep.sweep_file import MOST_POINTS
from planner.files.plan import read_plan
from planner.files.scenario import read_scenario
from traces.common.errors import InputError
from traces.common.units import number_text
from traces.formats import read_trace

KIND = "backtest"


@dataclass(frozen=True, slots=True, kw_only=True)
class BacktestConfig:
    """What a user asks of a backtest.

    Attributes:
        scenario: A YAML file, or a ready scenario's name.
        traces: A folder of traces, or one trace.
        policies: Names of policies, or Python files; `NONE` is added.
        rivals: Strategies, or Python files, whose plans in hindsight never change.
        links: Names of the links that play a trace; empty for all links between regions.
        scaled: Whether the trace is scaled on each link to the link's declared rate.
        window_s: Length of a window, seconds.
        every_s: Time from the start of a window to the start of the next one, seconds; None for ``window_s``.
        plan: File of the plan with which all policies begin; None if a strategy makes it.
        strategy: The strategy that makes it, or a Python file; None for the default one.
        slurm: Settings of Slurm's jobs by submitit's names without ``slurm_``.
    """

    scenario: str
    traces: Path
    policies: Sequence[str]
    rivals: Sequence[str]
    links: Sequence[str] = ()
    scaled: bool = False
    window_s: float = 600.0
    every_s: float | None = None
    plan: Path | None = None
    strategy: str | None = None
    slurm: Mapping[str, Any] = field(default_factory=dict)


def backtest_study(config: BacktestConfig) -> Study:
    """Return the points of a backtest and what is done for each, all checked.

    Raises:
        InputError: A name or file is wrong, there is no trace, or a window is longer than a trace.
    """
    folder = Path()
    path = scenario_path(config.scenario, folder)
    links = links_by_text(read_scenario(path), config.links)
    _check_start(config, folder)
    contenders = _contenders(config, folder)
    files = trace_files(config.traces)
    every_s = config.every_s or config.window_s
    counts = {file: _windows(file, config.window_s, every_s) for file in files}
    if (count := sum(counts.values()) * len(contenders)) > MOST_POINTS:
        problem = f"the backtest has {count} points"
        raise InputError(problem, where="--every", valid=f"{MOST_POINTS} at most: give a longer time")
    windows = [(file.name, every_s * number) for file in files for number in range(counts[file])]
    parameters = (
        Parameter(TRACE, "list", tuple(name for name, _ in windows)),
        Parameter(START, "list", tuple(start_s for _, start_s in windows)),
        Parameter(POLICY, "grid", contenders),
    )
    # Lists, not tuples: the settings are compared with those that were written as JSON.
    settings = {
        "scenario": config.scenario,
        "strategy" if config.plan is None else PLAN: str(config.plan or config.strategy or DEFAULT_STRATEGY),
        "window_s": config.window_s,
        "links": list(links),
        "scaled": config.scaled,
    }
    sweep = Sweep(folder / KIND, settings, parameters, 1, 0, config.slurm)

    def make_task(log: Path) -> BacktestTask:
        return BacktestTask(
            scenario=path.resolve(),
            folder=folder.resolve(),
            traces=files[0].parent.resolve(),
            links=links,
            scaled=config.scaled,
            window_s=config.window_s,
            plan=None if config.plan is None else config.plan.resolve(),
            strategy=config.strategy,
            log=log,
        )

    return Study(sweep, _points(sweep, files, folder), make_task, METRICS, compared, KIND)


def trace_files(place: Path) -> list[Path]:
    """Return the traces in a folder, sorted by name, without hidden files and folders; or the file itself.

    Raises:
        InputError: There is no such folder, or no trace in it.
    """
    if place.is_file():
        return [place]
    if not place.is_dir():
        raise InputError("there is no such folder", where=f"--traces {place}", valid="name a folder of traces")
    files = sorted(path for path in place.iterdir() if path.is_file() and not path.name.startswith("."))
    if not files:
        raise InputError("this folder holds no file", where=f"--traces {place}", valid="name a folder of traces")
    return files


def _windows(file: Path, window_s: float, every_s: float) -> int:
    """Return the number of windows that fit into a trace, at least one."""
    duration_s = read_trace(file).duration_s
    if window_s > duration_s:
        raise InputError(
            f"the trace lasts {number_text(duration_s)} s, shorter than a window of {number_text(window_s)} s",
            where=str(file),
            valid="give a shorter --window, or take the trace out of the folder",
        )
    # Tolerance for rounding: three windows of 0.1 s fit into 0.3 s.
    return math.floor((duration_s - window_s) / every_s + 1e-9) + 1


def _check_start(config: BacktestConfig, folder: Path) -> None:
    for option, value_s in (("--window", config.window_s), ("--every", config.every_s)):
        if value_s is not None and not value_s > 0:
            raise InputError(f"{value_s:g} s is not allowed", where=option, valid="give more than 0 s")
    if config.plan is not None:
        if config.strategy is not None:
            raise InputError("both --plan and --strategy are given", valid="give one of them")
        read_plan(config.plan)
    check_names({"strategy": config.strategy}, folder, "--strategy")


def _contenders(config: BacktestConfig, folder: Path) -> tuple[str, ...]:
    """Return the values of the parameter `POLICY`: `NONE`, the other policies, and the rivals."""
    for policy in config.policies:
        check_names({"policy": policy}, folder, "--policies")
    for rival in config.rivals:
        check_names({"strategy": rival}, folder, "--rivals")
    return tuple(dict.fromkeys((NONE, *config.policies, *(STATIC + rival for rival in config.rivals))))


def _points(sweep: Sweep, files: Sequence[Path], folder: Path) -> list[Point]:
    """Return all points; a point's key depends on its values, its trace and the user's code that it runs."""
    of_trace = {file.name: digests([file]) for file in files}
    of_code = {}
    for name in sweep.values_of(POLICY):
        setting = "strategy" if name.startswith(STATIC) else "policy"
        code = user_file(setting, name.removeprefix(STATIC), folder)
        of_code[name] = [] if code is None else digests([code])
    return [
        Point(number, digest_of([values, of_trace[values[TRACE]], of_code[values[POLICY]]]), values)
        for number, values in enumerate(combinations(sweep))
    ]
