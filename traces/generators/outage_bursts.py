"""Outages of random length at random times, put into a trace."""

import math

import numpy as np
import numpy.typing as npt

from traces.common.errors import InputError
from traces.generators.stochastic import Seed
from traces.resample import merged, step_edges_s
from traces.trace import FloatArray, LinkTrace


def with_outage_bursts(
    trace: LinkTrace, *, zero_share: float, mean_outage_s: float, seed: Seed, step_s: float = 1.0
) -> LinkTrace:
    """Return the trace interrupted by outages.

    Semi-Markov: the lengths of outages are lognormal, many short and a few long, with a standard deviation
    equal to their mean; the times between outages are exponential.

    Args:
        trace: What is interrupted; outside the outages it stays as it is.
        zero_share: Share of the time that outages take in expectation, 0 to less than 1.
        mean_outage_s: Mean length of an outage, seconds; well above ``step_s``, or the shortest are lost.
        seed: The same seed makes the same outages.
        step_s: Outages start and end at multiples of it, seconds.

    Raises:
        InputError: The share is not in 0 to less than 1, or a time is not positive.
    """
    if not 0 <= zero_share < 1:
        raise InputError(f"outages take {zero_share:g} of the time", valid="a share from 0 to less than 1")
    if not mean_outage_s > 0:
        raise InputError(f"an outage lasts {mean_outage_s:g} s", valid="it is longer than 0 s")
    if zero_share == 0:
        return trace
    edges_s = step_edges_s(trace.duration_s, step_s)
    # A step is out where its middle is: lengths rounded to steps in this way keep their mean.
    is_out = _is_out((edges_s[:-1] + edges_s[1:]) / 2, zero_share, mean_outage_s, seed)
    starts_s = np.union1d(trace.times_s, edges_s[:-1])
    starts_out = is_out[np.searchsorted(edges_s, starts_s, side="right") - 1]
    rates_bps = np.where(starts_out, 0.0, trace.bandwidth_at(starts_s))
    latency_s = None if trace.latency_s is None else trace.latency_s[trace.piece_at(starts_s)]
    return merged(LinkTrace(starts_s, rates_bps, trace.duration_s, latency_s, trace.loops, trace.ends))


def _is_out(times_s: FloatArray, zero_share: float, mean_outage_s: float, seed: Seed) -> npt.NDArray[np.bool_]:
    """Return whether there is an outage at each of the rising times."""
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
