"""The global batch with the highest goodput: throughput times statistical efficiency (Pollux, OSDI'21; Cannikin).

With noise scale N = S / |G|², a step of B samples brings training as far as gain(B) steps of B_0 samples (AdaScale,
arXiv 2007.05105), where scale = B / B_0::

    gain = (var + sqr) / (var / scale + sqr)     var = S / B_0, sqr = |G|²
    efficiency = gain / scale = (B_0 + N) / (B + N)
    goodput(B) = B / T(B) * efficiency(B)

in samples per second, counted as samples of steps of B_0. The learning rate grows by the gain.
"""

import math
from collections.abc import Callable

import numpy as np

from traces.common.errors import InputError

# Number of batches between the smallest and the largest one, and least gain of another batch: both as published.
CANDIDATES = 50
LEAST_GAIN = 1.05


def statistical_efficiency(batch: float, first_batch: float, noise_scale: float) -> float:
    """Return the value of a sample in a batch of B relative to one in a batch of B_0.

    Args:
        batch: Global batch B, samples.
        first_batch: First global batch B_0, samples.
        noise_scale: Gradient noise scale S / |G|², samples; may be infinite.

    Raises:
        InputError: A batch is not above zero, or the noise scale is negative.
    """
    if not (batch > 0 and first_batch > 0 and noise_scale >= 0):
        raise InputError(
            f"a batch of {batch:g} samples against {first_batch:g} at a noise scale of {noise_scale:g} is not allowed",
            valid="batches above zero, and a noise scale that is not negative",
        )
    if math.isinf(noise_scale):
        return 1.0
    return (first_batch + noise_scale) / (batch + noise_scale)


def goodput_per_s(batch: float, time_s: float, first_batch: float, noise_scale: float) -> float:
    """Return the goodput of steps of ``batch`` samples that take ``time_s``, in samples per second.

    Samples count as much as in steps of ``first_batch``; the noise scale ``noise_scale`` is in samples.
    """
    return batch / time_s * statistical_efficiency(batch, first_batch, noise_scale)


def candidate_batches(first_batch: int, largest_batch: int, count: int = CANDIDATES) -> tuple[int, ...]:
    """Return ``count`` batches from the first to the largest in equal ratios, without duplicates.

    Raises:
        InputError: The largest is below the first, or that is below one.
    """
    if not 1 <= first_batch <= largest_batch:
        raise InputError(
            f"batches from {first_batch} to {largest_batch} are not allowed",
            valid="the first is at least 1, and the largest is not below it",
        )
    return tuple(sorted({round(each) for each in np.geomspace(first_batch, largest_batch, count).tolist()}))


def choose_batch(
    current: int, candidates: tuple[int, ...], time_s: Callable[[int], float], first_batch: int, noise_scale: float
) -> int:
    """Return the batch with the highest goodput if that is `LEAST_GAIN` times the current one's, else the current one.

    Args:
        current: Current global batch, samples.
        candidates: Global batches to choose from, samples.
        time_s: Function from a global batch to the time of a step, seconds.
        first_batch: First global batch B_0, samples.
        noise_scale: Gradient noise scale S / |G|², samples.
    """

    def goodput(batch: int) -> float:
        return goodput_per_s(batch, time_s(batch), first_batch, noise_scale)

    best = max(candidates, key=goodput)
    return best if goodput(best) >= LEAST_GAIN * goodput(current) else current
