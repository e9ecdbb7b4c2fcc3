"""The rate of a link during a run, for someone who asks for one packet after the other: exact, and fast at that."""

from bisect import bisect_right
from collections.abc import Sequence
from math import ceil, inf, nextafter

from planner.scenario.cluster import Link
from traces.trace import LinkTrace

# What a sum of pieces may round away from a packet: far less than a bit, and it must not wait for the end of an outage.
_SLACK_BITS = 1e-6


class RateCurve:
    """When a link has carried so many bits; before second 0 of the run it behaves as at second 0.

    Remembers the piece in which the last packet left, since the next one mostly leaves in the same.

    Args:
        link: Its trace, or its steady rate.
        outages: Start and end of each time in which it carries nothing, run seconds; they do not overlap.
    """

    def __init__(self, link: Link, outages: Sequence[tuple[float, float]] = ()) -> None:
        self._times_s, self._rates_bps, self._latencies_s = [0.0], [link.bandwidth_bps], [link.latency_s]
        self._duration_s, self._loops, self._period_bits = inf, False, inf
        if link.trace is not None:
            self._follow(link.trace, link.latency_s)
        self._outages = sorted(outages)
        self._outage_starts_s = [start_s for start_s, _ in self._outages]
        self._outage_ends_s = [end_s for _, end_s in self._outages]
        self._dark = not any(self._rates_bps)
        # The ranks find each other before the run starts: a link that starts with an outage must let them.
        self._first_bps = self._rates_bps[0] or link.bandwidth_bps
        self._from_s, self._until_s, self._rate_bps, self.latency_s = -inf, -inf, 0.0, 0.0

    def finish_s(self, start_s: float, bits: float) -> float:
        """Return when the link, free from ``start_s`` on, has carried ``bits``: run seconds, infinite if it never has.

        ``latency_s`` is then that of the moment at which they have left.
        """
        if not self._from_s <= start_s < self._until_s:
            self._enter(start_s)
        while True:
            rate_bps = self._rate_bps
            if rate_bps > 0:
                end_s = start_s + (bits - _SLACK_BITS) / rate_bps
                if end_s <= self._until_s:
                    return min(start_s + bits / rate_bps, self._until_s)
                bits -= rate_bps * (self._until_s - start_s)
            if self._until_s == inf:
                return inf
            start_s, bits = self._skip_periods(self._until_s, bits)
            self._enter(start_s)

    def _follow(self, trace: LinkTrace, latency_s: float) -> None:
        """Take over a trace, as lists: an array's elements are slow to get at."""
        self._times_s, self._rates_bps = trace.times_s.tolist(), trace.bandwidth_bps.tolist()
        self._latencies_s = [latency_s] * len(self._times_s) if trace.latency_s is None else trace.latency_s.tolist()
        self._duration_s, self._loops = trace.duration_s, trace.loops
        self._period_bits = trace.mean_bps * trace.duration_s

    def _skip_periods(self, time_s: float, bits: float) -> tuple[float, float]:
        """Pass over the whole periods of a trace that ``bits`` need; return when the rest starts, and the rest."""
        if time_s < 0 or not self._loops or bits <= self._period_bits or not self._period_bits:
            return time_s, bits
        periods = ceil(bits / self._period_bits) - 1
        following = bisect_right(self._outage_ends_s, time_s)
        if following < len(self._outages):
            periods = max(0, min(periods, int((self._outages[following][0] - time_s) / self._duration_s)))
        return time_s + periods * self._duration_s, bits - periods * self._period_bits

    def _enter(self, time_s: float) -> None:
        """Make the piece that holds at ``time_s`` the current one."""
        if time_s < 0:
            self._from_s, self._until_s = -inf, 0.0
            self._rate_bps, self.latency_s = self._first_bps, self._latencies_s[0]
            return
        start_s = time_s // self._duration_s * self._duration_s if self._loops else 0.0
        piece = bisect_right(self._times_s, max(time_s - start_s, 0.0)) - 1
        last = piece == len(self._times_s) - 1
        end_s = start_s + (self._duration_s if last else self._times_s[piece + 1])
        rate_bps = self._rates_bps[piece]
        if self._dark or (last and not self._loops):
            end_s = inf
        self._from_s, self._until_s, self._rate_bps = time_s, end_s, rate_bps
        self.latency_s = self._latencies_s[piece]
        self._heed_outages(time_s)
        if self._until_s <= time_s:
            # The sum of the period's start and a time inside can round down onto time_s itself.
            self._enter(nextafter(time_s, inf))

    def _heed_outages(self, time_s: float) -> None:
        following = bisect_right(self._outage_starts_s, time_s)
        if following > 0 and time_s < self._outages[following - 1][1]:
            self._rate_bps, self._until_s = 0.0, self._outages[following - 1][1]
        elif following < len(self._outages):
            self._until_s = min(self._until_s, self._outages[following][0])
