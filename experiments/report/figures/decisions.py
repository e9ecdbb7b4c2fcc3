"""Draws a policy's decisions as numbered vertical lines, and lists what each decision changed."""

import textwrap
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import SubFigure
from matplotlib.lines import Line2D

from experiments.report.data.run_view import RunView

# Least distance between numbers that do not overlap, as a share of the panel's width.
_LEAST_GAP = 0.025
_LISTED = 6

# Most characters that fit side by side across the picture.
_CHARACTERS = 150


def draw_decisions(axes: Axes, run: RunView, row: int, *, over_time: bool) -> None:
    """Draw a vertical line for each decision of a run, with the decision's number above the panel if there is room.

    The horizontal limits must be set already. The horizontal axis has seconds from the start of the run with
    ``over_time``, otherwise steps. Each run has a row of numbers above the panel.
    """
    left, right = axes.get_xlim()
    taken = float("-inf")
    for number, decision in enumerate(run.record.decisions, start=1):
        position = run.decisions_s.get(decision.observed_step) if over_time else decision.first_step
        if position is None or not left <= position <= right:
            continue
        axes.axvline(position, color=run.colour, linestyle=(3 * row, (3, 3)), linewidth=0.8, zorder=1.5)
        if position - taken >= _LEAST_GAP * (right - left):
            axes.annotate(
                str(number),
                (position, 1),
                xycoords=("data", "axes fraction"),
                xytext=(0, 2 + 9 * row),
                textcoords="offset points",
                fontsize=7.5,
                fontweight="bold",
                color=run.colour,
                horizontalalignment="center",
            )
            taken = position


def listed_inches(runs: Sequence[RunView]) -> float:
    """Return the height of the list that `list_decisions` writes, inches."""
    longest = max(len(_lines(run)) for run in runs)
    return 0.17 * (longest + 1) + 0.1 if longest else 0.0


def list_decisions(figure: SubFigure, runs: Sequence[RunView]) -> None:
    """List the numbered decisions and their changes of plan under the panels, a column for each run."""
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
