"""The verb ``ropebridge backtest``: policies over recorded traces, against plans that never change."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import pyarrow.parquet as pq

from experiments.runs.console import aligned
from experiments.sweep.backtest.comparison import HEADS, PolicySummary, summaries, summary_cells
from experiments.sweep.backtest.definition import BacktestConfig, backtest_study
from experiments.sweep.driver import Result
from experiments.verbs import sweep


def backtest(
    config: BacktestConfig,
    folder: Path | None,
    engine: str,
    jobs: int | None,
    as_json: bool,
    failed_again: bool,
    tell: Callable[[str], None],
) -> str:
    """Carry out a backtest by `carry_out`; return what its policies gain as text or JSON."""
    result = carry_out(config, folder, engine, jobs, failed_again, tell)
    found = summaries(pq.read_table(result.table).to_pylist())
    if as_json:
        return json.dumps({**sweep.summary(result), "policies": list(map(asdict, found))})
    return f"{text_table(found)}\n{sweep.describe(result)}"


def carry_out(
    config: BacktestConfig,
    folder: Path | None,
    engine: str,
    jobs: int | None,
    failed_again: bool,
    tell: Callable[[str], None],
) -> Result:
    """Carry out a backtest, or the part of it that is not done yet.

    Args:
        config: The policies, traces and windows.
        folder: The folder for table and logs; None for ``backtests/SCENARIO``.
        engine: Name of the engine that carries out points.
        jobs: Number of points at a time; None for the number of this machine's cores.
        failed_again: Whether to carry out failed points again.
        tell: Called with lines about the progress.

    Raises:
        InputError: The backtest is not valid, or the folder holds anything but this backtest.
        RunError: Every point failed.
    """
    study = backtest_study(config)
    place = folder if folder is not None else Path("backtests") / Path(config.scenario).stem
    return sweep.carry_out_in(place, study, engine, jobs, failed_again, tell)


def text_table(found: Sequence[PolicySummary]) -> str:
    """Return the summaries of policies as a table, a line each."""
    return "\n".join(aligned([HEADS, *map(summary_cells, found)]))
