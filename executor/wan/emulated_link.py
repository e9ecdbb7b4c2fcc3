"""The model of one emulated link: computes when a packet that enters the link arrives at the other end."""

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, inf, log, log1p, nextafter
from random import Random

from planner.scenario.cluster import LONGEST_OUTAGE_S, Link
from traces.common.errors import RunError
from traces.trace import LinkTrace

# Rounding error of a sum over segments: a packet of which no more is left must not wait for the end of an outage.
_SLACK_BITS = 1e-6

# Smallest size of a link's queue, in seconds at its planned rate and in bytes, so that packets are lost by the
# scenario's loss rate and not when TCP enlarges its window. Buffers of cellular and cable links hold a second (Gettys
# and Nichols, Bufferbloat, 2011). But the windows of senders must fit too, also on slow links: 11 MB waited of one
# connection with a send buffer of 4 MiB, when both directions sent messages of 10 MB over 89 Mbit/s.
LEAST_QUEUE_S = 1.0
LEAST_QUEUE_BYTES = 64 * 2**20

# Second 0 of the run, by the monotonic clock, until the ranks have agreed on it: later than any present time.
_NOT_YET_S = 1e8


class RateCurve:
    """Computes when a link has carried a number of bits; before second 0 of the run the link behaves as at second 0.

    The curve keeps the segment of constant rate in which the last packet left, since the next packet usually leaves in
    the same segment.

    Args:
        outages: Start and end, in run seconds, of the intervals in which the link carries nothing; without overlaps.

    Attributes:
        latency_s: Latency at the time that `finish_s` returned last.
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
        # Before second 0 the ranks connect, so the rate must not be 0 even if the trace starts with an outage.
        self._first_bps = self._rates_bps[0] or link.bandwidth_bps
        self._from_s, self._until_s, self._rate_bps, self.latency_s = -inf, -inf, 0.0, 0.0

    def finish_s(self, start_s: float, bits: float) -> float:
        """Return the run second at which the link has carried ``bits`` from ``start_s`` on; infinite if never."""
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
        """Copy a trace to lists, since elements of lists are faster to read than those of arrays."""
        self._times_s, self._rates_bps = trace.times_s.tolist(), trace.bandwidth_bps.tolist()
        self._latencies_s = [latency_s] * len(self._times_s) if trace.latency_s is None else trace.latency_s.tolist()
        self._duration_s, self._loops = trace.duration_s, trace.loops
        self._period_bits = trace.mean_bps * trace.duration_s

    def _skip_periods(self, time_s: float, bits: float) -> tuple[float, float]:
        """Skip whole periods of a looping trace; return the time after them, and the bits that remain."""
        if time_s < 0 or not self._loops or bits <= self._period_bits or not self._period_bits:
            return time_s, bits
        periods = ceil(bits / self._period_bits) - 1
        following = bisect_right(self._outage_ends_s, time_s)
        if following < len(self._outages):
            periods = max(0, min(periods, int((self._outages[following][0] - time_s) / self._duration_s)))
        return time_s + periods * self._duration_s, bits - periods * self._period_bits

    def _enter(self, time_s: float) -> None:
        """Make the segment that contains ``time_s`` the current one."""
        if time_s < 0:
            self._from_s, self._until_s = -inf, 0.0
            self._rate_bps, self.latency_s = self._first_bps, self._latencies_s[0]
            return
        start_s = time_s // self._duration_s * self._duration_s if self._loops else 0.0
        segment = bisect_right(self._times_s, max(time_s - start_s, 0.0)) - 1
        is_last = segment == len(self._times_s) - 1
        end_s = start_s + (self._duration_s if is_last else self._times_s[segment + 1])
        if self._dark or (is_last and not self._loops):
            end_s = inf
        self._from_s, self._until_s, self._rate_bps = time_s, end_s, self._rates_bps[segment]
        self.latency_s = self._latencies_s[segment]
        self._apply_outages(time_s)
        if self._until_s <= time_s:
            # The end of the segment, a sum of two times, can be rounded down to time_s itself.
            self._enter(nextafter(time_s, inf))

    def _apply_outages(self, time_s: float) -> None:
        following = bisect_right(self._outage_starts_s, time_s)
        if following > 0 and time_s < self._outages[following - 1][1]:
            self._rate_bps, self._until_s = 0.0, self._outages[following - 1][1]
        elif following < len(self._outages):
            self._until_s = min(self._until_s, self._outages[following][0])


def queue_bytes(link: Link) -> int:
    """Return how many bytes of Ethernet frames may wait for a link."""
    wait_s = max(LEAST_QUEUE_S, 2 * link.latency_s)
    return max(LEAST_QUEUE_BYTES, int(link.bandwidth_bps * wait_s / 8)) if link.bandwidth_bps < inf else 2**62


@dataclass(slots=True)
class LinkCount:
    """Counts of the Ethernet frames of an emulated link.

    Attributes:
        carried_frames: Number of frames that were transmitted, including those that were lost.
        dropped_frames: Number of frames that were not transmitted since the queue was full.
    """

    name: str
    carried_frames: int = 0
    dropped_frames: int = 0


class EmulatedLink:
    """Models a link: a queue of limited size, transmission at the rate of the link or its trace, latency, and loss.

    All times are seconds of the machine's monotonic clock.

    Args:
        outages: Start and end, in run seconds, of the intervals in which the link carries nothing.

    Attributes:
        count: Counts of the frames so far.
    """

    def __init__(self, link: Link, outages: Sequence[tuple[float, float]], seed: int) -> None:
        self._link = link
        self._curve = RateCurve(link, outages)
        self._limit_bytes = queue_bytes(link)
        self._random = Random(f"{seed} {link.name}")
        self._origin_s = _NOT_YET_S
        self._free_s = -inf
        self._last_release_s = -inf
        self._queue: deque[tuple[float, int]] = deque()
        self._queued_bytes = 0
        self._until_loss = self._frames_to_next_loss()
        self.count = LinkCount(link.name)

    def start_run(self, origin_s: float) -> None:
        """Set the time of second 0 of the run."""
        self._origin_s = origin_s

    def accept(self, arrival_s: float, size_bytes: int, frames: int = 1) -> float | None:
        """Transmit a packet; return when it arrives at the other end of the link, or None if the queue is full.

        Calls must be in the order of ``arrival_s``, the time at which the packet enters the queue.

        Raises:
            RunError: The link carries nothing for so long that its trace must be wrong.
        """
        queue = self._queue
        while queue and queue[0][0] <= arrival_s:
            self._queued_bytes -= queue.popleft()[1]
        # An idle link transmits a packet even if the packet is larger than the queue.
        if self._queued_bytes and self._queued_bytes + size_bytes > self._limit_bytes:
            self.count.dropped_frames += frames
            return None
        start_s = max(arrival_s, self._free_s)
        finish_s = self._origin_s + self._curve.finish_s(start_s - self._origin_s, 8 * size_bytes)
        if finish_s - start_s > LONGEST_OUTAGE_S:
            raise RunError(
                f"link {self._link.name} carries nothing for {LONGEST_OUTAGE_S:g} s from "
                f"{start_s - self._origin_s:.3f} s of the run on; its trace must rise above zero again"
            )
        self._free_s = finish_s
        queue.append((finish_s, size_bytes))
        self._queued_bytes += size_bytes
        self.count.carried_frames += frames
        return self._release_s(finish_s, frames)

    def lose(self, frames: int) -> list[int]:
        """Return the numbers, from 0, of those frames of the last accepted packet that are lost."""
        lost = []
        while self._until_loss < frames:
            lost.append(int(self._until_loss))
            self._until_loss += 1 + self._frames_to_next_loss()
        self._until_loss -= frames
        return lost

    def _frames_to_next_loss(self) -> float:
        """Draw the number of frames before the next lost one, by a geometric distribution: losses are independent."""
        if not self._link.loss:
            return inf
        return floor(log(1.0 - self._random.random()) / log1p(-self._link.loss))

    def _release_s(self, finish_s: float, frames: int) -> float:
        """Return when a packet whose transmission ends at ``finish_s`` arrives: never before the previous packet."""
        delay_s = self._curve.latency_s
        if self._link.jitter_s:
            # The packet arrives with its slowest frame: the maximum of one uniform delay per frame, in a single draw.
            delay_s += self._link.jitter_s * self._random.random() ** (1 / frames)
        self._last_release_s = max(self._last_release_s, finish_s + delay_s)
        return self._last_release_s
