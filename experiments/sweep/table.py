"""The table of a sweep: a row for each point, a column for each parameter and metric."""

import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from experiments.sweep.columns import ParameterColumns, columns_of, typed
from experiments.sweep.definition import Sweep
from experiments.sweep.outcomes import Outcome
from experiments.sweep.point_metrics import RUN_METRICS
from experiments.sweep.points import Point
from traces.common.atomic import write_bytes_atomically

# Beside parameters and metrics. What a point took is the only column that differs from one time to the next.
POINT, STATUS, ERROR, WALL = "point", "status", "error", "wall_s"


def write_table(path: Path, sweep: Sweep, points: Sequence[Point], outcomes: Mapping[str, Outcome]) -> list[str]:
    """Write the rows of the points that are done, in their order; return the names of the metrics' columns.

    Columns: `POINT`, the parameters, `STATUS`, `ERROR` (null where all went well), the metrics (null where it did not),
    `WALL`. A parameter whose values are quantities has two: as written, and in SI units with the unit in its name.
    """
    done = [(point, outcomes[point.key]) for point in points if point.key in outcomes]
    numbers = pa.array([point.number for point, _ in done], pa.int64())
    columns: dict[str, Any] = {POINT: numbers}
    for parameter in sweep.parameters:
        # Types are those of all points: they are the same however many of them are done.
        for name, column in _parameter(columns_of(parameter), [point.values[parameter.name] for point in points]):
            columns[name] = column.take(numbers)
    columns[STATUS] = pa.array([outcome.status for _, outcome in done], pa.string())
    columns[ERROR] = pa.array([outcome.error or None for _, outcome in done], pa.string())
    names = _metric_names([outcome for _, outcome in done])
    for name in names:
        columns[name] = _array([outcome.metrics.get(name) for _, outcome in done])
    columns[WALL] = pa.array([outcome.wall_s for _, outcome in done], pa.float64())
    text = io.BytesIO()
    pq.write_table(pa.table(columns), text)
    write_bytes_atomically(path, text.getvalue())
    return names


def read_table(path: Path) -> pa.Table:
    """Return a table that `write_table` wrote."""
    return pq.read_table(path)


def _parameter(columns: ParameterColumns, values: Sequence[Any]) -> Iterator[tuple[str, pa.Array]]:
    yield columns.name, _array(values)
    if columns.numbers:
        yield columns.numbers, pa.array([columns.number(value) for value in values], pa.float64())


def _array(values: Sequence[Any]) -> pa.Array:
    """A column without any value is one of numbers."""
    return pa.array(typed(values), pa.float64() if all(value is None for value in values) else None)


def _metric_names(outcomes: Sequence[Outcome]) -> list[str]:
    """Those of runs first, then those of devices, as they come up."""
    found = dict.fromkeys(name for outcome in outcomes for name in outcome.metrics)
    return [*RUN_METRICS, *(name for name in found if name not in RUN_METRICS)]
