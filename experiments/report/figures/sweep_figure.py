"""Draws the figure of a sweep: a heat map of two parameters, and the trade-off of two metrics."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.patches import Rectangle

from experiments.report.data.labels import BLUE, GREY, VERMILLION
from experiments.report.data.sweep_points import (
    SweptMetric,
    SweptParameter,
    SweptPoints,
    heat,
    pareto_front,
    usual_choice,
    varied,
)
from experiments.report.figures.picture import picture

_HEIGHT_INCHES = 4.2

# Most cells of a heat map that have room for their numbers.
_MOST_NUMBERED = 80


def draw_sweep(points: SweptPoints, path: Path) -> None:
    """Draw a sweep into a PNG or SVG file, by the path's suffix, with a heat map over the most varied parameters."""
    with picture(path, _HEIGHT_INCHES) as drawn:
        left, right = drawn.subplots(1, 2)
        x, y = varied(points)
        paid, got = usual_choice(points)
        _draw_heat(left, points, x, y, got)
        _draw_front(right, paid, got)
        drawn.suptitle(f"{points.name}: {len(points.numbers)} points", x=0.008, horizontalalignment="left")


def _draw_heat(
    axes: Axes, points: SweptPoints, x: SweptParameter | None, y: SweptParameter | None, metric: SweptMetric
) -> None:
    grid = heat(points, x, y, metric)
    image = axes.imshow(grid, cmap="cividis", aspect="auto")
    for parameter, ticks, label in ((x, axes.set_xticks, axes.set_xlabel), (y, axes.set_yticks, axes.set_ylabel)):
        ticks(range(len(parameter.labels)) if parameter else [], parameter.labels if parameter else [])
        label(parameter.name if parameter else "")
    axes.tick_params(axis="x", rotation=45 if x is not None and max(map(len, x.labels)) > 8 else 0)
    axes.spines[:].set_visible(False)
    best = np.nanmax(grid) if metric.more_is_better else np.nanmin(grid)
    shade = Normalize(np.nanmin(grid), np.nanmax(grid))
    for (row, column), value in np.ndenumerate(grid):
        if value == best:
            axes.add_patch(
                Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor=VERMILLION, linewidth=2, zorder=3)
            )
        if grid.size <= _MOST_NUMBERED and np.isfinite(value):
            colour = "white" if shade(value) < 0.55 else "black"
            axes.text(column, row, f"{value:.4g}", color=colour, fontsize=7, ha="center", va="center")
    axes.figure.colorbar(image, ax=axes, label=f"median of {metric.label}")


def _draw_front(axes: Axes, paid: SweptMetric, got: SweptMetric) -> None:
    front = pareto_front(paid, got)
    axes.scatter(paid.values, got.values, s=10, color=BLUE, alpha=0.5, linewidths=0, label="a point")
    axes.step(paid.values[front], got.values[front], where="post", color=GREY, linestyle="--", linewidth=1)
    axes.scatter(
        paid.values[front],
        got.values[front],
        s=24,
        color=VERMILLION,
        edgecolors="black",
        label="Pareto front",
        zorder=3,
    )
    axes.set_xlabel(paid.label)
    axes.set_ylabel(got.label)
    axes.grid(alpha=0.3)
    axes.legend()
