"""Draws a Gantt chart of the devices' work over time: a row per device, a bar per action."""

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection

from experiments.report.data.gantt_rows import GanttRows
from experiments.report.data.labels import GREY, LIGHT_GREY, WORK_STYLES
from planner.events.event import Event
from traces.trace import FloatArray

# Approximate width of a panel, points.
_PANEL_POINTS = 580.0

_BAR_HEIGHT = 0.8
_WAIT_HEIGHT = 0.2
_TEXT_POINTS = 7.0
_GLYPH_WIDTH = 0.65
_GAP_POINTS = 0.8


def draw_gantt(axes: Axes, rows: GanttRows, span_s: float) -> None:
    """Draw bars, waits and step starts over ``span_s`` seconds; call `number_bars` after the layout."""
    axes.set_xlim(0, 1.005 * span_s)
    axes.set_ylim(len(rows.devices) - 0.5, -0.5)
    axes.set_yticks(range(len(rows.devices)), list(rows.devices.values()))
    axes.tick_params(axis="y", length=0)
    for start_s in rows.starts_s:
        axes.axvline(start_s, color=GREY, linewidth=0.8, zorder=0.5)
    axes.add_collection(
        PolyCollection(list(_boxes(rows, rows.waits, _WAIT_HEIGHT)), facecolors=LIGHT_GREY, label="waiting")
    )
    # A gap at the end of each bar separates it from the next one; an edge keeps the shortest bars visible.
    gap_s = _GAP_POINTS / _PANEL_POINTS * span_s
    for action, style in WORK_STYLES.items():
        bars = _boxes(rows, [event for event in rows.work if event.action == action], _BAR_HEIGHT, gap_s)
        axes.add_collection(
            PolyCollection(
                list(bars), facecolors=style.colour, edgecolors=style.colour, linewidths=0.4, label=style.label
            )
        )


def number_bars(panels: Sequence[Axes], rows: Sequence[GanttRows]) -> None:
    """Write microbatch numbers into the bars of each kind that is wide enough, and step names above the panels.

    The figure's layout must be final, since it determines the width of bars.
    """
    figure = panels[0].get_figure(root=True)
    assert figure is not None
    extent = panels[0].get_window_extent()
    points_per_s = extent.width / figure.dpi * 72 / panels[0].get_xlim()[1]
    row_points = extent.height / figure.dpi * 72 / len(rows[0].devices)
    for axes, each in zip(panels, rows, strict=True):
        _label_steps(axes, each, points_per_s)
        computes = [event for event in each.work if event.microbatch >= 0]
        numbered = _roomy(computes, points_per_s) if row_points * _BAR_HEIGHT > _TEXT_POINTS else set()
        for event in computes:
            if (event.step, event.device, event.action) in numbered:
                _label_bar(axes, each, event)


def _roomy(computes: Sequence[Event], points_per_s: float) -> set[tuple[int, str, str]]:
    """Return each (step, device, action) of which 95 % of the bars are wide enough for their microbatch numbers."""
    rooms: defaultdict[tuple[int, str, str], list[float]] = defaultdict(list)
    for event in computes:
        room = points_per_s * (event.end_s - event.start_s) - _TEXT_POINTS * _GLYPH_WIDTH * len(str(event.microbatch))
        rooms[event.step, event.device, event.action].append(room)
    return {key for key, each in rooms.items() if sorted(each)[len(each) // 20] > 0}


def _label_bar(axes: Axes, rows: GanttRows, event: Event) -> None:
    axes.text(
        (event.start_s + event.end_s) / 2 - rows.origin_s,
        list(rows.devices).index(event.device),
        str(event.microbatch),
        fontsize=_TEXT_POINTS,
        color=WORK_STYLES[event.action].text_colour,
        horizontalalignment="center",
        verticalalignment="center_baseline",
    )


def _label_steps(axes: Axes, rows: GanttRows, points_per_s: float) -> None:
    needed_points = _TEXT_POINTS * _GLYPH_WIDTH * (max(map(len, rows.step_labels)) + 1)
    every = math.ceil(needed_points / (rows.span_s / len(rows.starts_s) * points_per_s))
    for label, start_s in list(zip(rows.step_labels, rows.starts_s, strict=True))[::every]:
        axes.annotate(
            label,
            (start_s, 1),
            xycoords=("data", "axes fraction"),
            xytext=(1, 2),
            textcoords="offset points",
            fontsize=_TEXT_POINTS,
            color=GREY,
        )


def _boxes(rows: GanttRows, events: Sequence[Event], height: float, gap_s: float = 0.0) -> FloatArray:
    """Return the corners of a box per event, shape (events, 4, 2), x and y; the gap takes at most a fifth of a box."""
    row_of = {device: row for row, device in enumerate(rows.devices)}
    left = np.array([event.start_s for event in events]) - rows.origin_s
    width = np.array([event.end_s - event.start_s for event in events])
    right = left + np.maximum(width - gap_s, 0.8 * width)
    middle = np.array([row_of[event.device] for event in events], dtype=np.float64)
    top, bottom = middle - height / 2, middle + height / 2
    corners = [(left, top), (left, bottom), (right, bottom), (right, top)]
    return np.stack([np.stack(corner, axis=-1) for corner in corners], axis=1)
