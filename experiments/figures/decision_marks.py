"""Decisions as numbered vertical lines, with a list that says what each one changed."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import SubFigure
from matplotlib.lines import Line2D

from experiments.figures.style import RunStyle
from planner.backend import RunRecord
from planner.events import EventKind

# Numbers closer together than this share of the panel's width would overlap.
_LEAST_GAP = 0.025
_LISTED = 6
_CHARACTERS = 66


@dataclass(frozen=True, slots=True)
class Mark:
    """One decision in a panel: its number in its run, and where it stands on the horizontal axis."""

    number: int
    position: float


def marks_over_time(record: RunRecord) -> list[Mark]:
    """Return the decisions by the seconds from the start of the run at which they were made."""
    times_s = {event.step: event.end_s for event in record.events if event.kind is EventKind.DECISION}
    return [
        Mark(number, times_s[decision.observed_step])
        for number, decision in enumerate(record.decisions, start=1)
        if decision.observed_step in times_s
    ]


def marks_over_steps(record: RunRecord) -> list[Mark]:
    """Return the decisions by the first step that runs the new plan."""
    return [Mark(number, decision.first_step) for number, decision in enumerate(record.decisions, start=1)]


def draw_marks(axes: Axes, marks: Sequence[Mark], style: RunStyle, row: int) -> None:
    """Draw a line for each decision, with its number above the panel where it has room.

    Args:
        axes: With its horizontal limits set.
        marks: From left to right.
        style: Of the run.
        row: Row of the numbers above the panel, a different one for each run.
    """
    left, right = axes.get_xlim()
    taken = float("-inf")
    for mark in marks:
        if not left <= mark.position <= right:
            continue
        axes.axvline(mark.position, color=style.colour, linestyle=(0, (4, 2)), linewidth=0.8, zorder=1.5)
        if mark.position - taken >= _LEAST_GAP * (right - left):
            axes.annotate(
                str(mark.number),
                (mark.position, 1),
                xycoords=("data", "axes fraction"),
                xytext=(0, 2 + 9 * row),
                textcoords="offset points",
                fontsize=7.5,
                fontweight="bold",
                color=style.colour,
                horizontalalignment="center",
            )
            taken = mark.position


def listed_inches(records: Sequence[RunRecord]) -> float:
    """Return the height of the list that `list_decisions` writes."""
    longest = max(len(_lines(record)) for record in records)
    return 0.17 * (longest + 1) + 0.1 if longest else 0.0


def list_decisions(figure: SubFigure, records: Sequence[RunRecord], styles: Sequence[RunStyle]) -> None:
    """Write under the panels what the numbered decisions changed."""
    lists = [(record, style) for record, style in zip(records, styles, strict=True) if record.decisions]
    if not lists:
        return
    texts = [_lines(record) for record, _ in lists]
    longest = max(len(lines) for lines in texts)
    handles = []
    for (_, style), lines in zip(lists, texts, strict=True):
        title = f"decisions, {style.name}"
        for text in [title, *lines, *[""] * (longest - len(lines))]:
            handles.append(Line2D([], [], linestyle="", label=text, color=style.colour))
    figure.legend(
        handles=handles,
        loc="outside lower left",
        ncols=len(lists),
        handlelength=0,
        handletextpad=0,
        labelcolor="linecolor",
        labelspacing=0.25,
        fontsize=8,
    )


def _lines(record: RunRecord) -> list[str]:
    width = _CHARACTERS
    lines = [
        textwrap.shorten(f"{number}  from step {decision.first_step}: {decision.change}", width, placeholder=" …")
        for number, decision in enumerate(record.decisions[:_LISTED], start=1)
    ]
    more = len(record.decisions) - _LISTED
    return [*lines, f"… and {more} more"] if more > 0 else lines
