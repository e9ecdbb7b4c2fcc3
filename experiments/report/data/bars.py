"""Converts the events of a run to the bars of a Gantt chart, in columns; loads no Bokeh."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experiments.report.data.labels import PURPLE, VERMILLION, WORK_STYLES
from experiments.report.data.link_rates import departing, mean_between, shown_ends_s
from planner.events.event import OUT, PROBE_ACTION, UPDATE_ACTION, EventKind
from planner.events.log import EventLog, as_log
from planner.runs.record import RunRecord
from planner.scenario.cluster import Cluster
from traces.trace import FloatArray


@dataclass(frozen=True, slots=True)
class BarKind:
    """The style of one kind of bar.

    Attributes:
        offset: Distance of the bar's middle below the middle of the device's row, as a share of the row's height.
        height: Height of the bar as a share of the row's height.
    """

    label: str
    colour: str
    text_colour: str
    offset: float
    height: float


# Offset and height of bars. A device's row has two lanes: compute, and sends below.
_WORK = (-0.1, 0.66)
_SENDS = (0.35, 0.16)
_HELD_UP = (-0.1, 0.14)
_WHOLE_ROW = (0.0, 0.86)


def _work(action: str) -> BarKind:
    style = WORK_STYLES[action]
    return BarKind(style.label, style.colour, style.text_colour, *_WORK)


WAIT, ABSENT, SYNC, FORWARD, BACKWARD, INPUT, WEIGHT, OPTIMIZER, SEND, WAN_SEND, MOVE, STALE = range(12)

# The styles of the kinds above, in the same order; later kinds are drawn over earlier ones.
BAR_KINDS = (
    BarKind("waiting for data", "#C6CDD5", "black", *_HELD_UP),
    BarKind("device away or hanging", "#6B7280", "white", *_WHOLE_ROW),
    _work("S"),
    _work("F"),
    _work("B"),
    _work("I"),
    _work("W"),
    BarKind("optimizer", "#F0E442", "black", *_WORK),
    BarKind("sends inside its region", "#A5B1BF", "black", *_SENDS),
    BarKind("sends to another region", "#323F4B", "white", *_SENDS),
    BarKind("sends layers", VERMILLION, "white", *_SENDS),
    BarKind("update of another pipeline waits", PURPLE, "black", *_SENDS),
)
COMPUTES = (FORWARD, BACKWARD, INPUT, WEIGHT, OPTIMIZER)


_COMPUTE_OF_ACTION = {"F": FORWARD, "B": BACKWARD, "I": INPUT, "W": WEIGHT, UPDATE_ACTION: OPTIMIZER}
_KIND_OF_EVENT = {
    EventKind.RECEIVE: WAIT,
    EventKind.SYNC: SYNC,
    EventKind.SEND: SEND,
    EventKind.MIGRATE: MOVE,
    EventKind.BACKUP: MOVE,
    EventKind.UPDATE: STALE,
    EventKind.FAULT: ABSENT,
}


@dataclass(frozen=True, eq=False, slots=True)
class Bars:
    """The bars of a run in the order in which they begin; the arrays have one element per bar.

    ``step``, ``stage`` and ``microbatch`` are -1 for a bar without one.

    Attributes:
        kind: Index of the bar's kind in `BAR_KINDS`.
        row: Index of the device's row, from 0 at the top.
        start_s: Start, seconds from the start of the run; of a send, when its bytes began to leave.
        end_s: End, seconds from the start of the run.
        peer: Index of the other device's name in `peers`.
        action: Index of the event's action in `actions`.
        size: Index of the number of bytes on the wire in `sizes_bytes`.
        peers: Names of devices; the first name is empty, for events without another device.
        actions: Names of actions, as in events.
    """

    kind: NDArray[np.uint8]
    row: NDArray[np.uint16]
    start_s: FloatArray
    end_s: FloatArray
    step: NDArray[np.int32]
    stage: NDArray[np.int16]
    microbatch: NDArray[np.int32]
    peer: NDArray[np.uint16]
    action: NDArray[np.uint8]
    size: NDArray[np.int64]
    peers: tuple[str, ...]
    actions: tuple[str, ...]
    sizes_bytes: tuple[int, ...]


def bars_of(record: RunRecord, devices: Mapping[str, str]) -> Bars:
    """Return a run's events as bars, a row per device of ``devices``; decisions and outages of links have no bar."""
    log = as_log(record.events)
    kind, row = _kinds(log, record.scenario.cluster), _numbers(log, {name: place for place, name in enumerate(devices)})
    start_s = log.columns["start_s"].copy()
    sends, left_s = departing(log)
    start_s[sends] = left_s
    shown = np.flatnonzero((kind >= 0) & (row[log.columns["device"]] >= 0))
    order = shown[np.argsort(start_s[shown], kind="stable")]
    peers = ("", *record.scenario.cluster.by_name)
    actions = tuple(sorted(set(log.texts("action").tolist())))
    columns = {name: column[order] for name, column in log.columns.items()} | {"end_s": shown_ends_s(log)[order]}
    peer = np.maximum(_numbers(log, {name: place for place, name in enumerate(peers)}), 0)
    action = np.maximum(_numbers(log, {name: place for place, name in enumerate(actions)}), 0)
    sizes_bytes, size = np.unique(columns["size_bytes"], return_inverse=True)
    return Bars(
        kind=kind[order].astype(np.uint8),
        row=row[columns["device"]].astype(np.uint16),
        start_s=start_s[order],
        end_s=columns["end_s"],
        step=columns["step"].astype(np.int32),
        stage=columns["stage"].astype(np.int16),
        microbatch=columns["microbatch"].astype(np.int32),
        peer=peer[columns["peer"]].astype(np.uint16),
        action=action[columns["action"]].astype(np.uint8),
        size=size,
        peers=peers,
        actions=actions,
        sizes_bytes=tuple(sizes_bytes.tolist()),
    )


def _numbers(log: EventLog, wanted: Mapping[str, int]) -> NDArray[np.int64]:
    """Return the number that ``wanted`` gives each text of the log, shape (texts,); -1 for a text not in ``wanted``."""
    return np.array([wanted.get(name, -1) for name in log.names], np.int64)


def _kinds(log: EventLog, cluster: Cluster) -> NDArray[np.int64]:
    """Return each event's kind of bar as an index of `BAR_KINDS`, shape (events,); -1 for an event without a bar."""
    columns = log.columns
    of_event = _numbers(log, {str(kind): number for kind, number in _KIND_OF_EVENT.items()})
    of_action = _numbers(log, _COMPUTE_OF_ACTION)
    kind: NDArray[np.int64] = np.where(
        log.is_a(EventKind.COMPUTE), of_action[columns["action"]], of_event[columns["kind"]]
    )
    out = _numbers(log, {OUT: 1})[columns["action"]] == 1
    probes = _numbers(log, {PROBE_ACTION: 1})[columns["action"]] == 1
    kind[(kind == ABSENT) & out] = -1
    region = np.array([_region(name, cluster) for name in log.names], np.int64)
    crosses = region[columns["device"]] != region[columns["peer"]]
    kind[(kind == SEND) & crosses] = WAN_SEND
    kind[probes] = -1
    return kind


def _region(name: str, cluster: Cluster) -> int:
    device = cluster.by_name.get(name)
    return cluster.regions.index(device.region) if device is not None else -1


def busy_share(bars: Bars, rows: int, edges_s: FloatArray) -> FloatArray:
    """Return the share of each interval in which each device computed, shape (rows, intervals).

    The intervals lie between neighbouring times of ``edges_s``, rising seconds from the start of the run.
    """
    computes = np.isin(bars.kind, COMPUTES)
    share = np.zeros((rows, len(edges_s) - 1))
    for row in range(rows):
        own = computes & (bars.row == row)
        if own.any():
            share[row] = mean_between(bars.start_s[own], bars.end_s[own], np.ones(own.sum()), edges_s)
    return np.clip(share, 0.0, 1.0)
