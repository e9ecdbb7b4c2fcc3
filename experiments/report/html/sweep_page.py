"""Writes the page of a sweep: heat maps of two parameters, trade-offs of two metrics."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from bokeh.models import ColorBar, ColumnDataSource, FactorRange, LinearColorMapper, Range1d
from bokeh.palettes import Cividis256
from bokeh.plotting import figure

from experiments.report.data.labels import BLUE, COLOURS, VERMILLION
from experiments.report.data.sweep_points import SweptMetric, SweptPoints, usual_choice, varied
from experiments.report.html.document import centred_text, document, hover
from traces.common.atomic import write_text_atomically

_MOST_FAILURES = 50


def write_sweep_page(points: SweptPoints, path: Path) -> None:
    """Write a sweep as one HTML file."""
    write_text_atomically(path, sweep_page(points))


def sweep_page(points: SweptPoints) -> str:
    """Return the page of a sweep as HTML."""
    across, down = (-1 if each is None else points.parameters.index(each) for each in varied(points))
    paid, got = usual_choice(points)
    few = [place for place, each in enumerate(points.parameters) if len(each.labels) <= len(COLOURS)]
    names = [(place, parameter.name) for place, parameter in enumerate(points.parameters)]
    failed, done = len(points.failures), len(points.numbers)
    return document(
        "sweep.html",
        "sweep.js",
        json.dumps(_known(points)),
        {"heat": _heat_figure(), "front": _front_figure()},
        title=points.name,
        facts=[f"{done} points", *([f"{failed} failed"] if failed else []), *points.settings],
        verdict=_verdict(points, got),
        parameter_options=[*names, (-1, "nothing")],
        metric_options=[(place, metric.label) for place, metric in enumerate(points.metrics)],
        kept_options=[
            (place, parameter.name, [(-1, "any"), *enumerate(parameter.labels)])
            for place, parameter in enumerate(points.parameters)
        ],
        first_x=across,
        first_y=down,
        first_metric=points.metrics.index(got),
        first_paid=points.metrics.index(paid),
        first_got=points.metrics.index(got),
        first_colour=few[0] if few else -1,
        failures=points.failures[:_MOST_FAILURES],
        failure_count=failed,
        point_count=failed + done,
    )


def _verdict(points: SweptPoints, metric: SweptMetric) -> str:
    """Return a sentence with the best value of a metric and the parameters of that point."""
    place = int((np.nanargmax if metric.more_is_better else np.nanargmin)(metric.values))
    values = ", ".join(f"{parameter.name} {parameter.texts[place]}" for parameter in points.parameters)
    return f"Best {metric.label}: {metric.values[place]:.4g}" + (f", with {values}." if values else ".")


def _known(points: SweptPoints) -> dict[str, Any]:
    return {
        "points": points.numbers,
        "parameters": [
            {"name": each.name, "labels": each.labels, "code": each.code.tolist(), "texts": each.texts}
            for each in points.parameters
        ],
        "metrics": [
            {
                "label": each.label,
                "values": [value if np.isfinite(value) else None for value in each.values.tolist()],
                "more_is_better": each.more_is_better,
            }
            for each in points.metrics
        ],
        "colours": COLOURS,
        "plain": BLUE,
    }


def _heat_figure() -> figure:
    """Return an empty heat map, which sweep.js fills."""
    made = figure(
        name="heat",
        height=420,
        sizing_mode="stretch_width",
        x_range=FactorRange(" "),
        y_range=FactorRange(" "),
        tools="",
        toolbar_location=None,
        min_border_left=90,
    )
    made.grid.grid_line_color = None
    made.axis.major_tick_line_color = None
    colours = LinearColorMapper(palette=Cividis256, name="heat-colours")
    cells = ColumnDataSource(_no_cells(), name="heat-cells")
    drawn = made.rect(
        x="x",
        y="y",
        width=1,
        height=1,
        fill_color={"field": "value", "transform": colours},
        line_color="white",
        source=cells,
    )
    centred_text(made, cells, "text_colour", 12)
    best = ColumnDataSource(_no_cells(), name="heat-best")
    made.rect(x="x", y="y", width=1, height=1, fill_color=None, line_color=VERMILLION, line_width=3, source=best)
    made.add_layout(ColorBar(color_mapper=colours, name="heat-bar", width=12, title=""), "right")
    shown = {"across": "@x", "down": "@y", "median": "@value{0.000000}", "span": "@span", "points": "@points"}
    made.add_tools(hover(drawn, shown))
    return made


def _no_cells() -> dict[str, list[Any]]:
    return {name: [] for name in ("x", "y", "value", "text", "text_colour", "points", "span")}


def _front_figure() -> figure:
    """Return an empty scatter plot, which sweep.js fills."""
    made = figure(
        name="front",
        height=420,
        sizing_mode="stretch_width",
        x_range=Range1d(0, 1),
        y_range=Range1d(0, 1),
        tools="pan,box_zoom,reset",
        toolbar_location="right",
        min_border_left=90,
    )
    made.toolbar.logo = None
    points = ColumnDataSource({name: [] for name in ("x", "y", "colour", "point", "values")}, name="front-points")
    front = ColumnDataSource({name: [] for name in ("x", "y", "colour")}, name="front-line")
    made.step(x="x", y="y", mode="after", line_color="#52606D", line_dash="dashed", source=front)
    drawn = made.scatter(x="x", y="y", size=7, fill_color="colour", line_color="white", alpha=0.75, source=points)
    made.scatter(x="x", y="y", size=11, fill_color="colour", line_color="black", line_width=1.5, source=front)
    values = '<span style="white-space:pre-line">@values</span>'
    made.add_tools(hover(drawn, {"point": "@point", "with": values, "across": "@x{0.000000}", "up": "@y{0.000000}"}))
    return made
