"""Draws capacity and traffic of the links between regions over the whole run for a page, a panel per direction."""

from collections.abc import Sequence

import numpy as np
from bokeh.models import BoxAnnotation, ColumnDataSource, HoverTool, Range1d
from bokeh.plotting import figure

from experiments.report.data.labels import VERMILLION, rate_unit
from experiments.report.data.link_rates import capacity_bps, mean_use, used_bps
from experiments.report.data.run_view import RunView, shown_links
from experiments.report.html.document import CAPACITY, WINDOW, bokeh_dash, hover, panel
from planner.events.event import OUT, EventKind
from planner.events.log import as_log
from planner.scenario.cluster import Link
from traces.trace import FloatArray

MOST_PAIRS = 8
_PIECES = 400
_HEIGHT_PIXELS = 190


def link_panels(runs: Sequence[RunView], chosen: Range1d, left_pixels: int) -> list[figure]:
    """Return a panel for each link with much traffic; each marks ``chosen``, the window of the Gantt chart."""
    links = shown_links(runs, MOST_PAIRS)
    span_s = max(run.end_s for run in runs)
    whole = Range1d(0, span_s, bounds=(0, span_s))
    if not links:
        return []
    unit = rate_unit(max(float(capacity_bps(link, span_s)[1].max()) for link in links))
    return [
        _link_panel(f"link-{number}", link, runs, whole, chosen, left_pixels, unit) for number, link in enumerate(links)
    ]


def mean_over_s(runs: Sequence[RunView]) -> float:
    """Return the length of the intervals over which used rates are averaged, seconds: a step, or more in a long run."""
    span_s = max(run.end_s for run in runs)
    return max(span_s / _PIECES, *(run.metrics.step_s for run in runs))


def _link_panel(
    name: str,
    link: Link,
    runs: Sequence[RunView],
    whole: Range1d,
    chosen: Range1d,
    left_pixels: int,
    unit: tuple[str, float],
) -> figure:
    uses = ", ".join(
        f"{mean_use(link, run.traffic[link.name], run.end_s):.0%} ({run.name})"
        for run in runs
        if link.name in run.traffic
    )
    title = f"{link.source} → {link.target}: used {uses}"
    labels = ("time since the start of the run (s)", unit[0])
    made = panel(name, _HEIGHT_PIXELS, left_pixels, x_range=whole, title=title, labels=labels, ticks=4)
    edges_s, capacity = capacity_bps(link, float(whole.end))
    steps_s, rates = np.append(edges_s[:-1], edges_s[-1]), np.append(capacity, capacity[-1])
    made.varea_step(x=steps_s, y1=0, y2=rates / unit[1], step_mode="after", fill_color=CAPACITY)
    made.step(x=steps_s, y=rates / unit[1], mode="after", line_color="#8A97A6", line_width=1)
    pieces = _pieces(link, runs, float(whole.end), unit[1])
    for run in runs:
        if link.name in run.traffic:
            own_s = _edges_s(runs, run.end_s)
            used = used_bps(run.traffic[link.name], own_s) / unit[1]
            look = {"line_color": run.colour, "line_dash": bokeh_dash(run.line), "line_width": 1.8}
            made.step(x=own_s, y=np.append(used, used[-1]), mode="after", **look)
    _draw_outages(made, link, runs)
    made.add_layout(_window(chosen))
    made.add_tools(_hover(made, pieces, link, runs, unit[0]))
    return made


def _pieces(link: Link, runs: Sequence[RunView], span_s: float, scale: float) -> ColumnDataSource:
    """Return the link's capacity and its used rate in each run, in equal intervals; NaN after a run's end."""
    edges_s = _edges_s(runs, span_s)
    columns: dict[str, FloatArray] = {"start_s": edges_s[:-1], "end_s": edges_s[1:]}
    if link.trace is None:
        columns["capacity"] = np.full(len(edges_s) - 1, link.bandwidth_bps / scale)
    else:
        columns["capacity"] = link.trace.bits_between(edges_s[:-1], edges_s[1:]) / np.diff(edges_s) / scale
    for run in runs:
        if link.name in run.traffic:
            used = used_bps(run.traffic[link.name], edges_s) / scale
            columns[f"used_{run.index}"] = np.where(edges_s[:-1] < run.end_s, used, np.nan)
    return ColumnDataSource(columns)


def _edges_s(runs: Sequence[RunView], end_s: float) -> FloatArray:
    return np.linspace(0.0, end_s, max(1, round(end_s / mean_over_s(runs))) + 1)


def _draw_outages(made: figure, link: Link, runs: Sequence[RunView]) -> None:
    for run in runs:
        log = as_log(run.record.events)
        for event in log.take(np.flatnonzero(log.is_a(EventKind.FAULT))):
            if event.action == OUT and (event.device, event.peer) == (link.source, link.target):
                look = {"fill_color": VERMILLION, "fill_alpha": 0.2, "line_color": None}
                made.add_layout(BoxAnnotation(left=event.start_s, right=event.end_s, **look))


def _window(chosen: Range1d) -> BoxAnnotation:
    box = BoxAnnotation(
        left=chosen.start, right=chosen.end, fill_color=WINDOW, fill_alpha=0.1, line_color=WINDOW, line_alpha=0.5
    )
    chosen.js_link("start", box, "left")
    chosen.js_link("end", box, "right")
    return box


def _hover(made: figure, pieces: ColumnDataSource, link: Link, runs: Sequence[RunView], unit: str) -> HoverTool:
    """Return a tooltip with capacity and traffic of the interval under the pointer, at any height."""
    ground = made.quad(
        left="start_s", right="end_s", bottom=0, top="capacity", fill_alpha=0, line_color=None, source=pieces
    )
    used = {f"used, {run.name}": f"@used_{run.index}{{0.0[00]}} {unit}" for run in runs if link.name in run.traffic}
    time, capacity = "@start_s{0.00} s to @end_s{0.00} s", f"@capacity{{0.0[00]}} {unit}"
    shown = {"time": time, "could carry": capacity, **used}
    return hover(ground, shown, mode="vline", point_policy="follow_mouse")
