"""The lognormal distribution of a rate, cut off at a maximum, from the mean and spread that it shall have."""

import math
from collections.abc import Callable

from traces.common.errors import InputError


def fit_lognormal(mean: float, coefficient_of_variation: float, maximum: float = math.inf) -> tuple[float, float]:
    """Return mean and standard deviation of the logarithm of X, so that min(X, maximum) has the moments.

    Args:
        mean: Mean of min(X, maximum), positive, in any unit.
        coefficient_of_variation: Its standard deviation as a share of its mean.
        maximum: Where it is cut off, in the unit of the mean.

    Raises:
        InputError: No values up to the maximum have such a mean and spread.
    """
    variance = math.log1p(coefficient_of_variation**2)
    if math.isinf(maximum) or coefficient_of_variation == 0 < mean <= maximum:
        return math.log(mean) - variance / 2, math.sqrt(variance)
    # The widest spread that a bounded variable can have is that of one which is either 0 or the maximum.
    if not (mean < maximum and coefficient_of_variation**2 < 0.99 * (maximum / mean - 1)):
        raise InputError(
            f"no rates up to {maximum:g} have mean {mean:g} and coefficient of variation {coefficient_of_variation:g}",
            valid="raise the maximum or lower the other two",
        )
    ceiling = math.log(maximum / mean)

    def centre(sigma: float) -> float:
        return _bisect(lambda mu: _moment(1, mu, sigma, ceiling) - 1, -60.0 - 30 * sigma**2, ceiling + 9 * sigma)

    def excess(sigma: float) -> float:
        return _moment(2, centre(sigma), sigma, ceiling) - 1 - coefficient_of_variation**2

    sigma = _bisect(excess, math.sqrt(variance) / 2, 12.0)
    return math.log(mean) + centre(sigma), sigma


def _moment(order: int, mu: float, sigma: float, ceiling: float) -> float:
    """Return the mean of min(X, e^ceiling)^order where log X is normal (mu, sigma)."""
    uncut = math.exp(min(order * mu + (order * sigma) ** 2 / 2, 700.0))
    below = uncut * _cdf((ceiling - mu) / sigma - order * sigma)
    return below + math.exp(order * ceiling) * _cdf((mu - ceiling) / sigma)


def _cdf(deviations: float) -> float:
    # By erfc, not erf: far below the mean the share is tiny, and here it meets a large factor.
    return math.erfc(-deviations / math.sqrt(2)) / 2


def _bisect(rising: Callable[[float], float], low: float, high: float) -> float:
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if rising(middle) > 0 else (middle, high)
    return (low + high) / 2
