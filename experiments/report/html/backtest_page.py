"""Writes the page of a backtest: what each policy gains, where it loses most, and the gains of every window."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from bokeh.models import ColumnDataSource, DataRange1d, Range1d
from bokeh.plotting import figure

from experiments.report.data.labels import COLOURS, GREY, LIGHT_GREY
from experiments.report.data.sweep_points import SweptTable
from experiments.report.html.document import document, hover, panel
from experiments.sweep.backtest.comparison import BOUNDS, HEADS, PolicySummary, summaries, summary_cells
from experiments.sweep.backtest.task import NONE, POLICY, START, STATIC, TRACE
from traces.common.atomic import write_text_atomically
from traces.common.errors import InputError
from traces.common.units import number_text

_LEFT_PIXELS = 60
_MOST_FAILURES = 50

# Colours of `BOUNDS` in the chart.
_BOUND_COLOURS = (GREY, LIGHT_GREY)


def write_backtest_page(table: SweptTable, path: Path) -> None:
    """Write a backtest as one HTML file.

    Raises:
        InputError: No window was finished by all its runs.
    """
    write_text_atomically(path, backtest_page(table))


def backtest_page(table: SweptTable) -> str:
    """Return the page of a backtest as HTML."""
    windows = [list(own) for _, own in groupby(table.rows, key=lambda row: (row[TRACE], row[START]))]
    compared = [own for own in windows if any(row.get("gain") is not None for row in own)]
    found = summaries(table.rows)
    if not found:
        raise InputError("no window can be compared", where=table.name, valid="look at the column 'error' of its table")
    policies = [each.policy for each in found if each.policy not in BOUNDS and each.policy != NONE]
    failures = [(row["point"], row["error"]) for row in table.rows if row["status"] != "ok"]
    return document(
        "backtest.html",
        None,
        "{}",
        {"gains": _gains_figure(compared, policies)},
        title=table.name,
        facts=[f"{len(compared)} windows", f"{len({own[0][TRACE] for own in compared})} traces", *table.settings],
        verdict=_verdict(found),
        heads=HEADS,
        rows=list(map(summary_cells, found)),
        window_heads=("trace", "start s", NONE, "best static", "which", "known ahead", *policies),
        window_rows=[_window_cells(own, policies) for own in compared],
        failures=failures[:_MOST_FAILURES],
        failure_count=len(failures),
        point_count=len(table.rows),
    )


def _verdict(found: Sequence[PolicySummary]) -> str:
    """Return a sentence on the policy with the highest mean gain."""
    best = max((each for each in found if each.policy not in BOUNDS), key=lambda each: each.gain)
    if best.policy == NONE:
        return "No policy gains anything over the plan with which it begins."
    return (
        f"Best policy: {best.policy}, {best.gain:.3f} times the throughput of the plan with which it begins, "
        f"{best.least_gain:.3f} times in its worst window ({best.worst_trace} at {number_text(best.worst_start_s)} s)."
    )


def _window_cells(rows: Sequence[Mapping[str, Any]], policies: Sequence[str]) -> tuple[str, ...]:
    """Return the texts of one window: rates in samples/s, then each policy's gain, changes and time lost."""
    by_policy = {row[POLICY]: row for row in rows}
    first = next(row for row in rows if row.get("gain") is not None)
    cells = [
        str(first[TRACE]),
        number_text(first[START]),
        f"{first['none_per_s']:.4g}",
        f"{first['best_static_per_s']:.4g}",
        str(first["best_static"]).removeprefix(STATIC),
        f"{first['known_ahead_per_s']:.4g}",
    ]
    for policy in policies:
        row = by_policy.get(policy, {})
        gain = row.get("gain")
        cells.append("failed" if gain is None else f"{gain:.3f} ({row['changes']:g} changes, {row['lost_s']:.0f} s)")
    return tuple(cells)


def _gains_figure(windows: Sequence[Sequence[Mapping[str, Any]]], policies: Sequence[str]) -> figure:
    """Return the chart of gains, with a column of marks for each window."""
    made = panel(
        "gains",
        360,
        _LEFT_PIXELS,
        x_range=Range1d(-0.5, len(windows) - 0.5),
        y_range=DataRange1d(range_padding=0.1),
        labels=("window, in the order of the table", "gain"),
    )
    made.line([-0.5, len(windows) - 0.5], [1.0, 1.0], line_color=GREY, line_dash="dashed")
    for (name, column), colour in zip(BOUNDS.items(), _BOUND_COLOURS, strict=True):
        marks = [
            (place, own[0], first[column] / first["none_per_s"])
            for place, own in enumerate(windows)
            for first in [next(row for row in own if row.get("gain") is not None)]
        ]
        drawn = made.scatter(
            "x", "gain", source=_source(name, marks), marker="dash", size=22, color=colour, line_width=4,
            legend_label=name,
        )  # fmt: skip
        made.add_tools(hover(drawn, _HOVERED))
    for number, policy in enumerate(policies):
        rows = [(place, row) for place, own in enumerate(windows) for row in own if row[POLICY] == policy]
        marks = [(place, row, row["gain"]) for place, row in rows if row.get("gain") is not None]
        colour = COLOURS[number % len(COLOURS)]
        drawn = made.scatter("x", "gain", source=_source(policy, marks), size=9, color=colour, legend_label=policy)
        made.add_tools(hover(drawn, _HOVERED))
    made.legend.orientation = "horizontal"
    made.add_layout(made.legend[0], "above")
    return made


_HOVERED = {"trace": "@trace", "start": "@start s", "of": "@name", "gain": "@gain{0.000}"}


def _source(name: str, marks: Sequence[tuple[int, Mapping[str, Any], float]]) -> ColumnDataSource:
    return ColumnDataSource(
        {
            "x": [place for place, _, _ in marks],
            "gain": [gain for _, _, gain in marks],
            "trace": [row[TRACE] for _, row, _ in marks],
            "start": [number_text(row[START]) for _, row, _ in marks],
            "name": [name] * len(marks),
        }
    )
