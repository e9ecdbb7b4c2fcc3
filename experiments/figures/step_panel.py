"""How long each step took, all runs in one panel."""

from collections.abc import Sequence

from matplotlib.figure import SubFigure
from matplotlib.ticker import MaxNLocator

from experiments.figures.decision_marks import draw_marks, list_decisions, listed_inches, marks_over_steps
from experiments.figures.style import RunStyle
from experiments.figures.window import step_starts_s
from planner.backend import RunRecord
from planner.metrics import step_ends_s

# Points this many and fewer are marked one by one.
_MARKED_STEPS = 60


def step_times_s(record: RunRecord) -> list[float]:
    """Return the time from the end of one step to the end of the next, seconds; the first from its start."""
    ends_s = step_ends_s(record.events)
    return [end - begin for begin, end in zip([step_starts_s(record)[0], *ends_s], ends_s, strict=False)]


def steps_inches(records: Sequence[RunRecord]) -> float:
    """Return the height of the panel and of the list of decisions below it."""
    return 1.9 + listed_inches(records)


def draw_step_times(figure: SubFigure, records: Sequence[RunRecord], styles: Sequence[RunStyle]) -> None:
    """Draw step time over steps."""
    axes = figure.subplots()
    times_s = [step_times_s(record) for record in records]
    axes.set_xlim(-0.5, max(len(times) for times in times_s) - 0.5)
    for row, (record, times, style) in enumerate(zip(records, times_s, styles, strict=True)):
        axes.plot(
            range(len(times)),
            times,
            color=style.colour,
            linestyle=style.line,
            linewidth=1.3,
            marker="o" if len(times) <= _MARKED_STEPS else "",
            markersize=3,
            label=style.name,
        )
        draw_marks(axes, marks_over_steps(record), style, row)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.3)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step")
    axes.set_ylabel("step time (s)")
    axes.legend(loc="lower right", ncols=len(records))
    list_decisions(figure, records, styles)
