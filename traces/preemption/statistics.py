"""A trace of pre-emptions in a few numbers."""

from dataclasses import dataclass

import numpy as np

from traces.preemption.trace import PreemptionTrace


@dataclass(frozen=True, kw_only=True)
class PreemptionStatistics:
    """Who was there, counted for as long as they were, over the whole recording.

    Attributes:
        duration_s: Length of the recording, seconds.
        nodes: Different nodes.
        arrivals: Times that one came.
        departures: Times that one left.
        mean_between_departures_s: The duration over the departures, seconds; None if nobody left.
        mean_count: Nodes at a time, a mean over the time.
        least_count: Fewest nodes at a time.
        most_count: Most nodes at a time.
        empty_share: Share of the time without any node.
    """

    duration_s: float
    nodes: int
    arrivals: int
    departures: int
    mean_between_departures_s: float | None
    mean_count: float
    least_count: int
    most_count: int
    empty_share: float


def describe_preemption(trace: PreemptionTrace) -> PreemptionStatistics:
    """Return the statistics of a trace."""
    times_s, counts = (np.array(column) for column in zip(*trace.counts, strict=True))
    lengths_s = np.diff(times_s, append=trace.duration_s)
    whole_s = trace.duration_s or 1.0
    departures = sum(not change.arrives for change in trace.changes)
    return PreemptionStatistics(
        duration_s=trace.duration_s,
        nodes=len(trace.nodes),
        arrivals=len(trace.changes) - departures,
        departures=departures,
        mean_between_departures_s=trace.duration_s / departures if departures else None,
        mean_count=float(np.sum(counts * lengths_s) / whole_s),
        least_count=int(counts.min()),
        most_count=int(counts.max()),
        empty_share=float(np.sum(lengths_s[counts == 0]) / whole_s),
    )
