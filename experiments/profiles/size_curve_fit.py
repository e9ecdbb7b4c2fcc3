"""A size curve from measured messages."""

from collections.abc import Mapping

import numpy as np

from planner.scenario.size_curve import SizeCurve

# A polynomial with three terms, through fewer points, says nothing about those between them.
_LEAST_POINTS = 4

# A curve that is further from what was measured than this is none.
_WITHIN = 1.25


def fit_size_curve(rates_bps: Mapping[float, float], ceiling_bps: float) -> SizeCurve | None:
    """Return the curve whose relative errors are least, by their squares.

    Args:
        rates_bps: Bits per second that messages of so many bytes reached.
        ceiling_bps: What larger ones reach at most, bits per second.

    Returns:
        None where no curve of this form comes within a quarter of every rate.
    """
    if len(rates_bps) < _LEAST_POINTS:
        return None
    exponents = np.log2(np.array(list(rates_bps)) / 1e6)
    rates = np.array(list(rates_bps.values())) / 8e9
    terms = [float(each) for each in np.polyfit(exponents, rates, 2, w=1 / rates)]
    curve = SizeCurve(terms[0], terms[1], terms[2], ceiling_bps)
    for size_bytes, rate_bps in rates_bps.items():
        found_bps = curve.rate_bps(size_bytes)
        if not min(rate_bps, ceiling_bps) / _WITHIN <= found_bps <= _WITHIN * rate_bps:
            return None
    return curve
