"""Reads the points of a sweep from its folder and prepares them for drawing; loads no Bokeh."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
from numpy.typing import NDArray

from experiments.sweep.folder import SWEEP, TABLE
from planner.files.documents import read_json
from traces.common.errors import InputError
from traces.trace import FloatArray

# A parameter with more different numbers than _MOST_LABELS is drawn in _PIECES intervals.
_MOST_LABELS = 24
_PIECES = 10

# Maps a metric's column to its label with the unit shown, that unit in the column's unit, and whether more is better.
_METRICS: Mapping[str, tuple[str, float, bool]] = {
    "samples_per_s": ("throughput (samples/s)", 1.0, True),
    "step_s": ("step time (s)", 1.0, False),
    "bubble_ratio": ("idle share", 1.0, False),
    "utilisation": ("busy share", 1.0, True),
    "wan_bytes": ("sent between regions (MB)", 1e6, False),
    "cost_usd": ("cost (USD)", 1.0, False),
    "staleness": ("staleness (steps)", 1.0, False),
    "peak_memory_bytes": ("memory of the fullest device (GiB)", 2.0**30, False),
}


@dataclass(frozen=True, eq=False, slots=True)
class SweptParameter:
    """A parameter that differs between points.

    Attributes:
        name: Name in the sweep; for labels in SI units, name of the column with the unit.
        labels: The parameter's values, or intervals of its range, in order.
        code: Index of each point's label in ``labels``, shape (points,).
        texts: The exact value of each point as text, one per point.
    """

    name: str
    labels: tuple[str, ...]
    code: NDArray[np.int64]
    texts: tuple[str, ...]


@dataclass(frozen=True, eq=False, slots=True)
class SweptMetric:
    """A metric that differs between points.

    Attributes:
        label: Name of the metric with the unit.
        values: Values in this unit, shape (points,); NaN for points without a value.
        more_is_better: Whether larger values are better than smaller ones.
    """

    name: str
    label: str
    values: FloatArray
    more_is_better: bool


@dataclass(frozen=True, eq=False, slots=True)
class SweptPoints:
    """The points of a sweep that were carried out.

    Attributes:
        parameters: Parameters that differ between points.
        metrics: Metrics that differ between points, throughput first.
        numbers: Indices of the points that succeeded, as in the table.
        failures: Number and error of each point that failed.
        settings: Settings that all points have in common, as text.
    """

    name: str
    numbers: tuple[int, ...]
    parameters: tuple[SweptParameter, ...]
    metrics: tuple[SweptMetric, ...]
    failures: tuple[tuple[int, str], ...]
    settings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SweptTable:
    """The table of a sweep or backtest as it is.

    Attributes:
        kind: ``sweep`` or ``backtest``.
        rows: The rows in order, each by the names of its columns; None where a row has no value.
        settings: Settings that all points have in common, as text.
    """

    name: str
    kind: str
    rows: Sequence[Mapping[str, Any]]
    settings: tuple[str, ...]


def is_sweep(folder: Path) -> bool:
    """Return whether a folder holds a sweep or a backtest."""
    return (folder / TABLE).is_file()


def read_swept_table(folder: Path) -> SweptTable:
    """Return the table in a folder that ``ropebridge sweep`` or ``backtest`` wrote.

    Raises:
        InputError: The folder is damaged.
    """
    try:
        described = read_json(folder / SWEEP)
        if (folder / TABLE).exists() and not (folder / TABLE).is_file():
            raise ValueError(f"{TABLE} is no file")
        rows = pq.read_table(folder / TABLE).to_pylist()
        # Folders of earlier versions have no kind.
        return SweptTable(folder.resolve().name, described.get("kind", "sweep"), rows, _settings(described))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(folder, error) from None


def _settings(described: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(f"{key} {value}" for key, value in described["settings"].items())


def _damaged(folder: Path, error: Exception) -> InputError:
    return InputError(f"the sweep is damaged: {error}", where=str(folder), valid="sweep again")


def read_swept_points(folder: Path) -> SweptPoints:
    """Return the points in a folder that ``ropebridge sweep`` wrote.

    Raises:
        InputError: The folder is damaged, or there is nothing to draw.
    """
    try:
        described = read_json(folder / SWEEP)
        table = pd.read_parquet(folder / TABLE)
        return _swept_points(folder.resolve().name, table, described)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(folder, error) from None


def _swept_points(name: str, table: pd.DataFrame, described: Mapping[str, Any]) -> SweptPoints:
    failed = table[table["status"] != "ok"]
    done = table[table["status"] == "ok"]
    parameters = [_parameter(each, done) for each in described["parameters"]]
    columns = dict.fromkeys((*_METRICS, *described["metrics"]))
    metrics = [metric for metric in (_metric(column, done) for column in columns) if metric is not None]
    if done.empty or not metrics:
        raise InputError(
            "there is nothing to draw: all points failed, or all have the same results",
            where=name,
            valid="look at the column 'error' of its table",
        )
    return SweptPoints(
        name=name,
        numbers=tuple(done["point"].tolist()),
        parameters=tuple(each for each in parameters if len(each.labels) > 1),
        metrics=tuple(metrics),
        failures=tuple(zip(failed["point"].tolist(), map(str, failed["error"]), strict=True)),
        settings=_settings(described),
    )


def _parameter(described: Mapping[str, Any], table: pd.DataFrame) -> SweptParameter:
    name, column = described["name"], table[described["column"]]
    texts = tuple(str(value) for value in table[name])
    if not pd.api.types.is_numeric_dtype(column) or pd.api.types.is_bool_dtype(column):
        labels = tuple(dict.fromkeys(texts))
        # Labels have the order of the sweep file if the file lists the values.
        written = {str(value): place for place, value in enumerate(described["values"])}
        labels = tuple(sorted(labels, key=lambda label: written.get(label, len(written))))
        code = np.array([labels.index(text) for text in texts], np.int64)
        return SweptParameter(name, labels, code, texts)
    values = column.to_numpy(np.float64)
    known, code = np.unique(values, return_inverse=True)
    if len(known) <= _MOST_LABELS:
        first = {place: texts[index] for index, place in reversed(list(enumerate(code.tolist())))}
        return SweptParameter(name, tuple(first[place] for place in range(len(known))), code.astype(np.int64), texts)
    return _in_pieces(described["column"], values, texts, described["kind"] == "loguniform")


def _in_pieces(name: str, values: FloatArray, texts: tuple[str, ...], logarithmic: bool) -> SweptParameter:
    """Return the parameter with intervals as labels, which have equal widths or, if logarithmic, equal ratios."""
    spread = np.geomspace if logarithmic and values.min() > 0 else np.linspace
    edges = spread(values.min(), values.max(), _PIECES + 1)
    code = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, _PIECES - 1)
    labels = tuple(f"{left:.3g} to {right:.3g}" for left, right in pairwise(edges.tolist()))
    return SweptParameter(name, labels, code.astype(np.int64), texts)


def _metric(column: str, table: pd.DataFrame) -> SweptMetric | None:
    """Return the metric of a column; None for text, for a metric of one device, and if all points have one value."""
    if column not in table or "[" in column or not pd.api.types.is_numeric_dtype(table[column]):
        return None
    label, scale, more_is_better = _METRICS.get(column, (column.replace("_", " "), 1.0, False))
    values = table[column].to_numpy(np.float64) / scale
    if not np.isfinite(values).any() or np.nanmin(values) == np.nanmax(values):
        return None
    return SweptMetric(column, label, values, more_is_better)


def usual_choice(points: SweptPoints) -> tuple[SweptMetric, SweptMetric]:
    """Choose the two metrics whose trade-off is shown first: a cost, such as USD, and a benefit, such as throughput."""
    by_name = {metric.name: metric for metric in points.metrics}
    got = next((by_name[name] for name in ("samples_per_s", "step_s") if name in by_name), points.metrics[0])
    paid = ("cost_usd", "wan_bytes", "peak_memory_bytes", "bubble_ratio")
    return next((by_name[name] for name in paid if name in by_name), points.metrics[-1]), got


def heat(points: SweptPoints, x: SweptParameter | None, y: SweptParameter | None, metric: SweptMetric) -> FloatArray:
    """Return the median of a metric over all points with the same values of two parameters.

    Returns:
        The medians, shape (labels of ``y``, labels of ``x``); NaN for combinations without a point.
    """
    count = len(points.numbers)
    columns = x.code if x is not None else np.zeros(count, np.int64)
    rows = y.code if y is not None else np.zeros(count, np.int64)
    grid = np.full((len(y.labels) if y is not None else 1, len(x.labels) if x is not None else 1), np.nan)
    for row, column in {*zip(rows.tolist(), columns.tolist(), strict=True)}:
        own = metric.values[(rows == row) & (columns == column)]
        own = own[np.isfinite(own)]
        if len(own):
            grid[row, column] = np.median(own)
    return grid


def pareto_front(first: SweptMetric, second: SweptMetric) -> list[int]:
    """Return the indices of the Pareto-optimal points of two metrics, from the best in the first metric on."""
    worth = [metric.values * (1 if metric.more_is_better else -1) for metric in (first, second)]
    order = [
        point
        for point in np.lexsort((-worth[1], -worth[0])).tolist()
        if np.isfinite(worth[0][point]) and np.isfinite(worth[1][point])
    ]
    front: list[int] = []
    for point in order:
        better = not front or worth[1][point] > worth[1][front[-1]]
        if better or all(each[point] == each[front[-1]] for each in worth):
            front.append(point)
    return front


def varied(points: SweptPoints) -> Sequence[SweptParameter | None]:
    """Choose the axes of the heat map: the two parameters with the most values; None if there are fewer parameters."""
    by_count = sorted(points.parameters, key=lambda parameter: -len(parameter.labels))
    return (*by_count[:2], None, None)[:2]
