"""The choice of the global batch with the highest goodput: throughput times statistical efficiency.

The measure comes from Pollux (OSDI'21); Cannikin uses it too. B is the global batch and B_0 the first global batch of
the training, in samples; T(B) is the time of a step in seconds. The gradient noise scale N = S / |G|², in samples, is
the ratio of the variance S of one sample's gradient to the squared norm of the mean gradient G
(`planner.adapt.gradient_noise`). A step of B samples makes as much progress as gain(B) steps of B_0 samples (AdaScale,
arXiv 2007.05105), with scale = B / B_0::

    gain = (var + sqr) / (var / scale + sqr)     where var = S / B_0 and sqr = |G|²
    efficiency = gain / scale = (B_0 + N) / (B + N)
    goodput(B) = B / T(B) * efficiency(B)

Goodput is in samples per second, where a sample counts as much as in a step of B_0 samples. The learning rate is
multiplied by the gain.
"""

from collections.abc import Callable

import numpy as np

from planner.scenario.training import statistical_efficiency

# Number of candidate batches, and factor by which another batch must raise the goodput: both are Cannikin's.
CANDIDATES = 50
LEAST_GAIN = 1.05


def goodput_per_s(batch: float, time_s: float, first_batch: float, noise_scale: float) -> float:
    """Return the goodput of steps of ``batch`` samples that take ``time_s`` seconds, samples per second.

    ``first_batch`` and ``noise_scale``, in samples, are those of `statistical_efficiency`.
    """
    return batch / time_s * statistical_efficiency(batch, first_batch, noise_scale)


def candidate_batches(first_batch: int, largest_batch: int, count: int = CANDIDATES) -> tuple[int, ...]:
    """Return at most ``count`` batches from ``first_batch`` to ``largest_batch``, in samples, ascending.

    The ratio of successive batches is constant, up to rounding to whole samples.
    """
    return tuple(sorted({round(each) for each in np.geomspace(first_batch, largest_batch, count).tolist()}))


def choose_batch(
    current: int, candidates: tuple[int, ...], time_s: Callable[[int], float], first_batch: int, noise_scale: float
) -> int:
    """Return the candidate with the highest goodput, or ``current`` if that gains less than a factor of `LEAST_GAIN`.

    Args:
        current: Current global batch, samples.
        candidates: Global batches to choose from, samples.
        time_s: Function from a global batch to the time of a step, seconds.
        first_batch: First global batch B_0, samples.
        noise_scale: Gradient noise scale N, samples.
    """

    def goodput(batch: int) -> float:
        return goodput_per_s(batch, time_s(batch), first_batch, noise_scale)

    best = max(candidates, key=goodput)
    return best if goodput(best) >= LEAST_GAIN * goodput(current) else current
