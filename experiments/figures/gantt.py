"""What each device did over time: a row per device, a bar per action."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection

from experiments.figures.naming import device_names
from experiments.figures.style import GREY, LIGHT_GREY, WORK_STYLES
from experiments.figures.window import step_starts_s
from planner.backend import RunRecord
from planner.events import Event, EventKind

_BAR_HEIGHT = 0.8
_WAIT_HEIGHT = 0.2
_TEXT_POINTS = 7.0
_STEP_LABEL_INCHES = 0.7


@dataclass(frozen=True, slots=True)
class GanttRows:
    """The events of one run that a Gantt panel shows.

    Attributes:
        devices: Device to its label, from top to bottom.
        steps: The first step and the one after the last.
        starts_s: When each of them began, seconds from the start of the first.
        work: Compute and gradient sums.
        waits: Receives that a device stood still for.
        origin_s: Start of the first step, seconds from the start of the run.
    """

    devices: Mapping[str, str]
    steps: tuple[int, int]
    starts_s: tuple[float, ...]
    work: tuple[Event, ...]
    waits: tuple[Event, ...]
    origin_s: float

    @property
    def span_s(self) -> float:
        """Seconds from the start of the first step to the end of the last work."""
        return max(event.end_s for event in self.work) - self.origin_s


def gantt_rows(record: RunRecord, steps: tuple[int, int]) -> GanttRows:
    """Return what a Gantt panel of these steps shows; the steps are the first and the one after the last."""
    first, end = steps
    starts_s = step_starts_s(record)[first:end]
    shown = [event for event in record.events if first <= event.step < end]
    return GanttRows(
        devices=device_names(record, first, end),
        steps=steps,
        starts_s=tuple(start_s - starts_s[0] for start_s in starts_s),
        work=tuple(event for event in shown if event.kind in (EventKind.COMPUTE, EventKind.SYNC)),
        waits=tuple(event for event in shown if event.kind is EventKind.RECEIVE),
        origin_s=starts_s[0],
    )


def draw_gantt(axes: Axes, rows: GanttRows, span_s: float) -> None:
    """Draw bars, waits and step starts over ``span_s`` seconds; `number_bars` comes after the layout."""
    axes.set_xlim(0, span_s)
    axes.set_ylim(len(rows.devices) - 0.5, -0.5)
    axes.set_yticks(range(len(rows.devices)), list(rows.devices.values()))
    axes.tick_params(axis="y", length=0)
    for start_s in rows.starts_s:
        axes.axvline(start_s, color=GREY, linewidth=0.8, zorder=0.5)
    if rows.waits:
        waits = _boxes(rows, rows.waits, _WAIT_HEIGHT)
        axes.add_collection(
            PolyCollection(waits, facecolors="white", edgecolors=GREY, linewidths=0.4, hatch="//////", label="wait")
        )
    for action in WORK_STYLES:
        events = [event for event in rows.work if event.action == action]
        if events:
            bars = _boxes(rows, events, _BAR_HEIGHT)
            colour = WORK_STYLES[action].colour
            axes.add_collection(
                PolyCollection(bars, facecolors=colour, edgecolors="white", linewidths=0.4, label=action)
            )


def number_bars(axes: Axes, rows: GanttRows) -> None:
    """Write microbatches into the bars that are wide enough, and the steps above the panel.

    The layout must be settled, since it decides on how wide a bar comes out.
    """
    figure = axes.get_figure(root=True)
    assert figure is not None
    extent = axes.get_window_extent()
    inches_per_s = extent.width / figure.dpi / axes.get_xlim()[1]
    bar_points = extent.height / figure.dpi * 72 / len(rows.devices) * _BAR_HEIGHT
    _label_steps(axes, rows, inches_per_s)
    if bar_points < _TEXT_POINTS:
        return
    row_of = {device: row for row, device in enumerate(rows.devices)}
    for event in rows.work:
        text = str(event.microbatch) if event.microbatch >= 0 else "sync"
        if 72 * inches_per_s * (event.end_s - event.start_s) > _TEXT_POINTS * 0.66 * len(text):
            axes.text(
                (event.start_s + event.end_s) / 2 - rows.origin_s,
                row_of[event.device],
                text,
                fontsize=_TEXT_POINTS,
                color=WORK_STYLES[event.action].text_colour,
                horizontalalignment="center",
                verticalalignment="center_baseline",
                clip_on=True,
            )


def _label_steps(axes: Axes, rows: GanttRows, inches_per_s: float) -> None:
    mean_inches = rows.span_s / len(rows.starts_s) * inches_per_s
    every = math.ceil(_STEP_LABEL_INCHES / mean_inches)
    for offset, start_s in list(enumerate(rows.starts_s))[::every]:
        axes.annotate(
            f"step {rows.steps[0] + offset}",
            (start_s, 1),
            xycoords=("data", "axes fraction"),
            xytext=(1, 2),
            textcoords="offset points",
            fontsize=7.5,
            color=GREY,
        )


def _boxes(rows: GanttRows, events: Sequence[Event], height: float) -> list[list[tuple[float, float]]]:
    row_of = {device: row for row, device in enumerate(rows.devices)}
    boxes = []
    for event in events:
        left, right = event.start_s - rows.origin_s, event.end_s - rows.origin_s
        top, bottom = row_of[event.device] - height / 2, row_of[event.device] + height / 2
        boxes.append([(left, top), (left, bottom), (right, bottom), (right, top)])
    return boxes
