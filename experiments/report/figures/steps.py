"""How long each step took, all runs in one panel."""

from collections.abc import Sequence

from matplotlib.figure import SubFigure
from matplotlib.ticker import MaxNLocator

from experiments.report.data.drawn_run import DrawnRun
from experiments.report.data.style import legend_columns
from experiments.report.figures.decisions import draw_marks, list_decisions, listed_inches, marks_over_steps

# Points this many and fewer are marked one by one.
_MARKED_STEPS = 60


def steps_inches(runs: Sequence[DrawnRun]) -> float:
    """Return the height of the panel and of the list of decisions below it."""
    return 2.1 + listed_inches(runs)


def draw_step_times(figure: SubFigure, runs: Sequence[DrawnRun]) -> None:
    """Draw step time over steps."""
    axes = figure.subplots()
    first, end = min(run.first_step for run in runs), max(run.end_step for run in runs)
    axes.set_xlim(first - 0.5, end - 0.5)
    for run in runs:
        axes.plot(
            range(run.first_step, run.first_step + len(run.ends_s)),
            run.step_times_s,
            color=run.colour,
            linestyle=run.line,
            linewidth=1.3,
            marker="o" if end - first <= _MARKED_STEPS else "",
            markersize=3,
            label=run.name,
        )
    for row, run in enumerate(run for run in runs if run.record.decisions):
        draw_marks(axes, marks_over_steps(run), run, row)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.3)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step")
    axes.set_ylabel("step time (s)")
    columns = legend_columns(run.name for run in runs)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=columns)
    list_decisions(figure, runs)
