"""Traces by chance: states that come and go, a rate that wanders around its mean."""

import itertools
import math
from collections.abc import Sequence

import numpy as np

from traces.common.errors import InputError
from traces.generators.lognormal import fit_lognormal
from traces.resample import step_edges_s
from traces.trace import LinkTrace

Seed = int | np.random.SeedSequence


def markov(states: Sequence[tuple[float, float]], *, duration_s: float, seed: Seed, step_s: float = 1.0) -> LinkTrace:
    """Return a trace that dwells in one state after another, each next one drawn evenly from the others.

    Args:
        states: (rate in bits per second, mean dwell in seconds) of each; dwells are geometric in steps.
        duration_s: Seconds.
        seed: The same seed makes the same trace.
        step_s: What dwells are multiples of, seconds.

    Raises:
        InputError: There are fewer than two states, or one dwells for less than a step.
    """
    if len(states) < 2:
        raise InputError(f"a Markov trace of {len(states)} states", valid="give two or more")
    for _, dwell_s in states:
        if not (math.isfinite(dwell_s) and dwell_s >= step_s):
            raise InputError(f"a state dwells for {dwell_s:g} s", valid=f"a step of {step_s:g} s or longer")
    chance = np.random.Generator(np.random.PCG64(seed))
    starts_s = step_edges_s(duration_s, step_s)[:-1]
    # The time that a state holds in the long run is proportional to its dwell, as all are visited alike.
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
    """Return a trace whose rate wanders around a mean and is drawn back to it.

    The logarithm of the rate is an Ornstein-Uhlenbeck process, stationary from the start: the rate is never
    negative, and its mean and coefficient of variation are exact in expectation.

    Args:
        mean_bps: Bits per second.
        coefficient_of_variation: Standard deviation as a share of the mean.
        correlation_s: After which the logarithm's autocorrelation is 1/e, seconds.
        maximum_bps: Rates are cut off here, bits per second; mean and coefficient hold nevertheless.
        duration_s: Seconds.
        seed: The same seed makes the same trace.
        step_s: Length of a piece, seconds.

    Raises:
        InputError: The mean or a time is not positive, the coefficient is negative, or no rates up to the
            maximum have this mean and coefficient.
    """
    if not mean_bps > 0:
        raise InputError(f"the mean rate is {mean_bps:g} bit/s", valid="it is more than 0")
    if not coefficient_of_variation >= 0:
        raise InputError(f"the coefficient of variation is {coefficient_of_variation:g}", valid="0 or more")
    if not correlation_s > 0:
        raise InputError(f"the correlation time is {correlation_s:g} s", valid="it is longer than 0 s")
    starts_s = step_edges_s(duration_s, step_s)[:-1]
    kept = math.exp(-step_s / correlation_s)
    fresh = math.sqrt(1 - kept**2)
    shocks = np.random.Generator(np.random.PCG64(seed)).standard_normal(len(starts_s)).tolist()
    wander = np.fromiter(itertools.accumulate(shocks, lambda last, shock: kept * last + fresh * shock), float)
    centre, spread = fit_lognormal(mean_bps, coefficient_of_variation, maximum_bps)
    return LinkTrace(starts_s, np.minimum(np.exp(centre + spread * wander), maximum_bps), duration_s)
