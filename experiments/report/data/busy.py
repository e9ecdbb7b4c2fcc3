"""How busy each device was over a run, in equal pieces of time; loads no Bokeh."""

import numpy as np

from experiments.report.data.bars import COMPUTES, Bars
from traces.trace import FloatArray


def busy_share(bars: Bars, rows: int, edges_s: FloatArray) -> FloatArray:
    """Return the share of the time between neighbouring edges in which each device computed.

    Args:
        bars: Of the run.
        rows: Number of devices.
        edges_s: Rising, seconds from the start of the run.

    Returns:
        Between 0 and 1, [rows, len(edges_s) - 1].
    """
    computes = np.isin(bars.kind, COMPUTES)
    share = np.zeros((rows, len(edges_s) - 1))
    for row in range(rows):
        own = computes & (bars.row == row)
        if own.any():
            share[row] = np.diff(_busy_until_s(bars.start_s[own], bars.end_s[own], edges_s)) / np.diff(edges_s)
    return np.clip(share, 0.0, 1.0)


def _busy_until_s(start_s: FloatArray, end_s: FloatArray, edges_s: FloatArray) -> FloatArray:
    """Seconds of compute until each edge."""
    times_s = np.concatenate((start_s, end_s))
    change = np.concatenate((np.ones(len(start_s)), -np.ones(len(end_s))))
    order = np.lexsort((-change, times_s))
    times_s, running = times_s[order], np.cumsum(change[order])
    done_s = np.concatenate(([0.0], np.cumsum(running[:-1] * np.diff(times_s))))
    return np.asarray(np.interp(edges_s, times_s, done_s))
