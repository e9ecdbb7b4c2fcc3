"""Draws the memory of each device over the run: a panel per run, all with the same scale."""

from collections.abc import Sequence

import numpy as np
from bokeh.models import ColumnDataSource, Legend, LegendItem, Range1d
from bokeh.plotting import figure

from experiments.report.data.labels import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILLION, memory_text
from experiments.report.data.run_view import RunView
from experiments.report.html.document import hover, panel
from planner.runs.memory_timeline import MemoryTimeline
from traces.trace import FloatArray

_PIECES = 300
_HEIGHT_PIXELS = 250

# If there are more devices than colours, all have the same colour except the fullest one.
_COLOURS = (BLUE, ORANGE, GREEN, VERMILLION, PURPLE, SKY, BLACK)


def memory_panels(runs: Sequence[RunView], left_pixels: int) -> list[figure]:
    """Return a panel for each run."""
    largest = max(peak for run in runs for peak in run.peak_bytes.values())
    unit, scale = ("GiB", 2.0**30) if largest >= 2**30 else ("MiB", 2.0**20)
    span_s = max(run.end_s for run in runs)
    time, height = Range1d(0, span_s, bounds=(0, span_s)), Range1d(0, 1.08 * largest / scale)
    return [_memory_panel(run, time, height, left_pixels, (unit, scale)) for run in runs]


def most_held_bytes(timeline: MemoryTimeline, edges_s: FloatArray) -> FloatArray:
    """Return the most bytes that a device held in each interval between neighbouring edges, shape (intervals,)."""
    at_edge = np.maximum(np.searchsorted(timeline.times_s, edges_s, side="right") - 1, 0)
    most = timeline.held_bytes[at_edge[:-1]].copy()
    within = (timeline.times_s >= edges_s[0]) & (timeline.times_s < edges_s[-1])
    piece = np.searchsorted(edges_s, timeline.times_s[within], side="right") - 1
    np.maximum.at(most, piece, timeline.held_bytes[within])
    return np.asarray(most, np.float64)


def _memory_panel(run: RunView, time: Range1d, height: Range1d, left_pixels: int, unit: tuple[str, float]) -> figure:
    name, labels = f"memory-{run.index}", ("time since the start of the run (s)", f"held ({unit[0]})")
    made = panel(
        name, _HEIGHT_PIXELS, left_pixels, x_range=time, y_range=height, title=run.name, labels=labels, ticks=5
    )
    edges_s: FloatArray = np.linspace(0.0, run.end_s, _PIECES + 1)
    timelines, peaks = run.memory, run.peak_bytes
    names = list(timelines)
    fullest = max(names, key=lambda name: peaks[name])
    few = len(names) <= len(_COLOURS)
    by_name = run.record.scenario.cluster.by_name
    colours = [_COLOURS[place] if few else (BLUE if name == fullest else GREY) for place, name in enumerate(names)]
    most = [most_held_bytes(timelines[name], edges_s) for name in names]
    source = ColumnDataSource(
        {
            "time_s": [np.repeat(edges_s, 2)[1:-1] for _ in names],
            "held": [np.repeat(each / unit[1], 2) for each in most],
            "device": names,
            "peak": [memory_text(peaks[name]) for name in names],
            "capacity": [memory_text(by_name[name].memory_bytes) for name in names],
            "colour": colours,
            "alpha": [1.0 if few or name == fullest else 0.35 for name in names],
        }
    )
    lines = made.multi_line(
        xs="time_s",
        ys="held",
        line_color="colour",
        line_alpha="alpha",
        line_width=1.5,
        hover_line_width=3,
        hover_line_alpha=1,
        source=source,
    )
    made.add_tools(hover(lines, {"device": "@device", "at most": "@peak", "has": "@capacity"}))
    shown = names if few else [fullest]
    items = [LegendItem(label=name, renderers=[lines], index=names.index(name)) for name in shown]
    made.add_layout(Legend(items=items, orientation="horizontal", ncols=4 if few else 1), "above")
    return made
