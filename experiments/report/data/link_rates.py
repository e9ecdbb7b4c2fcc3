"""Computes the capacity and the traffic of links over time; loads no matplotlib."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.events.event import PROBE_ACTION, Event, EventKind
from planner.events.log import EventLog, as_log
from planner.plan.actions import Kind
from planner.runs.record import RunRecord
from planner.scenario.cluster import Link
from traces.trace import FloatArray

# Most intervals in which the rate of a link is drawn, about one per pixel; finer rates are averaged.
_PIECES = 1000

# Least duration of a message, seconds, so that the rate of one that left instantly is finite.
_LEAST_S = 1e-6


@dataclass(frozen=True, slots=True)
class Traffic:
    """The messages of one run over one link, in the order in which they arrived.

    Attributes:
        starts_s: When the first byte of each message left, seconds from the start of the run, shape (messages,).
        ends_s: When the last byte of each message arrived, seconds from the start of the run, shape (messages,).
        size_bits: Bits of each message, shape (messages,).
    """

    starts_s: FloatArray
    ends_s: FloatArray
    size_bits: FloatArray


def wan_traffic(record: RunRecord) -> Mapping[str, Traffic]:
    """Return the traffic of each link between regions that carried messages, by the link's name."""
    cluster, log = record.scenario.cluster, as_log(record.events)
    rows, starts_s = departing(log)
    columns = {name: log.columns[name][rows] for name in ("device", "peer", "size_bytes")}
    ends_s = shown_ends_s(log)[rows]
    pairs, which = np.unique(columns["device"] * len(log.names) + columns["peer"], return_inverse=True)
    carried: defaultdict[str, NDArray[np.bool_]] = defaultdict(lambda: np.zeros(len(rows), np.bool_))
    for number, pair in enumerate(pairs.tolist()):
        source, target = log.names[pair // len(log.names)], log.names[pair % len(log.names)]
        if cluster.crosses_regions(source, target):
            for link in cluster.path(source, target):
                carried[link.name] |= (which == number) & (columns["size_bytes"] > 0)
    return {
        name: Traffic(starts_s[own], ends_s[own], 8.0 * columns["size_bytes"][own])
        for name, own in carried.items()
        if own.any()
    }


def used_bps(traffic: Traffic, edges_s: FloatArray) -> FloatArray:
    """Return the mean rate of messages between neighbouring ``edges_s``, bits per second, shape (len(edges_s) - 1,)."""
    duration_s = np.maximum(traffic.ends_s - traffic.starts_s, _LEAST_S)
    used = mean_between(traffic.ends_s - duration_s, traffic.ends_s, traffic.size_bits / duration_s, edges_s)
    return np.maximum(used, 0.0)


def mean_between(start_s: FloatArray, end_s: FloatArray, height: FloatArray, edges_s: FloatArray) -> FloatArray:
    """Return the mean of a sum of box functions over each interval, shape (len(edges_s) - 1,).

    Each box lasts from ``start_s`` to ``end_s`` (seconds) at a ``height``, all of shape (boxes,). The rising times
    ``edges_s`` bound the intervals.
    """
    times_s = np.concatenate((start_s, end_s))
    order = np.argsort(times_s, kind="stable")
    times_s = times_s[order]
    total = np.cumsum(np.concatenate((height, -height))[order])
    area = np.concatenate(([0.0], np.cumsum(total[:-1] * np.diff(times_s))))
    return np.asarray(np.diff(np.interp(edges_s, times_s, area)) / np.diff(edges_s))


def capacity_bps(link: Link, span_s: float) -> tuple[FloatArray, FloatArray]:
    """Return the link's rate in each of n intervals, which together last ``span_s`` seconds.

    Returns:
        The edges of the intervals, seconds, shape (n + 1,), and the rates, bits per second, shape (n,).
    """
    trace = link.trace
    if trace is None:
        return np.array([0.0, span_s]), np.array([link.bandwidth_bps])
    periods = int(np.ceil(span_s / trace.duration_s)) if trace.loops else 1
    if periods * len(trace.times_s) > _PIECES:
        edges_s = np.linspace(0.0, span_s, _PIECES + 1)
    else:
        starts_s = (np.arange(periods)[:, None] * trace.duration_s + trace.times_s).ravel()
        edges_s = np.append(starts_s[starts_s < span_s], span_s)
    return edges_s, trace.bits_between(edges_s[:-1], edges_s[1:]) / np.diff(edges_s)


def mean_use(link: Link, traffic: Traffic, end_s: float) -> float:
    """Return the share of the link's capacity, from the start of the run to ``end_s`` seconds, that traffic used."""
    edges_s, rate_bps = capacity_bps(link, end_s)
    return float(traffic.size_bits.sum() / (rate_bps * np.diff(edges_s)).sum())


def busiest(links: Iterable[Link], traffics: Sequence[Mapping[str, Traffic]], count: int) -> tuple[Link, ...]:
    """Return the links between the ``count`` pairs of regions with the most traffic over all runs, in order."""
    carried: Counter[str] = Counter()
    for traffic in traffics:
        carried.update({name: int(messages.size_bits.sum()) for name, messages in traffic.items()})
    pairs: dict[frozenset[str], list[Link]] = {}
    for link in links:
        if link.name in carried:
            pairs.setdefault(frozenset((link.source, link.target)), []).append(link)
    busy = sorted(pairs, key=lambda ends: -sum(carried[link.name] for link in pairs[ends]))[:count]
    return tuple(link for ends, pair in pairs.items() if ends in busy for link in pair)


def departing(log: EventLog) -> tuple[NDArray[np.intp], FloatArray]:
    """Return the sends in the order in which they arrived, and when their bytes left.

    Migrated layers and backups are included, probes are not. A send event starts when the message is queued. Messages
    from one device to another leave one after the other: a message that is queued before the earlier one has arrived is
    shown to leave at that arrival.

    Returns:
        Rows of the sends in the log, and when their bytes began to leave, seconds from the start of the run; both of
        shape (sends,).
    """
    sends = np.flatnonzero(
        log.is_a(EventKind.SEND, EventKind.MIGRATE, EventKind.BACKUP) & (log.texts("action") != PROBE_ACTION)
    )
    start_s, end_s = log.columns["start_s"][sends], shown_ends_s(log)[sends]
    channel = log.columns["device"][sends] * len(log.names) + log.columns["peer"][sends]
    order = np.lexsort((start_s, end_s, channel))
    left_s, follows = start_s[order], np.diff(channel[order]) == 0
    left_s[1:] = np.where(follows, np.maximum(left_s[1:], end_s[order][:-1]), left_s[1:])
    in_time = np.lexsort((start_s[order], end_s[order]))
    return sends[order][in_time], left_s[in_time]


def shown_ends_s(log: EventLog) -> FloatArray:
    """Return when each event of a log ends in charts, seconds, shape (events,): a send ends when it arrives."""
    ends_s: FloatArray = np.maximum(log.columns["end_s"], log.columns["arrived_s"])
    return ends_s


def fed_stage(send: Event) -> int:
    """Return the stage that a send feeds: activations go to the next stage, gradients to the previous one."""
    return send.stage + 1 if send.action == Kind.FORWARD else send.stage - 1


def input_of(compute: Event) -> tuple[object, ...]:
    """Return a compute event's key, which equals `input_from` of the send that delivers the compute's input."""
    action = Kind.BACKWARD if compute.action == Kind.BACKWARD_INPUT else compute.action
    return compute.device, compute.pipeline, compute.stage, compute.step, action, compute.microbatch


def input_from(send: Event) -> tuple[object, ...]:
    """Return the key, as of `input_of`, of the compute event that uses the bytes of a send."""
    return send.peer, send.pipeline, fed_stage(send), send.step, send.action, send.microbatch
