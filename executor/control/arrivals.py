"""The arrivals of messages, which receivers see, in the rows of the senders."""

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import replace

from planner.events.event import OUTER_ACTION, UPDATE_ACTION, Event, EventKind
from planner.plan.actions import Kind

# Identifies a message: sender, receiver, step, action, pipeline, receiving stage, microbatch.
_Identity = tuple[str, str, int, str, int, int, int]


def with_arrivals(events: Iterable[Event]) -> list[Event]:
    """Return the rows of all ranks, sends with `Event.arrived_s`, and without receives that only mark arrivals."""
    rows = list(events)
    arrivals: defaultdict[_Identity, deque[Event]] = defaultdict(deque)
    for event in sorted(rows, key=_arrived_s):
        if event.kind is EventKind.RECEIVE:
            arrivals[_identity(event, event.peer, event.device, event.stage)].append(event)
        elif event.kind is EventKind.UPDATE and event.action != OUTER_ACTION:
            told = replace(event, action=UPDATE_ACTION)
            arrivals[_identity(told, event.peer, event.device, event.stage)].append(event)
    found = []
    for event in rows:
        if event.kind in (EventKind.SEND, EventKind.MIGRATE, EventKind.BACKUP):
            waiting = arrivals[_identity(event, event.device, event.peer, _receiving_stage(event))]
            if waiting:
                # The clocks of two hosts differ, so that an arrival may seem to precede the send.
                event = replace(event, arrived_s=max(event.start_s, _arrived_s(waiting.popleft())))
        if not _only_marks(event):
            found.append(event)
    return found


def without_marks(events: Iterable[Event]) -> list[Event]:
    """Return the rows of ranks that see a message only when they use it, without receives that only mark arrivals."""
    return [event for event in events if not _only_marks(event)]


def _only_marks(event: Event) -> bool:
    return event.kind is EventKind.RECEIVE and event.start_s == event.end_s


def _arrived_s(event: Event) -> float:
    """Return when a message arrived: the end of a receive's row, or the start of an update's row."""
    return event.start_s if event.kind is EventKind.UPDATE else event.end_s


def _identity(event: Event, source: str, target: str, stage: int) -> _Identity:
    # Gradient sums have no stage, and their sender and receiver may be in different pipelines.
    between_stages = event.action in set(Kind)
    pipeline, stage = (event.pipeline, stage) if between_stages else (-1, -1)
    return source, target, event.step, event.action, pipeline, stage, event.microbatch


def _receiving_stage(event: Event) -> int:
    return event.stage + 1 if event.action == Kind.FORWARD else event.stage - 1
