"""When the bytes of a send really left, and which compute they feed; loads no matplotlib."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from planner.events.event import Event, EventKind
from planner.events.log import EventLog, as_log
from planner.plan.actions import Kind
from traces.trace import FloatArray


def departures(events: Sequence[Event]) -> Iterator[tuple[Event, float]]:
    """Yield each send, layers that change devices included, with the time from which its bytes left.

    In seconds from the start of the run, in the order in which they ended.
    """
    log = as_log(events)
    rows, starts_s = departing(log)
    yield from zip(log.take(rows), starts_s.tolist(), strict=True)


def departing(log: EventLog) -> tuple[NDArray[np.intp], FloatArray]:
    """Return the sends, layers that change devices included, in the order in which they ended, and when bytes left.

    A send event starts when the bytes are handed over. Those between two devices leave in order, one at a
    time: what is handed over while another one is leaving waits for its end.

    Returns:
        Their rows in the log, and from when their bytes left, seconds from the start of the run; both [sends].
    """
    sends = np.flatnonzero(log.is_a(EventKind.SEND, EventKind.MIGRATE))
    start_s, end_s = log.columns["start_s"][sends], log.columns["end_s"][sends]
    channel = log.columns["device"][sends] * len(log.names) + log.columns["peer"][sends]
    order = np.lexsort((start_s, end_s, channel))
    left_s, follows = start_s[order], np.diff(channel[order]) == 0
    left_s[1:] = np.where(follows, np.maximum(left_s[1:], end_s[order][:-1]), left_s[1:])
    in_time = np.lexsort((start_s[order], end_s[order]))
    return sends[order][in_time], left_s[in_time]


def fed_stage(send: Event) -> int:
    """Return the stage that a send feeds: activations go to the next one, gradients to the one before."""
    return send.stage + 1 if send.action == Kind.FORWARD else send.stage - 1


def input_of(compute: Event) -> tuple[object, ...]:
    """Return what a compute takes from another device, by the key of `input_from`; weight gradients take nothing."""
    action = Kind.BACKWARD if compute.action == Kind.BACKWARD_INPUT else compute.action
    return compute.device, compute.pipeline, compute.stage, compute.step, action, compute.microbatch


def input_from(send: Event) -> tuple[object, ...]:
    """Return what a send feeds, by the key of `input_of`."""
    return send.peer, send.pipeline, fed_stage(send), send.step, send.action, send.microbatch
