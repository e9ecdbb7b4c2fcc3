"""Pre-emption traces: which nodes are present over time while a provider takes nodes back; and their statistics."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from types import MappingProxyType

import numpy as np

from traces.common.errors import InputError

# Limit on the number of changes, so that a trace fits into memory.
MOST_CHANGES = 2_000_000

# (start, end) in seconds from the start of the trace; the end is infinite if nothing ends it.
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class NodeChange:
    """A node arrives or leaves.

    Attributes:
        time_s: Time from the start of the trace, seconds.
        arrives: Whether the node arrives; otherwise it leaves.
    """

    time_s: float
    node: str
    arrives: bool


@dataclass(frozen=True)
class PreemptionTrace:
    """Arrivals and departures of nodes; before the first change, no node is present.

    Attributes:
        duration_s: Length of the recording, seconds, at least the time of the last change.

    Raises:
        InputError: Times fall, a present node arrives, or an absent node leaves.
    """

    changes: tuple[NodeChange, ...]
    duration_s: float

    def __post_init__(self) -> None:
        mistake = first_mistake(self.changes)
        if mistake is not None:
            index, problem, valid = mistake
            raise InputError(problem, where=f"change {index + 1}", valid=valid)
        last_s = self.changes[-1].time_s if self.changes else 0.0
        if not last_s <= self.duration_s < math.inf:
            raise InputError(
                f"the trace lasts {self.duration_s:g} s but its last change is at {last_s:g} s",
                valid="the duration must be finite and not before the last change",
            )

    @cached_property
    def presences(self) -> Mapping[str, tuple[Interval, ...]]:
        """Intervals in which each node is present, by node, in order of first arrivals."""
        found: dict[str, list[Interval]] = {}
        for change in self.changes:
            if change.arrives:
                found.setdefault(change.node, []).append((change.time_s, math.inf))
            else:
                start_s, _ = found[change.node].pop()
                found[change.node].append((start_s, change.time_s))
        return MappingProxyType({node: tuple(intervals) for node, intervals in found.items()})

    @property
    def nodes(self) -> tuple[str, ...]:
        """All nodes in the order in which they first arrive."""
        return tuple(self.presences)

    @cached_property
    def counts(self) -> tuple[tuple[float, int], ...]:
        """Number of present nodes as pairs (time in seconds, count from that time on), at 0 s and at each change."""
        # After several changes at the same time, the count after the last one holds.
        count_at: dict[float, int] = {0.0: 0}
        count = 0
        for change in self.changes:
            count += 1 if change.arrives else -1
            count_at[change.time_s] = count
        pieces = [next(group) for _, group in groupby(count_at.items(), key=lambda piece: piece[1])]
        return tuple(pieces)


def trace_of_counts(counts: Iterable[tuple[float, int]], duration_s: float) -> PreemptionTrace:
    """Return a trace with made-up node names from the number of nodes over time.

    The nodes are called ``node1``, ``node2`` and so on, and the node with the highest number leaves first. ``counts``
    are pairs (time in seconds, count from this time on), rising in time; ``duration_s`` is the length of the recording.

    Raises:
        InputError: Times fall or are out of range, or the counts change too often by too many nodes.
    """
    changes: list[NodeChange] = []
    here = 0
    for time_s, count in counts:
        if len(changes) + abs(count - here) > MOST_CHANGES:
            raise InputError(
                f"more than {MOST_CHANGES:,} nodes come or go by {time_s:g} s",
                valid="give a shorter trace, or one of fewer nodes",
            )
        changes += (NodeChange(time_s, f"node{number}", True) for number in range(here + 1, count + 1))
        changes += (NodeChange(time_s, f"node{number}", False) for number in range(here, count, -1))
        here = count
    return PreemptionTrace(tuple(changes), duration_s)


def first_mistake(changes: Iterable[NodeChange]) -> tuple[int, str, str] | None:
    """Return the first invalid change as (index, problem, what would be valid); None if all changes are valid."""
    here: set[str] = set()
    last_s = 0.0
    for index, change in enumerate(changes):
        if not 0 <= change.time_s < math.inf:
            return index, f"time {change.time_s:g} s", "every time is finite and not negative"
        if change.time_s < last_s:
            times = f"time goes from {last_s:.12g} s to {change.time_s:.12g} s"
            return index, times, "times must not fall from change to change"
        if change.arrives == (change.node in here):
            happens = "arrives but is there already" if change.arrives else "leaves but is not there"
            return index, f"node '{change.node}' {happens}", "a node arrives, then leaves, then may arrive again"
        (here.add if change.arrives else here.remove)(change.node)
        last_s = change.time_s
    return None


@dataclass(frozen=True, kw_only=True)
class PreemptionStatistics:
    """Statistics of a trace over the whole recording.

    Attributes:
        mean_between_departures_s: Duration divided by the number of departures, seconds; None without departures.
        mean_count: Mean number of nodes over time.
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
