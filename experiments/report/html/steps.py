"""Draws two panels: the step times of all runs, and the losses of all runs."""

import math
from collections.abc import Sequence

import numpy as np
from bokeh.models import ColumnDataSource, Range1d, TapTool
from bokeh.plotting import figure

from experiments.report.data.labels import plan_at
from experiments.report.data.run_view import RunView
from experiments.report.html.document import bokeh_dash, hover, panel

_HEIGHT_PIXELS = 230

# Most steps for which the points of the line get large markers.
_MARKED_STEPS = 150


def step_axis(runs: Sequence[RunView]) -> Range1d:
    """Return the horizontal range, in steps, that the panels of step times and losses share."""
    first = min(run.first_step for run in runs)
    end = max(run.end_step for run in runs)
    return Range1d(first - 0.5, end - 0.5, bounds=(first - 0.5, end - 0.5))


def step_panel(runs: Sequence[RunView], steps: Range1d, left_pixels: int) -> figure:
    """Return the panel of step times, which marks each decision at the first step with its plan."""
    labels = ("step", "step time (s)")
    made = panel("steps", _HEIGHT_PIXELS, left_pixels, x_range=steps, labels=labels, ticks=5)
    marked = steps.end - steps.start <= _MARKED_STEPS
    longest_s = max(float(np.max(run.step_times_s)) for run in runs)
    points = []
    for run in runs:
        source = ColumnDataSource(_step_columns(run), name=f"steps-{run.index}")
        look = {"color": run.colour, "source": source}
        made.line(x="step", y="time_s", line_width=1.6, line_dash=bokeh_dash(run.line), **look)
        size = 6 if marked else 4
        points.append(made.scatter(x="step", y="time_s", size=size, nonselection_alpha=1.0, **look))
    shown = {
        "run": "@run",
        "step": "@step",
        "took": "@time_s{0.0000} s",
        "rate": "@rate{0.0} samples/s",
        "microbatches": "@microbatches",
        "": "click to see its pipeline",
    }
    made.add_tools(TapTool(renderers=points), hover(points, shown))
    for row, run in enumerate(run for run in runs if run.record.decisions):
        _draw_decisions(made, run, longest_s * (1.08 + 0.08 * row))
    return made


def loss_panel(runs: Sequence[RunView], steps: Range1d, left_pixels: int) -> figure | None:
    """Return the panel of losses; None if no run has trained."""
    trained = [run for run in runs if run.record.losses]
    if not trained:
        return None
    losses = [loss for run in trained for loss in run.record.losses if math.isfinite(loss)] or [0.0]
    room = 0.08 * (max(losses) - min(losses)) or 0.5
    heights = Range1d(min(losses) - room, max(losses) + room)
    labels = ("step", "loss")
    made = panel("loss", _HEIGHT_PIXELS, left_pixels, x_range=steps, y_range=heights, labels=labels, ticks=5)
    lines = []
    for run in trained:
        own = run.record.losses
        where = run.first_step + len(run.ends_s) - len(own)
        source = ColumnDataSource(
            {"step": [where + index for index in range(len(own))], "loss": own, "run": [run.name] * len(own)}
        )
        look = {"color": run.colour, "source": source}
        made.line(x="step", y="loss", line_width=1.6, line_dash=bokeh_dash(run.line), **look)
        lines.append(made.scatter(x="step", y="loss", size=5, **look))
    made.add_tools(hover(lines, {"run": "@run", "step": "@step", "loss": "@loss{0.0000}"}))
    return made


def _step_columns(run: RunView) -> dict[str, object]:
    steps = list(range(run.first_step, run.first_step + len(run.step_times_s)))
    plans = [plan_at(run.record, step) for step in steps]
    return {
        "step": steps,
        "time_s": run.step_times_s,
        "run": [run.name] * len(steps),
        "rate": [plan.global_batch / time_s for plan, time_s in zip(plans, run.step_times_s, strict=True)],
        "microbatches": [" / ".join(str(len(each.microbatches)) for each in plan.pipelines[:4]) for plan in plans],
    }


def _draw_decisions(made: figure, run: RunView, height_s: float) -> None:
    """Draw triangles above the lines, with tooltips that describe the decisions."""
    decisions = run.record.decisions
    source = ColumnDataSource(
        {
            "step": [decision.first_step for decision in decisions],
            "height_s": [height_s] * len(decisions),
            "number": [str(number) for number in range(1, len(decisions) + 1)],
            "change": [decision.change.replace("->", "→") for decision in decisions],
            "run": [run.name] * len(decisions),
        }
    )
    marks = made.scatter(x="step", y="height_s", marker="inverted_triangle", size=9, color=run.colour, source=source)
    made.add_tools(hover(marks, {"decision": "@number, @run", "from step": "@step", "change": "@change"}))
