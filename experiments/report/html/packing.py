"""Bars as columns that are small in a page; what runs.js makes of them stands there. Loads no Bokeh."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.report.data.bars import Bars


def packed(bars: Bars) -> dict[str, NDArray[Any]]:
    """Return columns, [bars], each of the smallest numbers that hold it.

    Instead of its end a bar has its duration, in seconds, which needs fewer digits.
    """
    return {
        "start_s": bars.start_s,
        "duration_s": (bars.end_s - bars.start_s).astype(np.float32),
        "kind": bars.kind,
        "row": _smallest(bars.row),
        "step": _smallest(bars.step),
        "stage": _smallest(bars.stage),
        "microbatch": _smallest(bars.microbatch),
        "peer": _smallest(bars.peer),
        "action": bars.action,
        "size": _smallest(bars.size),
    }


def _smallest(column: NDArray[Any]) -> NDArray[Any]:
    """The column in the fewest bytes of those that browsers know."""
    least, most = (int(column.min()), int(column.max())) if len(column) else (0, 0)
    return column.astype(np.result_type(np.min_scalar_type(least), np.min_scalar_type(most)))
