"""Draws a figure of one or several runs of a scenario: pipelines, links, step times."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import SubFigure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from experiments.report.data.gantt_rows import GanttRows, choose_steps, gantt_rows
from experiments.report.data.labels import GREY, LIGHT_GREY, WORK_STYLES, batch_text
from experiments.report.data.run_view import RunView, run_views, shown_links
from experiments.report.figures.decisions import draw_decisions, list_decisions, listed_inches
from experiments.report.figures.gantt import draw_gantt, number_bars
from experiments.report.figures.links import MOST_PAIRS, draw_links, links_inches
from experiments.report.figures.picture import legend_columns, picture
from planner.runs.record import RunRecord

# Most steps for which each point of the line gets a marker.
_MARKED_STEPS = 60


def _draw_step_times(figure: SubFigure, runs: Sequence[RunView]) -> None:
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
        draw_decisions(axes, run, row, over_time=False)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.3)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step")
    axes.set_ylabel("step time (s)")
    columns = legend_columns(run.name for run in runs)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=columns)
    list_decisions(figure, runs)


def _pipelines_inches(rows: Sequence[GanttRows]) -> float:
    return sum(len(each.devices) * _row_inches(rows) + 0.5 for each in rows) + 0.7


def _draw_pipelines(figure: SubFigure, runs: Sequence[RunView], rows: Sequence[GanttRows]) -> list[Axes]:
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


_TITLE_INCHES = 0.5


def draw_runs(records: Sequence[RunRecord], path: Path, *, names: Sequence[str] | None = None) -> None:
    """Draw runs of one scenario into a PNG file, 1500 pixels wide, or an SVG file, by the path's suffix.

    From the top: the pipeline of each run over the same few steps and the same length of time, the capacity and traffic
    of the links between regions, and the time of every step.

    Raises:
        InputError: The runs have no step in common, or the file cannot be written.
    """
    assert records, "there must be a run to draw"
    runs = run_views(records, names)
    steps = choose_steps(runs)
    rows = [gantt_rows(run, steps) for run in runs]
    links = shown_links(runs, MOST_PAIRS)
    heights = {
        "title": _TITLE_INCHES,
        "pipelines": _pipelines_inches(rows),
        **({"links": links_inches(len(links))} if links else {}),
        "steps": 2.1 + listed_inches(runs),
    }
    with picture(path, sum(heights.values())) as figure:
        subfigures = figure.subfigures(len(heights), 1, height_ratios=list(heights.values()), squeeze=False)[:, 0]
        parts: dict[str, SubFigure] = dict(zip(heights, subfigures, strict=True))
        _draw_title(parts["title"], runs)
        panels = _draw_pipelines(parts["pipelines"], runs, rows)
        if links:
            draw_links(parts["links"], links, runs)
        _draw_step_times(parts["steps"], runs)
        figure.draw_without_rendering()
        number_bars(panels, rows)


def _draw_title(figure: SubFigure, runs: Sequence[RunView]) -> None:
    scenario, plan = runs[0].record.scenario, runs[0].record.plan
    facts = (
        f"strategy {', '.join(dict.fromkeys(run.record.plan.strategy for run in runs))}",
        f"schedule {', '.join(dict.fromkeys(run.record.plan.schedule for run in runs))}",
        f"{batch_text(runs[0].record)} on {len(plan.devices)} devices",
        f"policy decisions: {' / '.join(str(len(run.record.decisions)) for run in runs)}",
    )
    figure.text(0.008, 0.62, scenario.name, fontsize=13, fontweight="bold", verticalalignment="center")
    figure.text(0.008, 0.12, "   |   ".join(facts), color=GREY, verticalalignment="center")
