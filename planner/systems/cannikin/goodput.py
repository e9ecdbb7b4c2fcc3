"""Which global batch trains fastest: throughput times the worth of a sample (Pollux, OSDI'21; Cannikin).

With noise scale N = S / |G|², a step of B samples brings training as far as gain(B) steps of B_0 samples (AdaScale,
arXiv 2007.05105), where scale = B / B_0::

    gain = (var + sqr) / (var / scale + sqr)     var = S / B_0, sqr = |G|²
    efficiency = gain / scale = (B_0 + N) / (B + N)
    goodput(B) = B / T(B) * efficiency(B)

in samples of worth of those of B_0 per second. The learning rate grows by the gain.
"""

import math
from collections.abc import Callable

import numpy as np

from traces.common.errors import InputError

# Candidates between the smallest and the largest batch, and what another batch must promise: both as published.
CANDIDATES = 50
LEAST_GAIN = 1.05


def adascale_gain(batch: float, first_batch: float, noise_scale: float) -> float:
    """Return how many steps of ``first_batch`` samples one of ``batch`` is worth; the learning rate grows by as much.

    Args:
        batch: B, samples.
        first_batch: B_0, samples.
        noise_scale: S / |G|², samples; may be infinite.

    Raises:
        InputError: A batch is not above zero, or the noise scale is negative.
    """
    return batch / first_batch * statistical_efficiency(batch, first_batch, noise_scale)


def statistical_efficiency(batch: float, first_batch: float, noise_scale: float) -> float:
    """Return what a sample in a batch of B is worth, relative to one in a batch of B_0.

    Args:
        batch: B, samples.
        first_batch: B_0, samples.
        noise_scale: S / |G|², samples; may be infinite.

    Raises:
        InputError: A batch is not above zero, or the noise scale is negative.
    """
    if not (batch > 0 and first_batch > 0 and noise_scale >= 0):
        raise InputError(
            f"a batch of {batch:g} samples against {first_batch:g} at a noise scale of {noise_scale:g}",
            valid="batches above zero, and a noise scale that is not negative",
        )
    if math.isinf(noise_scale):
        return 1.0
    return (first_batch + noise_scale) / (batch + noise_scale)


def goodput_per_s(batch: float, time_s: float, first_batch: float, noise_scale: float) -> float:
    """Return samples of the worth of those of ``first_batch`` per second, for steps of ``batch`` and ``time_s``.

    The noise scale ``noise_scale`` is in samples, as the batches are.
    """
    return batch / time_s * statistical_efficiency(batch, first_batch, noise_scale)


def candidate_batches(first_batch: int, largest_batch: int, count: int = CANDIDATES) -> tuple[int, ...]:
    """Return ``count`` batches from the first to the largest in equal ratios, each whole number once.

    Raises:
        InputError: The largest is below the first, or that is below one.
    """
    if not 1 <= first_batch <= largest_batch:
        raise InputError(
            f"batches from {first_batch} to {largest_batch}", valid="the first at least 1, the largest not below it"
        )
    return tuple(sorted({round(each) for each in np.geomspace(first_batch, largest_batch, count).tolist()}))


def choose_batch(
    current: int, candidates: tuple[int, ...], time_s: Callable[[int], float], first_batch: int, noise_scale: float
) -> int:
    """Return the batch of the highest goodput if it promises `LEAST_GAIN` times that of the current one, else that.

    Args:
        current: Samples of a step now.
        candidates: What it may become.
        time_s: How long a step of so many samples takes, seconds.
        first_batch: B_0, samples.
        noise_scale: S / |G|², samples.
    """

    def goodput(batch: int) -> float:
        return goodput_per_s(batch, time_s(batch), first_batch, noise_scale)

    best = max(candidates, key=goodput)
    return best if goodput(best) >= LEAST_GAIN * goodput(current) else current
