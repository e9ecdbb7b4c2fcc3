"""Traces that are not random: constant, in steps, with outages, or with a daily cycle."""

import math
from collections.abc import Sequence

import numpy as np

from traces.common.errors import InputError
from traces.resample import step_edges_s
from traces.trace import LinkTrace


def constant(bandwidth_bps: float, *, duration_s: float = 1.0) -> LinkTrace:
    """Return a trace of one rate, in one piece."""
    return LinkTrace(np.zeros(1), np.array([bandwidth_bps]), duration_s)


def step(points: Sequence[tuple[float, float]], *, duration_s: float) -> LinkTrace:
    """Return a trace that changes its rate at given times.

    ``points`` are pairs (time in seconds, rate in bits per second from this time on), the first at 0 s.
    """
    table = np.array(points, dtype=np.float64).reshape(-1, 2)
    return LinkTrace(table[:, 0], table[:, 1], duration_s)


def outage(
    bandwidth_bps: float,
    *,
    start_s: float,
    length_s: float,
    every_s: float | None = None,
    duration_s: float,
) -> LinkTrace:
    """Return a trace of one rate with outages, once or at equal intervals.

    Args:
        bandwidth_bps: Rate outside the outages, bits per second.
        start_s: Start of the first outage, seconds.
        length_s: Length of each outage, seconds.
        every_s: Time from the start of an outage to the start of the next one, seconds; None for a single outage.
        duration_s: Duration of the trace, seconds; an outage that lasts longer is cut there.

    Raises:
        InputError: An outage does not end before the next one starts, or the first one starts outside of the trace.
    """
    if not 0 <= start_s < duration_s:
        problem = f"an outage that starts at {start_s:g} s is outside of the trace"
        raise InputError(problem, valid=f"give a start of 0 s or more, below the duration of {duration_s:g} s")
    if not 0 < length_s < (math.inf if every_s is None else every_s):
        between = "" if every_s is None else f" every {every_s:g} s"
        raise InputError(
            f"an outage of {length_s:g} s{between} is not allowed",
            valid="give a length above 0 s, so that each outage ends before the next one starts",
        )
    starts_s = np.array([start_s]) if every_s is None else np.arange(start_s, duration_s, every_s)
    edges_s = np.stack((starts_s, starts_s + length_s), axis=1).ravel()
    rates_bps = np.tile([0.0, bandwidth_bps], len(starts_s))
    if start_s > 0:
        edges_s, rates_bps = np.append(0.0, edges_s), np.append(bandwidth_bps, rates_bps)
    inside = edges_s < duration_s
    return LinkTrace(edges_s[inside], rates_bps[inside], duration_s)


def diurnal(
    mean_bps: float,
    *,
    amplitude_share: float,
    period_s: float = 86_400.0,
    duration_s: float,
    step_s: float = 60.0,
) -> LinkTrace:
    """Return a trace whose rate follows a sine around a mean, rising first.

    Args:
        mean_bps: Mean over a period, bits per second.
        amplitude_share: Amplitude of the sine as a share of the mean, 0 to 1.
        period_s: Period of the sine, seconds.
        duration_s: Duration of the trace, seconds.
        step_s: Length of a piece, seconds; its rate is the exact mean of the sine over it.

    Raises:
        InputError: The amplitude is not in 0 to 1, or a time is not positive.
    """
    if not 0 <= amplitude_share <= 1:
        raise InputError(f"the amplitude is {amplitude_share:g} of the mean", valid="give a share from 0 to 1")
    if not period_s > 0:
        raise InputError(f"a period of {period_s:g} s is not allowed", valid="give more than 0 s")
    edges_s = step_edges_s(duration_s, step_s)
    angles = 2 * math.pi / period_s * edges_s
    sine_means = -np.diff(np.cos(angles)) / np.diff(angles)
    # Rounding in the difference of cosines could put the mean over a very short step outside of [-1, 1].
    rates_bps = mean_bps * (1 + amplitude_share * np.clip(sine_means, -1, 1))
    return LinkTrace(edges_s[:-1], rates_bps, duration_s)
