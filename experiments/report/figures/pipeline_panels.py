"""The pipelines of several runs, one above the other, over the same steps and the same length of time."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import SubFigure
from matplotlib.patches import Patch

from experiments.report.data.drawn_run import DrawnRun
from experiments.report.data.gantt_rows import GanttRows
from experiments.report.data.style import LIGHT_GREY, WORK_STYLES
from experiments.report.figures.gantt import draw_gantt


def pipelines_inches(rows: Sequence[GanttRows]) -> float:
    """Return the height of all panels."""
    return sum(len(each.devices) * _row_inches(rows) + 0.5 for each in rows) + 0.7


def draw_pipelines(figure: SubFigure, runs: Sequence[DrawnRun], rows: Sequence[GanttRows]) -> list[Axes]:
    """Draw a panel for each run, with one legend above them; return the panels."""
    counts = [len(each.devices) for each in rows]
    grid = figure.subplots(len(rows), 1, squeeze=False, sharex=True, height_ratios=counts)
    panels: list[Axes] = list(grid[:, 0])
    span_s = max(each.span_s for each in rows)
    for axes, run, each in zip(panels, runs, rows, strict=True):
        draw_gantt(axes, each, span_s)
        axes.tick_params(axis="y", labelsize=min(8.0, 72 * _row_inches(rows) * 0.75))
        rate, idle = run.metrics.samples_per_s, run.metrics.bubble_ratio
        axes.set_title(
            f"{run.name}: {rate:,.4g} samples/s, devices idle {idle:.0%} of the run",
            loc="left",
            pad=14,
            fontweight="bold",
            color=run.colour,
        )
    panels[-1].set_xlabel("time since the start of the first step shown (s)")
    actions = {event.action for each in rows for event in each.work}
    handles = [Patch(color=kind.colour, label=kind.label) for action, kind in WORK_STYLES.items() if action in actions]
    handles.append(Patch(color=LIGHT_GREY, label="waiting for data"))
    figure.legend(
        handles=handles,
        title="a row per device, a bar per microbatch (numbered where there is room)",
        alignment="left",
        loc="outside upper left",
        ncols=len(handles),
    )
    return panels


def _row_inches(rows: Sequence[GanttRows]) -> float:
    return min(0.34, max(0.13, 3.0 / max(len(each.devices) for each in rows)))
