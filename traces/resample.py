"""Resampling of traces: into equal windows, into as few pieces as possible, or to preserve the duration in a file."""

import math

import numpy as np

from traces.common.errors import InputError
from traces.common.text import MOST_ROWS
from traces.trace import FloatArray, LinkTrace

# A file with more would be refused when it is read.
MAXIMUM_STEPS = MOST_ROWS


def step_edges_s(duration_s: float, step_s: float) -> FloatArray:
    """Return the edges of equal steps from 0 to a duration.

    Args:
        duration_s: End of the last step, seconds; the last step is shorter if this is no multiple of ``step_s``.
        step_s: Length of every other step, seconds.

    Returns:
        Seconds, shape (steps + 1,), from 0 to exactly ``duration_s``.

    Raises:
        InputError: A length is not positive and finite, or there would be more than `MAXIMUM_STEPS`.
    """
    for name, value_s in (("duration", duration_s), ("step", step_s)):
        if not (math.isfinite(value_s) and value_s > 0):
            raise InputError(f"the {name} is {value_s:g} s", valid=f"a {name} is finite and longer than 0 s")
    steps = duration_s / step_s
    if steps > MAXIMUM_STEPS:
        raise InputError(
            f"{duration_s:g} s in steps of {step_s:g} s are {steps:.3g} steps",
            valid=f"choose a longer step or a shorter duration, at most {MAXIMUM_STEPS:,} steps",
        )
    # Rounding in the quotient must not add a step of no length: 0.3 / 0.1 is slightly less than 3 as a float.
    num_steps = max(1, math.ceil(steps - 1e-9))
    return np.append(step_s * np.arange(num_steps), duration_s)


def resampled(trace: LinkTrace, step_s: float) -> LinkTrace:
    """Return the trace with the mean rate over equal windows of ``step_s``, so that each window keeps its bits.

    The last window is shorter if the duration is no multiple of ``step_s``.

    Raises:
        InputError: The step is not positive, or it would give more than `MAXIMUM_STEPS` windows.
    """
    edges_s = step_edges_s(trace.duration_s, step_s)
    latency_s = None
    if trace.latency_s is not None:
        # The mean latency of a window is computed like a mean rate, through a trace of latencies.
        latency = LinkTrace(trace.times_s, trace.latency_s, trace.duration_s, loops=trace.loops)
        latency_s = _window_means(latency, edges_s)
    rates_bps = _window_means(trace, edges_s)
    return LinkTrace(edges_s[:-1], rates_bps, trace.duration_s, latency_s, trace.loops, trace.ends)


def merged(trace: LinkTrace) -> LinkTrace:
    """Return the trace with neighbouring pieces joined where neither rate nor latency changes."""
    changes = np.diff(trace.bandwidth_bps) != 0
    if trace.latency_s is not None:
        changes |= np.diff(trace.latency_s) != 0
    starts = np.concatenate(([True], changes))
    latency_s = None if trace.latency_s is None else trace.latency_s[starts]
    times_s, rates_bps = trace.times_s[starts], trace.bandwidth_bps[starts]
    return LinkTrace(times_s, rates_bps, trace.duration_s, latency_s, trace.loops, trace.ends)


def _window_means(trace: LinkTrace, edges_s: FloatArray) -> FloatArray:
    bits = trace.bits_between(edges_s[:-1], edges_s[1:])
    # Rounding can make a difference of sums slightly negative.
    return np.maximum(bits, 0.0) / np.diff(edges_s)


SINGLE_ROW_S = 1.0


def duration_by_rule_s(times_s: FloatArray) -> float:
    """Return the end of rows that start at ``times_s``, seconds: the last row lasts for the median step."""
    return float(times_s[-1]) + _median_step_s(times_s)


def starts_lasting(times_s: FloatArray, duration_s: float) -> FloatArray:
    """Return row times for which `duration_by_rule_s` gives ``duration_s``, up to rounding.

    The result is ``times_s``, with further rows inside the last piece if the rule gives another duration: one row if
    the last piece is longer than the median step, otherwise enough rows to make a shorter step the median.

    Args:
        times_s: Starts of the pieces, seconds, shape (n,).
        duration_s: End of the last piece, seconds.

    Returns:
        Seconds, shape (n or more,).

    Raises:
        InputError: The last piece is too short for these rows.
    """
    if _lasts(times_s, duration_s):
        return times_s
    one_more = np.append(times_s, duration_s - _median_step_s(times_s))
    if one_more[-1] > times_s[-1] and _lasts(one_more, duration_s):
        return one_more
    return _split_last(times_s, duration_s)


def _split_last(times_s: FloatArray, duration_s: float) -> FloatArray:
    # Equal steps that outnumber all other steps are the median. They are multiples of the spacing of floats at
    # ``duration_s``, so that they add up exactly.
    num_steps = len(times_s) + 3
    digit_s = np.spacing(duration_s)
    step_s = digit_s * np.floor((duration_s - times_s[-1]) / num_steps / digit_s)
    if step_s == 0:
        raise InputError(
            f"the last piece of the trace lasts {duration_s - times_s[-1]:g} s, too short for this format",
            valid="resample the trace to equal steps, or write csv",
        )
    return np.append(times_s, duration_s - step_s * np.arange(num_steps - 1, 0, -1))


def _median_step_s(times_s: FloatArray) -> float:
    return float(np.median(np.diff(times_s))) if len(times_s) > 1 else SINGLE_ROW_S


def _lasts(times_s: FloatArray, duration_s: float) -> bool:
    return bool(abs(duration_by_rule_s(times_s) - duration_s) <= 4 * np.spacing(duration_s))
