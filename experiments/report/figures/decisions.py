"""Draws decisions as numbered vertical lines, with a list of what each one changed."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import SubFigure
from matplotlib.lines import Line2D

from experiments.report.data.run_view import RunView

# Least distance between numbers that do not overlap, as a share of the panel's width.
_LEAST_GAP = 0.025
_LISTED = 6

# Most characters that fit side by side across the picture.
_CHARACTERS = 150


@dataclass(frozen=True, slots=True)
class Mark:
    """One decision in a panel: its ``number`` in the run, and ``position`` on the horizontal axis, seconds or steps."""

    number: int
    position: float


def marks_over_time(run: RunView) -> list[Mark]:
    """Return marks at the times of the decisions, seconds from the start of the run."""
    return [
        Mark(number, run.decisions_s[decision.observed_step])
        for number, decision in enumerate(run.record.decisions, start=1)
        if decision.observed_step in run.decisions_s
    ]


def marks_over_steps(run: RunView) -> list[Mark]:
    """Return marks at the first steps that run the decisions' new plans."""
    return [Mark(number, decision.first_step) for number, decision in enumerate(run.record.decisions, start=1)]


def draw_marks(axes: Axes, marks: Sequence[Mark], run: RunView, row: int) -> None:
    """Draw a line for each decision, with its number above the panel if there is room.

    The horizontal limits must be set already; ``row`` is the run's row of numbers above the panel.
    """
    left, right = axes.get_xlim()
    taken = float("-inf")
    for mark in marks:
        if not left <= mark.position <= right:
            continue
        axes.axvline(mark.position, color=run.colour, linestyle=(3 * row, (3, 3)), linewidth=0.8, zorder=1.5)
        if mark.position - taken >= _LEAST_GAP * (right - left):
            axes.annotate(
                str(mark.number),
                (mark.position, 1),
                xycoords=("data", "axes fraction"),
                xytext=(0, 2 + 9 * row),
                textcoords="offset points",
                fontsize=7.5,
                fontweight="bold",
                color=run.colour,
                horizontalalignment="center",
            )
            taken = mark.position


def listed_inches(runs: Sequence[RunView]) -> float:
    """Return the height of the list that `list_decisions` writes."""
    longest = max(len(_lines(run)) for run in runs)
    return 0.17 * (longest + 1) + 0.1 if longest else 0.0


def list_decisions(figure: SubFigure, runs: Sequence[RunView]) -> None:
    """Write a list of the changes by each numbered decision under the panels, a column for each run."""
    decided = [run for run in runs if run.record.decisions]
    if not decided:
        return
    columns = [_lines(run, _CHARACTERS // len(decided)) for run in decided]
    longest = max(map(len, columns))
    handles = []
    for run, lines in zip(decided, columns, strict=True):
        for text in (f"decisions, {run.name}", *lines, *[""] * (longest - len(lines))):
            handles.append(Line2D([], [], linestyle="", label=text, color=run.colour))
    figure.legend(
        handles=handles,
        loc="outside lower left",
        ncols=len(decided),
        handlelength=0,
        handletextpad=0,
        labelcolor="linecolor",
        labelspacing=0.25,
        fontsize=8,
    )


def _lines(run: RunView, width: int = _CHARACTERS) -> list[str]:
    decisions = run.record.decisions
    lines = []
    for number, decision in enumerate(decisions[:_LISTED], start=1):
        text = f"{number}  from step {decision.first_step}: {decision.change.replace('->', '→')}"
        lines.append(textwrap.shorten(text, width, placeholder=" …"))
    more = len(decisions) - _LISTED
    return [*lines, f"… and {more} more"] if more > 0 else lines
