"""The picture of Cloudless-Training's reproduction: what is saved, and what rarer exchanges gain."""

import io
from collections.abc import Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter, ScalarFormatter

from experiments.benches.result import Row
from experiments.report.data.style import BLUE, DOTS_PER_INCH, GREY, LIGHT_GREY, SETTINGS, WIDTH_INCHES, run_line
from traces.common.atomic import write_bytes_atomically

_HEIGHT_INCHES = 4.5


def draw_cloudless(
    rental: Sequence[Row], exchange: Sequence[Row], claimed: tuple[tuple[float, float], float], path: Path
) -> None:
    """Draw the cost that each setting saves, and the speed-up of each model over the steps between exchanges.

    Args:
        rental: With ``generations``, ``units``, ``data`` and ``saving``.
        exchange: With ``model``, ``every``, ``asgd_ga`` and ``waiting``.
        claimed: The published range of savings, as shares of the cost, and the published speed-up, a ratio.
        path: Where the picture goes; one that is there is replaced.
    """
    savings, speedup = claimed
    with rc_context(SETTINGS):
        figure = Figure(figsize=(WIDTH_INCHES, _HEIGHT_INCHES), dpi=DOTS_PER_INCH, layout="constrained")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2)
        _draw_savings(left, rental, savings)
        _draw_speedups(right, exchange, speedup)
        picture = io.BytesIO()
        figure.savefig(picture, format="png")
    write_bytes_atomically(path, picture.getvalue())


def _draw_savings(axes: Axes, rows: Sequence[Row], claimed: tuple[float, float]) -> None:
    labels = [f"{row['units']} + {row['units']}, {row['generations']}, {row['data']}" for row in rows]
    places = range(len(rows))
    axes.axvspan(*claimed, color=LIGHT_GREY, label="published range")
    axes.barh(places, [float(row["saving"]) for row in rows], color=BLUE)
    axes.set_yticks(places, labels)
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("cost saved, simulated")
    axes.set_title("Elastic scheduling against every GPU (units, kinds, data)")
    axes.legend(loc="lower right")


def _draw_speedups(axes: Axes, rows: Sequence[Row], claimed: float) -> None:
    for index, model in enumerate(dict.fromkeys(str(row["model"]) for row in rows)):
        own = [row for row in rows if row["model"] == model]
        every = [float(row["every"]) for row in own]
        colour, _ = run_line(index)
        axes.plot(every, [float(row["asgd_ga"]) for row in own], color=colour, marker="o", label=model)
        axes.plot(every, [float(row["waiting"]) for row in own], color=colour, linestyle="--")
    axes.axhline(claimed, color=GREY, linestyle=":", label=f"published: up to {claimed:g}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(FixedLocator([1, 2, 4, 8, 16]))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(ScalarFormatter())
    axes.set_xlabel("steps between exchanges")
    axes.set_ylabel("speed-up over an exchange in every step")
    axes.set_title("One exchange under way (solid), none (dashed)")
    axes.legend(loc="upper left")
