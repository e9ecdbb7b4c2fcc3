"""The global batch with the highest goodput: throughput times statistical efficiency (Pollux, OSDI'21; Cannikin).

B is the global batch and B_0 the first global batch, in samples; T(B) is the time of a step in seconds; N = S / |G|² is
the gradient noise scale (`planner.runs.gradient_noise`). A step of B samples makes as much progress as gain(B) steps of
B_0 samples (AdaScale, arXiv 2007.05105), where scale = B / B_0::

    gain = (var + sqr) / (var / scale + sqr)     var = S / B_0, sqr = |G|²
    efficiency = gain / scale = (B_0 + N) / (B + N)
    goodput(B) = B / T(B) * efficiency(B)

Goodput is in samples per second, where a sample counts as much as in a step of B_0 samples. The learning rate is
multiplied by the gain.
"""

import math
from collections.abc import Callable

import numpy as np

from traces.common.errors import InputError

# Number of candidate batches, and factor by which another batch must raise the goodput: both as published.
CANDIDATES = 50
LEAST_GAIN = 1.05


def statistical_efficiency(batch: float, first_batch: float, noise_scale: float) -> float:
    """Return the progress per sample in a batch of B relative to a batch of B_0, without unit.

    Args:
        batch: Global batch B, samples.
        first_batch: First global batch B_0, samples.
        noise_scale: Gradient noise scale S / |G|², samples; may be infinite.

    Raises:
        InputError: A batch is not above zero, or the noise scale is negative.
    """
    if not (batch > 0 and first_batch > 0 and noise_scale >= 0):
        raise InputError(
            f"batch {batch:g}, first_batch {first_batch:g} and noise_scale {noise_scale:g} are not allowed",
            where="statistical efficiency",
            valid="give batches above 0, and a noise scale of 0 or more",
        )
    if math.isinf(noise_scale):
        return 1.0
    return (first_batch + noise_scale) / (batch + noise_scale)


def goodput_per_s(batch: float, time_s: float, first_batch: float, noise_scale: float) -> float:
    """Return the goodput of steps of ``batch`` samples that take ``time_s`` seconds, in samples per second.

    A sample counts as much as in a step of ``first_batch`` samples; ``noise_scale`` is in samples.
    """
    return batch / time_s * statistical_efficiency(batch, first_batch, noise_scale)


def candidate_batches(first_batch: int, largest_batch: int, count: int = CANDIDATES) -> tuple[int, ...]:
    """Return at most ``count`` batches from the first to the largest, in equal ratios, rounded, without duplicates.

    Raises:
        InputError: The largest batch is below the first, or the first is below 1.
    """
    if not 1 <= first_batch <= largest_batch:
        raise InputError(
            f"batches from {first_batch} to {largest_batch} samples are not allowed",
            where="candidate batches",
            valid=f"give a first batch of 1 or more, and a largest batch of {max(1, first_batch)} or more",
        )
    return tuple(sorted({round(each) for each in np.geomspace(first_batch, largest_batch, count).tolist()}))


def choose_batch(
    current: int, candidates: tuple[int, ...], time_s: Callable[[int], float], first_batch: int, noise_scale: float
) -> int:
    """Return the batch with the highest goodput, or ``current`` if its goodput is not below that / `LEAST_GAIN`.

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
