"""Random factors on compute times, the same for the same seed on every machine."""

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri


def jitter_factors(seed: int, step: int, count: int, deviation: float) -> NDArray[np.float64]:
    """Return log-normal factors of mean 1 for the actions of a step, [count].

    They come from raw Philox words through the inverse of the normal distribution, which unlike NumPy's own normal
    numbers is promised never to change.

    Args:
        seed: Of the scenario.
        step: Of training.
        count: Number of actions.
        deviation: Standard deviation of the factors.
    """
    key = np.array([seed % 2**64, step], np.uint64)
    words = np.random.Philox(key=key).random_raw(count)
    uniform = (np.right_shift(words, np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    spread = np.sqrt(np.log1p(deviation**2))
    return np.asarray(np.exp(spread * ndtri(uniform) - spread**2 / 2), np.float64)
