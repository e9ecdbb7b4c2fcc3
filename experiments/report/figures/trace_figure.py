"""Rates over time as a picture. Importing this loads matplotlib; nothing else in this package does."""

import io
import itertools
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from experiments.report.data.style import COLOURS
from traces.common.atomic import write_bytes_atomically
from traces.trace import LinkTrace


def plot_rates(traces: Mapping[str, LinkTrace], path: Path | str) -> None:
    """Draw the rates of one period of each trace into a PNG file.

    Args:
        traces: Name in the legend to trace.
        path: Where the picture goes; one that is there is replaced.

    Raises:
        InputError: The file cannot be written.
    """
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
