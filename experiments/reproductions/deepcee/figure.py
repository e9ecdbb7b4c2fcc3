"""Throughputs of several systems in several settings, relative to one of them."""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from experiments.benches.result import Row
from experiments.report.data.style import COLOURS, DOTS_PER_INCH, GREY, SETTINGS, WIDTH_INCHES
from traces.common.atomic import write_bytes_atomically


def draw_ratios(rows: Sequence[Row], systems: Sequence[str], path: Path) -> None:
    """Draw a group of bars for each row: the throughput of each system as a share of the first one's.

    Args:
        rows: Each with a ``setting`` and a throughput for each system, 0 where it does not run.
        systems: Names of the systems; shares are of the first.
        path: Where the PNG file goes; one that is there is replaced.

    Raises:
        InputError: The file cannot be written.
    """
    with rc_context(SETTINGS):
        figure = Figure(figsize=(WIDTH_INCHES, 0.6 * len(rows) + 1.2), dpi=DOTS_PER_INCH, layout="constrained")
        axes = figure.subplots()
        places, height = np.arange(len(rows)), 0.8 / len(systems)
        for number, (system, colour) in enumerate(zip(systems, COLOURS, strict=False)):
            shares = [float(row[system]) / float(row[systems[0]]) for row in rows]
            axes.barh(places + (number - (len(systems) - 1) / 2) * height, shares, height, color=colour, label=system)
        axes.axvline(1.0, color=GREY, linewidth=0.8)
        axes.set_yticks(places, [str(row["setting"]) for row in rows])
        axes.invert_yaxis()
        axes.set_xlabel(f"throughput relative to {systems[0]}; no bar: does not fit into memory")
        figure.legend(loc="outside upper left", ncols=len(systems))
        picture = io.BytesIO()
        figure.savefig(picture, format="png")
    write_bytes_atomically(path, picture.getvalue())
