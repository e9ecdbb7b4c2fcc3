"""Random traces: Markov states, a rate that varies around its mean, and outages in bursts."""

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from traces.common.errors import InputError
from traces.resample import merged, step_edges_s
from traces.trace import FloatArray, LinkTrace


def fit_lognormal(mean: float, coefficient_of_variation: float, maximum: float = math.inf) -> tuple[float, float]:
    """Return mean and standard deviation of log X for a lognormal X, so that min(X, maximum) has given moments.

    ``mean`` is the mean of min(X, maximum), positive and in the unit of ``maximum``; ``coefficient_of_variation`` is
    the standard deviation of min(X, maximum) as a share of its mean.

    Raises:
        InputError: No values up to the maximum have such a mean and spread.
    """
    variance = math.log1p(coefficient_of_variation**2)
    if math.isinf(maximum) or coefficient_of_variation == 0 < mean <= maximum:
        return math.log(mean) - variance / 2, math.sqrt(variance)
    # A variable that is either 0 or the maximum has the largest spread for a given mean.
    if not (mean < maximum and coefficient_of_variation**2 < 0.99 * (maximum / mean - 1)):
        raise InputError(
            f"no rates up to {maximum:g} have mean {mean:g} and coefficient of variation {coefficient_of_variation:g}",
            valid="raise the maximum, or lower the mean or the coefficient of variation",
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
    # erfc, unlike erf, is precise far below the mean, which matters because callers multiply the tiny result.
    return math.erfc(-deviations / math.sqrt(2)) / 2


def _bisect(rising: Callable[[float], float], low: float, high: float) -> float:
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if rising(middle) > 0 else (middle, high)
    return (low + high) / 2


Seed = int | np.random.SeedSequence


def markov(states: Sequence[tuple[float, float]], *, duration_s: float, seed: Seed, step_s: float = 1.0) -> LinkTrace:
    """Return a trace of a Markov chain of rates; each next state is drawn uniformly from the other states.

    Args:
        states: (rate in bits per second, mean dwell time in seconds) of each state; dwell times are geometric in steps.
        duration_s: Duration of the trace, seconds.
        seed: Seed of the generator; the same seed makes the same trace.
        step_s: Dwell times are multiples of this step, seconds.

    Raises:
        InputError: There are fewer than two states, or a mean dwell time is shorter than a step.
    """
    if len(states) < 2:
        raise InputError(f"a Markov trace of {len(states)} states is not allowed", valid="give two states or more")
    for _, dwell_s in states:
        if not (math.isfinite(dwell_s) and dwell_s >= step_s):
            problem = f"a mean dwell time of {dwell_s:g} s is not allowed"
            raise InputError(problem, valid=f"give the length of a step, {step_s:g} s, or more")
    chance = np.random.Generator(np.random.PCG64(seed))
    starts_s = step_edges_s(duration_s, step_s)[:-1]
    # States are visited equally often, so that the long-run share of each state is proportional to its dwell time.
    dwells_s = np.array([dwell_s for _, dwell_s in states])
    state = int(chance.choice(len(states), p=dwells_s / dwells_s.sum()))
    first_steps, rates_bps, now = [], [], 0
    while now < len(starts_s):
        first_steps.append(now)
        rates_bps.append(states[state][0])
        now += int(chance.geometric(step_s / dwells_s[state]))
        state = (state + 1 + int(chance.integers(len(states) - 1))) % len(states)
    return LinkTrace(starts_s[first_steps], np.array(rates_bps), duration_s)


def ornstein_uhlenbeck(
    mean_bps: float,
    *,
    coefficient_of_variation: float,
    correlation_s: float,
    maximum_bps: float = math.inf,
    duration_s: float,
    seed: Seed,
    step_s: float = 1.0,
) -> LinkTrace:
    """Return a trace whose rate varies randomly and reverts to its mean.

    The logarithm of the rate is an Ornstein-Uhlenbeck process, stationary from the start: the rate is never
    negative, and its mean and coefficient of variation are exact in expectation.

    Args:
        mean_bps: Mean rate, bits per second.
        coefficient_of_variation: Standard deviation as a share of the mean.
        correlation_s: Lag at which the logarithm's autocorrelation is 1/e, seconds.
        maximum_bps: Limit at which rates are cut off, bits per second; mean and coefficient are those after the cut.
        duration_s: Duration of the trace, seconds.
        seed: Seed of the generator; the same seed makes the same trace.
        step_s: Length of a piece, seconds.

    Raises:
        InputError: The mean or a time is not positive, the coefficient is negative, or no rates up to the
            maximum have this mean and coefficient.
    """
    if not mean_bps > 0:
        raise InputError(f"the mean rate is {mean_bps:g} bit/s", valid="give more than 0 bit/s")
    if not coefficient_of_variation >= 0:
        raise InputError(f"the coefficient of variation is {coefficient_of_variation:g}", valid="give 0 or more")
    if not correlation_s > 0:
        raise InputError(f"the correlation time is {correlation_s:g} s", valid="give more than 0 s")
    starts_s = step_edges_s(duration_s, step_s)[:-1]
    kept = math.exp(-step_s / correlation_s)
    fresh = math.sqrt(1 - kept**2)
    shocks = np.random.Generator(np.random.PCG64(seed)).standard_normal(len(starts_s)).tolist()
    wander = np.fromiter(itertools.accumulate(shocks, lambda last, shock: kept * last + fresh * shock), float)
    centre, spread = fit_lognormal(mean_bps, coefficient_of_variation, maximum_bps)
    return LinkTrace(starts_s, np.minimum(np.exp(centre + spread * wander), maximum_bps), duration_s)


def with_outage_bursts(
    trace: LinkTrace, *, zero_share: float, mean_outage_s: float, seed: Seed, step_s: float = 1.0
) -> LinkTrace:
    """Return the trace interrupted by outages.

    The lengths of outages are lognormal, many short and a few long, with a standard deviation equal to their mean; the
    times between outages are exponential (a semi-Markov process).

    Args:
        trace: Trace to interrupt; outside the outages it is unchanged.
        zero_share: Share of the time that outages take in expectation, 0 to less than 1.
        mean_outage_s: Mean length of an outage, seconds; if it is not well above ``step_s``, short outages are lost.
        seed: Seed of the generator; the same seed makes the same outages.
        step_s: Outages start and end at multiples of this step, seconds.

    Raises:
        InputError: The share is not in 0 to less than 1, or a time is not positive.
    """
    if not 0 <= zero_share < 1:
        raise InputError(f"outages take {zero_share:g} of the time", valid="give a share of 0 or more and below 1")
    if not mean_outage_s > 0:
        raise InputError(f"a mean outage of {mean_outage_s:g} s is not allowed", valid="give more than 0 s")
    if zero_share == 0:
        return trace
    edges_s = step_edges_s(trace.duration_s, step_s)
    # A step belongs to an outage if its middle does: this rounding to steps keeps the mean length of outages.
    is_out = _is_out((edges_s[:-1] + edges_s[1:]) / 2, zero_share, mean_outage_s, seed)
    starts_s = np.union1d(trace.times_s, edges_s[:-1])
    starts_out = is_out[np.searchsorted(edges_s, starts_s, side="right") - 1]
    rates_bps = np.where(starts_out, 0.0, trace.bandwidth_at(starts_s))
    latency_s = None if trace.latency_s is None else trace.latency_s[trace.piece_at(starts_s)]
    return merged(LinkTrace(starts_s, rates_bps, trace.duration_s, latency_s, trace.loops, trace.ends))


def _is_out(times_s: FloatArray, zero_share: float, mean_outage_s: float, seed: Seed) -> npt.NDArray[np.bool_]:
    """Return whether there is an outage at each time, bool, shape (n,); ``times_s`` rise and have shape (n,)."""
    chance = np.random.Generator(np.random.PCG64(seed))
    mean_between_s = mean_outage_s * (1 - zero_share) / zero_share
    spread = math.sqrt(math.log(2))
    starts_out = bool(chance.random() < zero_share)
    changes_s, now_s, out = [], 0.0, starts_out
    while now_s < times_s[-1]:
        outage_s = mean_outage_s * chance.lognormal(-(spread**2) / 2, spread)
        now_s += outage_s if out else chance.exponential(mean_between_s)
        changes_s.append(now_s)
        out = not out
    num_changes = np.searchsorted(changes_s, times_s, side="right")
    out_at: npt.NDArray[np.bool_] = (num_changes % 2 == 1) != starts_out
    return out_at
