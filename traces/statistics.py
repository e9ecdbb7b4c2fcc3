"""Statistics and sparklines of traces, and confidence intervals of repeated measurements."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from traces.resample import resampled
from traces.trace import LinkTrace


@dataclass(frozen=True, kw_only=True)
class TraceStatistics:
    """Statistics of a trace's rates over one period, weighted by duration.

    Attributes:
        coefficient_of_variation: Standard deviation as a share of the mean; 0 where the mean is 0.
        zero_share: Share of the time at rate 0.
    """

    duration_s: float
    mean_bps: float
    minimum_bps: float
    p5_bps: float
    median_bps: float
    p95_bps: float
    maximum_bps: float
    coefficient_of_variation: float
    zero_share: float
    pieces: int


def describe(trace: LinkTrace) -> TraceStatistics:
    """Return the statistics of a trace, whether it loops or not, over one period."""
    lengths_s = np.diff(trace.times_s, append=trace.duration_s)
    shares = lengths_s / trace.duration_s
    rates_bps = trace.bandwidth_bps
    deviation_bps = float(np.sqrt(np.sum(shares * (rates_bps - trace.mean_bps) ** 2)))
    order = np.argsort(rates_bps)
    # Tolerance for rounding in the sum: a percentile at the edge of a piece belongs to that piece.
    reached = np.cumsum(shares[order]) + 1e-12
    p5_bps, median_bps, p95_bps = rates_bps[order][np.searchsorted(reached, [0.05, 0.5, 0.95])].tolist()
    return TraceStatistics(
        duration_s=trace.duration_s,
        mean_bps=trace.mean_bps,
        minimum_bps=float(rates_bps.min()),
        p5_bps=p5_bps,
        median_bps=median_bps,
        p95_bps=p95_bps,
        maximum_bps=float(rates_bps.max()),
        coefficient_of_variation=deviation_bps / trace.mean_bps if trace.mean_bps else 0.0,
        zero_share=float(shares[rates_bps == 0].sum()),
        pieces=len(rates_bps),
    )


BLOCKS = "▁▂▃▄▅▆▇█"
OUTAGE = " "


def sparkline(trace: LinkTrace, width: int = 60) -> str:
    """Return a line of characters whose heights are the mean rates of equal intervals, relative to the highest.

    A blank is an outage that lasts for the whole interval.
    """
    rates_bps = resampled(trace, trace.duration_s / width).bandwidth_bps
    highest_bps = rates_bps.max() or 1.0
    levels = np.ceil(rates_bps / highest_bps * len(BLOCKS)).astype(int)
    return "".join((OUTAGE + BLOCKS)[level] for level in levels)


# The median of the distribution lies between the smallest and the largest of six independent rounds with a probability
# of 1 - 2 / 2^6 = 97 %, for any distribution.
ROUNDS = 6
CONFIDENCE = 1 - 2 / 2**ROUNDS


@dataclass(frozen=True, slots=True)
class Interval:
    """Confidence interval of a median: the least, the median and the most of `ROUNDS` rounds, in the measured unit."""

    least: float
    median: float
    most: float

    def scaled(self, factor: float) -> "Interval":
        """Return the interval with all values multiplied by a factor."""
        return Interval(factor * self.least, factor * self.median, factor * self.most)


def interval_of(values: Sequence[float]) -> Interval:
    """Return the interval of measured values, each of which is a round.

    If there are 12 values or more, they are put into six groups, whose medians are the rounds.
    """
    if len(values) >= 2 * ROUNDS:
        values = [median(values[number::ROUNDS]) for number in range(ROUNDS)]
    return Interval(min(values), median(values), max(values))
