"""How long a device of a data-parallel step takes for its samples, and how long the sums of gradients take.

Cannikin's model (arXiv 2402.05302). For b samples on device i::

    before backward  a_i = q_i * b + s_i      load, forward, update
    backward         P_i = k_i * b + m_i
    sums             T_o of all buckets but the last, which overlap with backward, and T_u of the last one
    first bucket     ready after the share gamma of backward

A device with enough backward after the first bucket, (1 - gamma) * P_i >= T_o, ends with its own last bucket:
T_i = a_i + P_i + T_u. Another one waits for the sums: T_i = a_i + gamma * P_i + T_o + T_u. T_i is the larger of both.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from traces.common.errors import InputError


@dataclass(frozen=True, slots=True)
class NodeSpeed:
    """What one device takes for b samples: a straight line each before and in backward.

    Attributes:
        forward_per_sample_s: q, seconds for each sample before backward.
        forward_fixed_s: s, seconds before backward whatever the samples.
        backward_per_sample_s: k, seconds of backward for each sample.
        backward_fixed_s: m, seconds of backward whatever the samples.
    """

    forward_per_sample_s: float
    forward_fixed_s: float
    backward_per_sample_s: float
    backward_fixed_s: float

    def forward_s(self, samples: float) -> float:
        """Return a: seconds before backward with so many ``samples``."""
        return self.forward_per_sample_s * samples + self.forward_fixed_s

    def backward_s(self, samples: float) -> float:
        """Return P: seconds of backward with so many ``samples``."""
        return self.backward_per_sample_s * samples + self.backward_fixed_s

    def over_step(self, microbatches: int, update_s: float = 0.0) -> "NodeSpeed":
        """Return the speed of a step of so many microbatches, in terms of the samples of one of them.

        Only the backward of the last one overlaps with sums: what comes before it is all before backward, as is the
        optimizer's update of the step before, which takes ``update_s``.
        """
        before = microbatches - 1
        return replace(
            self,
            forward_per_sample_s=microbatches * self.forward_per_sample_s + before * self.backward_per_sample_s,
            forward_fixed_s=microbatches * self.forward_fixed_s + before * self.backward_fixed_s + update_s,
        )


@dataclass(frozen=True, slots=True)
class SumTimes:
    """How long the sums of a step's gradients take, and when they can begin.

    Attributes:
        first_bucket_share: gamma, the share of backward after which the first bucket's gradients are complete.
        overlapped_s: T_o, seconds of all sums but the last bucket's.
        last_s: T_u, seconds of the last bucket's sum, which begins when backward has ended.
    """

    first_bucket_share: float
    overlapped_s: float
    last_s: float

    @property
    def total_s(self) -> float:
        """Seconds of all sums."""
        return self.overlapped_s + self.last_s


# Nobody waits for sums: what is left to balance is compute.
NO_SUMS = SumTimes(1.0, 0.0, 0.0)


def fit_line(samples: Sequence[float], times_s: Sequence[float]) -> tuple[float, float]:
    """Return slope and intercept, neither negative, of the line with the least squared relative errors.

    Relative, since what disturbs a time grows with it: the errors of a short step count as much as those of a long one.
    With one sample count the line goes through the origin, as it does where the best one begins below zero.

    Raises:
        InputError: There are no points, one without samples, or a time that is not above zero.
    """
    counts, seconds = np.asarray(samples, np.float64), np.asarray(times_s, np.float64)
    if not len(counts) or counts.min() <= 0 or seconds.min() <= 0:
        raise InputError(
            f"times {list(times_s)} for samples {list(samples)}", valid="at least one point, every number above zero"
        )
    rates = counts / seconds
    through_origin = float(rates.sum() / (rates**2).sum())
    if counts.min() == counts.max():
        return through_origin, 0.0
    rows = np.stack([counts, np.ones_like(counts)], axis=1) / seconds[:, None]
    (slope, intercept), *_ = np.linalg.lstsq(rows, np.ones_like(counts), rcond=None)
    if intercept < 0:
        return through_origin, 0.0
    if slope < 0:
        return 0.0, float((1 / seconds).sum() / (1 / seconds**2).sum())
    return float(slope), float(intercept)


def fit_speed(samples: Sequence[float], forward_s: Sequence[float], backward_s: Sequence[float]) -> NodeSpeed:
    """Return the speed that describes these times best, with a line for each of the two.

    Args:
        samples: Of each point.
        forward_s: a at each point, seconds.
        backward_s: P at each point, seconds.

    Raises:
        InputError: As `fit_line`.
    """
    return NodeSpeed(*fit_line(samples, forward_s), *fit_line(samples, backward_s))
