"""Draws capacity and traffic of the links between regions over the whole run, a panel per direction."""

import io
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from experiments.report.data.labels import COLOURS, GREY, LIGHT_GREY, rate_unit
from experiments.report.data.link_rates import capacity_bps, mean_use, used_bps
from experiments.report.data.run_view import RunView
from experiments.report.figures.decisions import draw_decisions
from experiments.report.figures.picture import legend_columns
from planner.scenario.cluster import Link
from traces.common.atomic import write_bytes_atomically
from traces.trace import LinkTrace

MOST_PAIRS = 4
_BINS = 150


def links_inches(count: int) -> float:
    """Return the height of ``count`` panels, two in a row, inches."""
    return 0.95 + 1.45 * -(-count // 2)


def draw_links(figure: SubFigure, links: Sequence[Link], runs: Sequence[RunView]) -> None:
    """Draw a panel for each link, two in a row."""
    span_s = max(run.ends_s[-1] for run in runs)
    width_s = max(span_s / _BINS, *(run.metrics.step_s for run in runs))
    columns = min(2, len(links))
    grid = figure.subplots(-(-len(links) // columns), columns, squeeze=False, sharex=True, sharey="row")
    panels: list[Axes] = list(grid.flat)
    for axes in panels[len(links) :]:
        axes.remove()
    unit, scale = rate_unit(max(float(capacity_bps(link, span_s)[1].max()) for link in links))
    decided = [run for run in runs if run.record.decisions]
    for axes, link in zip(panels, links, strict=False):
        axes.set_xlim(0, span_s)
        uses = " / ".join(
            f"{mean_use(link, run.traffic[link.name], run.ends_s[-1]):.0%}" for run in runs if link.name in run.traffic
        )
        axes.set_title(
            f"link {link.source} → {link.target}: {uses} of capacity used", loc="left", pad=3 + 9 * len(decided)
        )
        edges_s, rate_bps = capacity_bps(link, span_s)
        axes.stairs(rate_bps / scale, edges_s, fill=True, color=LIGHT_GREY, alpha=0.6)
        axes.stairs(rate_bps / scale, edges_s, baseline=None, color=GREY, linewidth=1)
        for run in runs:
            if link.name in run.traffic:
                edges_s = np.linspace(0.0, run.ends_s[-1], max(1, round(run.ends_s[-1] / width_s)) + 1)
                rate = used_bps(run.traffic[link.name], edges_s) / scale
                axes.stairs(rate, edges_s, baseline=None, color=run.colour, linestyle=run.line, linewidth=1.3)
        for row, run in enumerate(decided):
            draw_decisions(axes, run, row, over_time=True)
    for axes in grid[:, 0]:
        axes.set_ylim(bottom=0)
    figure.supylabel(f"rate ({unit})", fontsize=8.5)
    figure.supxlabel("time since the start of the run (s)", fontsize=8.5)
    _draw_legend(figure, runs, width_s)


def _draw_legend(figure: SubFigure, runs: Sequence[RunView], width_s: float) -> None:
    handles: list[Patch | Line2D] = [Patch(facecolor=LIGHT_GREY, edgecolor=GREY, label="capacity")]
    for run in runs:
        handles.append(Line2D([], [], color=run.colour, linestyle=run.line, label=f"used, {run.name}"))
    if any(run.record.decisions for run in runs):
        handles.append(Line2D([], [], color=GREY, linestyle=(0, (3, 3)), linewidth=0.8, label="decision, listed below"))
    figure.legend(
        handles=handles,
        title=f"what each link could carry, and did carry (mean over {width_s:.2g} s)",
        alignment="left",
        loc="outside upper left",
        ncols=legend_columns(str(handle.get_label()) for handle in handles),
    )


def plot_rates(traces: Mapping[str, LinkTrace], path: Path | str) -> None:
    """Draw the rates of one period of each trace into a PNG file; ``traces`` maps names in the legend to traces."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.add_subplot()
    for (name, trace), colour in zip(traces.items(), itertools.cycle(COLOURS), strict=False):
        edges_s = np.append(trace.times_s, trace.duration_s)
        axes.stairs(trace.bandwidth_bps / 1e6, edges_s, baseline=None, label=name, color=colour)
    axes.set_xlabel("time (s)")
    axes.set_ylabel("rate (Mbit/s)")
    axes.set_ylim(bottom=0)
    axes.margins(x=0)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside upper left", ncols=3, frameon=False)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    write_bytes_atomically(path, picture.getvalue())
