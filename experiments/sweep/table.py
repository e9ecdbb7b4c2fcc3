"""The table of a sweep: a row for each finished point, a column for each parameter and metric."""

import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import TypeAdapter, ValidationError

from experiments.sweep.definition import PLAN, SETTINGS, Sweep
from experiments.sweep.outcomes import Outcome
from experiments.sweep.overrides import parse_path, quantity_at
from experiments.sweep.points import Point
from planner.files.parsing import Seconds
from planner.files.scenario import ScenarioEntry
from planner.runs.memory_timeline import peak_memory_bytes
from planner.runs.metrics import measure
from planner.runs.record import RunRecord
from traces.common.atomic import write_bytes_atomically

_INT64 = range(-(2**63), 2**63)


def described(sweep: Sweep) -> list[dict[str, Any]]:
    """Return the name, the kind, the values and the column to plot of each parameter, for ``sweep.json``."""
    return [
        {
            "name": parameter.name,
            "kind": parameter.kind,
            "values": list(parameter.values),
            "column": (_quantity_column(parameter.name) or (parameter.name, None))[0],
        }
        for parameter in sweep.parameters
    ]


def _quantity_column(name: str) -> tuple[str, Any] | None:
    """Return the name of a parameter's column in SI units, and the type of its values; None for plain values."""
    if name in SETTINGS:
        return ("duration_s", Seconds) if name == "duration" else None
    keys = parse_path(name, "")
    found = None if keys[0] == PLAN else quantity_at(ScenarioEntry, keys)
    return None if found is None else (name + found[1], found[0])


def _number(unit: Any, value: Any) -> float | None:
    """Convert text with a unit, or a number, to the SI unit; return None for any other value."""
    try:
        return float(TypeAdapter(unit).validate_python(value))
    except ValidationError:
        return None


Value = float | int | str

# Metrics of a whole run, in the order of the table's columns; metrics of single devices follow.
RUN_METRICS = (
    "step_s",
    "samples_per_s",
    "bubble_ratio",
    "utilisation",
    "wan_bytes",
    "cost_usd",
    "staleness",
    "peak_memory_bytes",
    "steps_done",
    "decisions",
    "plan_devices",
    "plan_pipelines",
    "plan_stages",
    "plan_microbatches",
)


def point_metrics(record: RunRecord) -> dict[str, Value]:
    """Return the metrics of a run by column, among them those of single devices, such as ``utilisation[NAME]``.

    ``utilisation`` is the mean over the devices, ``peak_memory_bytes`` the peak of the fullest device. Columns with the
    prefix ``plan_`` describe the first plan: its numbers of devices and of pipelines, of stages in its longest
    pipeline, and of all microbatches of a step.
    """
    metrics, memory_bytes = measure(record), peak_memory_bytes(record)
    pipelines = record.plan.pipelines
    values: dict[str, Value] = {
        **{name: value for name, value in asdict(metrics).items() if name in RUN_METRICS},
        "utilisation": fmean(metrics.utilisation.values()),
        "peak_memory_bytes": max(memory_bytes.values()),
        "steps_done": metrics.steps,
        "decisions": len(record.decisions),
        "plan_devices": len(record.plan.devices),
        "plan_pipelines": len(pipelines),
        "plan_stages": max(len(pipeline.stages) for pipeline in pipelines),
        "plan_microbatches": sum(len(pipeline.microbatches) for pipeline in pipelines),
    }
    values |= {f"utilisation[{device}]": value for device, value in metrics.utilisation.items()}
    values |= {f"peak_memory_bytes[{device}]": value for device, value in memory_bytes.items()}
    return {name: value for name, value in values.items() if not isinstance(value, float) or math.isfinite(value)}


# Further columns. Only WALL, the seconds that a point took, differs when a sweep is repeated.
POINT, STATUS, ERROR, WALL = "point", "status", "error", "wall_s"


def write_table(
    path: Path, sweep: Sweep, points: Sequence[Point], outcomes: Mapping[str, Outcome], metrics: Sequence[str]
) -> list[str]:
    """Write the rows of the finished points in order; return the names of the metrics' columns, ``metrics`` first.

    Columns: `POINT`, the parameters, `STATUS`, `ERROR` (null for successful points), the metrics (null for failed
    points), `WALL`. A parameter of quantities has two columns: as written, and in SI units with the unit in its name.
    """
    done = [(point, outcomes[point.key]) for point in points if point.key in outcomes]
    numbers = pa.array([point.number for point, _ in done], pa.int64())
    columns: dict[str, Any] = {POINT: numbers}
    for parameter in sweep.parameters:
        # A column's type is derived from all points, so that it does not depend on which points are done.
        values = [point.values[parameter.name] for point in points]
        columns[parameter.name] = _array(values).take(numbers)
        if (quantity := _quantity_column(parameter.name)) is not None:
            name, unit = quantity
            columns[name] = pa.array([_number(unit, value) for value in values], pa.float64()).take(numbers)
    columns[STATUS] = pa.array([outcome.status for _, outcome in done], pa.string())
    columns[ERROR] = pa.array([outcome.error or None for _, outcome in done], pa.string())
    names = list(dict.fromkeys([*metrics, *(name for _, outcome in done for name in outcome.metrics)]))
    for name in names:
        columns[name] = _array([outcome.metrics.get(name) for _, outcome in done])
    columns[WALL] = pa.array([outcome.wall_s for _, outcome in done], pa.float64())
    text = io.BytesIO()
    pq.write_table(pa.table(columns), text)
    write_bytes_atomically(path, text.getvalue())
    return names


def _array(values: Sequence[Any]) -> pa.Array:
    """Return the values of a column as an array of one type: integers, floats, booleans or text.

    Mixed types and integers of more than 64 bits become JSON text. None becomes null; a column of nulls has floats.
    """
    kinds = {type(value) for value in values if value is not None}
    fit = all(value in _INT64 for value in values if isinstance(value, int))
    if not kinds or (kinds == {int, float} and fit):
        return pa.array([None if value is None else float(value) for value in values], pa.float64())
    if len(kinds) == 1 and not kinds & {dict, list, tuple} and fit:
        return pa.array(values)
    return pa.array([None if value is None else json.dumps(value, sort_keys=True) for value in values])
