"""The picture of Asteroid's reproduction: throughput against the baselines, and what recovery takes."""

import io
from collections.abc import Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, ScalarFormatter

from experiments.benches.result import Row
from experiments.report.data.style import (
    BLUE,
    DOTS_PER_INCH,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SETTINGS,
    SKY,
    VERMILLION,
    WIDTH_INCHES,
)
from traces.common.atomic import write_bytes_atomically

_HEIGHT_INCHES = 6.0

_COLOURS = {"ddp": VERMILLION, "gpipe": ORANGE, "pipedream": BLUE, "dapple": GREEN, "hetpipe": PURPLE}
_MARKERS = {"ddp": "o", "gpipe": "s", "pipedream": "^", "dapple": "v", "hetpipe": "D"}


def draw_asteroid(
    speeds: Sequence[Row], losses: Sequence[Row], claimed: tuple[float, float, float], path: Path
) -> None:
    """Draw how much faster Asteroid is in each setting, and how much faster it recovers.

    Args:
        speeds: With ``model``, ``cluster``, ``batch``, ``strategy`` and ``asteroid_ratio``.
        losses: With ``ratio`` and ``ratio_once_known``.
        claimed: The published ratios to data and pipeline parallelism, to hybrid pipelines, and of recovery times.
        path: Where the picture goes; one that is there is replaced.
    """
    parallel, hybrid, recovery = claimed
    with rc_context(SETTINGS):
        figure = Figure(figsize=(WIDTH_INCHES, _HEIGHT_INCHES), dpi=DOTS_PER_INCH, layout="constrained")
        FigureCanvasAgg(figure)
        left, middle, right = figure.subplots(1, 3, width_ratios=(3, 3, 2))
        _draw_ratios(left, speeds, ("ddp", "gpipe"), parallel)
        _draw_ratios(middle, speeds, ("pipedream", "dapple", "hetpipe"), hybrid)
        middle.set_yticklabels([])
        _draw_recovery(right, losses, recovery)
        picture = io.BytesIO()
        figure.savefig(picture, format="png")
    write_bytes_atomically(path, picture.getvalue())


def _draw_ratios(axes: Axes, rows: Sequence[Row], strategies: Sequence[str], claimed: float) -> None:
    names = list(dict.fromkeys(_setting(row) for row in rows))
    for strategy in strategies:
        own = [row for row in rows if row["strategy"] == strategy]
        axes.plot(
            [float(row["asteroid_ratio"]) for row in own],
            [names.index(_setting(row)) for row in own],
            color=_COLOURS[strategy],
            marker=_MARKERS[strategy],
            linestyle="",
            label=f"to {strategy}",
        )
    axes.axvline(1.0, color=GREY, linewidth=0.8)
    axes.axvline(claimed, color=GREY, linestyle=":", label=f"published: up to {claimed:g}")
    axes.set_xscale("log")
    axes.set_xticks([1, 2, 5, 10, 20, 50] if claimed > 10 else [0.5, 1, 2, 4])
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(axis="y", alpha=0.3)
    axes.set_xlabel("Asteroid's throughput ÷ theirs, simulated")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)


def _draw_recovery(axes: Axes, rows: Sequence[Row], claimed: float) -> None:
    for key, colour, label in (("ratio", BLUE, "from the departure"), ("ratio_once_known", SKY, "once it is known")):
        values = sorted((float(row[key]) for row in rows), reverse=True)
        axes.plot(range(1, len(values) + 1), values, color=colour, marker=".", label=label)
    axes.axhline(1.0, color=GREY, linewidth=0.8)
    axes.axhline(claimed, color=GREY, linestyle=":", label=f"published: {claimed:g}")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.set_xlabel("departures, by ratio")
    axes.set_ylabel("recovery time: heavy rescheduling ÷ replay")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0))


def _setting(row: Row) -> str:
    return f"{row['model']}, {row['cluster']}, {row['batch']}"
