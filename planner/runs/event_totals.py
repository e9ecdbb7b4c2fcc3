"""What the events of a run come to, in one pass: those of a long run are read from a file, part by part."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.events.event import Event, EventKind
from planner.events.log import EventLog, parts_of
from planner.scenario.cluster import Cluster


@dataclass(frozen=True, slots=True)
class EventTotals:
    """Totals of a run's events. Times are in seconds from the start of the run.

    Attributes:
        start_s: Start of the first compute action or gradient sum; infinite without any.
        first_step: Index of the first step that has one; 0 without any.
        step_ends_s: End of each step, which is that of its last compute action or gradient sum, [steps].
        decided_s: When each decision was made, in order.
        busy_s: Seconds of compute, by device.
        sent_bytes: Bytes sent, by sender and receiver.
        updates: Number of received updates of other pipelines.
        stale_steps: Sum of their staleness, in steps.
    """

    start_s: float
    first_step: int
    step_ends_s: list[float]
    decided_s: list[float]
    busy_s: Mapping[str, float]
    sent_bytes: Mapping[tuple[str, str], int]
    updates: int
    stale_steps: int

    def wan_bytes(self, cluster: Cluster) -> int:
        """Return the bytes sent between regions."""
        return sum(size for ends, size in self.sent_bytes.items() if cluster.crosses_regions(*ends))


def event_totals(events: Sequence[Event]) -> EventTotals:
    """Return the totals of a run's events."""
    start_s, updates, stale_steps = math.inf, 0, 0
    ends: list[tuple[NDArray[np.int64], NDArray[np.float64]]] = [(np.zeros(0, np.int64), np.zeros(0))]
    decided_s: list[float] = []
    names: tuple[str, ...] = ()
    busy_s, sent_bytes = np.zeros(0), Counter[int]()
    for log in parts_of(events):
        # All parts have the same names.
        names, busy_s = log.names, busy_s if names else np.zeros(len(log.names))
        step, started_s, ended_s = _of(log, (EventKind.COMPUTE, EventKind.SYNC), "step", "start_s", "end_s")
        start_s = min(start_s, float(started_s.min(initial=math.inf)))
        ends.append(_last_ends_s(step, ended_s))
        device, started_s, ended_s = _of(log, (EventKind.COMPUTE,), "device", "start_s", "end_s")
        np.add.at(busy_s, device, ended_s - started_s)
        sent_bytes.update(_sent_bytes(log))
        (made_s,) = _of(log, (EventKind.DECISION,), "end_s")
        decided_s += made_s.tolist()
        (stale,) = _of(log, (EventKind.UPDATE,), "staleness")
        updates, stale_steps = updates + len(stale), stale_steps + int(stale.sum())
    steps, ends_s = _last_ends_s(*(np.concatenate(columns) for columns in zip(*ends, strict=True)))
    return EventTotals(
        start_s,
        int(steps[0]) if len(steps) else 0,
        ends_s.tolist(),
        sorted(decided_s),
        dict(zip(names, busy_s.tolist(), strict=True)),
        {(names[pair // len(names)], names[pair % len(names)]): sent_bytes[pair] for pair in sorted(sent_bytes)},
        updates,
        stale_steps,
    )


def step_ends_s(events: Sequence[Event]) -> list[float]:
    """Return the end of each step, seconds from the start of the run; [steps]."""
    return event_totals(events).step_ends_s


def wan_bytes(events: Sequence[Event], cluster: Cluster) -> int:
    """Return the bytes sent between regions."""
    return event_totals(events).wan_bytes(cluster)


def worker_steps(events: Sequence[Event]) -> list[tuple[float, int, int]]:
    """Return each step that a pipeline has finished: its end in seconds of the run, the pipeline, and the step."""
    last_s: dict[tuple[int, int], float] = {}
    counts = Counter[tuple[int, int]]()
    for log in parts_of(events):
        pipelines, steps, ended_s = _of(log, (EventKind.COMPUTE,), "pipeline", "step", "end_s")
        found, which, count = np.unique(np.stack([pipelines, steps]), axis=1, return_inverse=True, return_counts=True)
        ends_s = np.zeros(len(count))
        np.maximum.at(ends_s, which.reshape(-1), ended_s)
        for pipeline, step, end_s, rows in zip(*found.tolist(), ends_s.tolist(), count.tolist(), strict=True):
            last_s[pipeline, step] = max(end_s, last_s.get((pipeline, step), end_s))
            counts[pipeline, step] += rows
    # A step that a pipeline has not finished has fewer actions than its others.
    most: dict[int, int] = {}
    for (pipeline, _), rows in counts.items():
        most[pipeline] = max(rows, most.get(pipeline, 0))
    return [(end_s, *place) for place, end_s in last_s.items() if counts[place] == most[place[0]]]


def _of(log: EventLog, kinds: tuple[EventKind, ...], *fields: str) -> list[NDArray[Any]]:
    """Return columns of the events of some kinds."""
    rows = log.is_a(*kinds)
    return [log.columns[field][rows] for field in fields]


def _last_ends_s(
    steps: NDArray[np.int64], ends_s: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return each step once, in order, with the last of its ends, seconds."""
    steps, which = np.unique(steps, return_inverse=True)
    last_s = np.zeros(len(steps))
    np.maximum.at(last_s, which, ends_s)
    return steps, last_s


def _sent_bytes(log: EventLog) -> dict[int, int]:
    """Return the sent bytes by sender and receiver, as one number: index of the sender * names + index of the other."""
    kinds = (EventKind.SEND, EventKind.MIGRATE, EventKind.BACKUP)
    device, peer, size_bytes = _of(log, kinds, "device", "peer", "size_bytes")
    pairs, which = np.unique(device * len(log.names) + peer, return_inverse=True)
    sums = np.zeros(len(pairs), np.int64)
    np.add.at(sums, which, size_bytes)
    return dict(zip(pairs.tolist(), sums.tolist(), strict=True))
