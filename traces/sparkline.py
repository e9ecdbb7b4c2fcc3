"""A trace drawn in one line of text."""

import numpy as np

from traces.resample import resampled
from traces.trace import LinkTrace

BLOCKS = "▁▂▃▄▅▆▇█"
OUTAGE = " "


def sparkline(trace: LinkTrace, width: int = 60) -> str:
    """Return one character per equal stretch of the trace, its height the mean rate there.

    The heights go from zero to the highest of these means; a blank is an outage all through its stretch.

    Args:
        trace: What to draw, one period of it.
        width: Number of characters.
    """
    rates_bps = resampled(trace, trace.duration_s / width).bandwidth_bps
    highest_bps = rates_bps.max() or 1.0
    levels = np.ceil(rates_bps / highest_bps * len(BLOCKS)).astype(int)
    return "".join((OUTAGE + BLOCKS)[level] for level in levels)
