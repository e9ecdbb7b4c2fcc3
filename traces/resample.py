"""The same trace in other pieces: equal windows, or as few pieces as can be."""

import numpy as np

from traces.grid import step_edges_s
from traces.trace import FloatArray, LinkTrace


def resampled(trace: LinkTrace, step_s: float) -> LinkTrace:
    """Return the trace with the mean rate over equal windows; each window keeps its bits.

    Args:
        trace: What to resample.
        step_s: Length of a window, seconds; the last one is shorter where the duration is no multiple of it.

    Raises:
        InputError: The step is not positive, or it would give more than 50 million windows.
    """
    edges_s = step_edges_s(trace.duration_s, step_s)
    latency_s = None
    if trace.latency_s is not None:
        # The mean of a latency is integrated exactly as that of a rate.
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
    # A difference of sums can come out a rounding below zero.
    return np.maximum(bits, 0.0) / np.diff(edges_s)
