"""The arrivals of messages, which receivers see, in the rows of the senders."""

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

from planner.events.event import OUTER_ACTION, UPDATE_ACTION, Event, EventKind, is_exchange
from planner.plan.actions import Kind

# Identifies a message: sender, receiver, step, action, pipeline, receiving stage, microbatch.
_Identity = tuple[str, str, int, str, int, int, int]


def with_arrivals(events: Iterable[Event]) -> list[Event]:
    """Return the rows of all ranks, sends with `Event.arrived_s`, and without receives that only mark arrivals."""
    return _Arrivals().told(list(events))


def without_marks(events: Iterable[Event]) -> list[Event]:
    """Return the rows of ranks that see a message only when they use it, without receives that only mark arrivals."""
    return [event for event in events if not _only_marks(event)]


class LateArrivals:
    """Adds arrivals to rows that come in parts, one for each step.

    The exchanges of outer steps are under way during later steps: what tells the arrival of one comes with another part
    than its send, which waits for it.
    """

    def __init__(self) -> None:
        self._arrivals = _Arrivals()
        self._waiting: list[Event] = []

    def add(self, events: Iterable[Event]) -> list[Event]:
        """Take the rows of the next part; return those that are complete, as `with_arrivals` does."""
        rows = self._arrivals.told([*self._waiting, *events])
        self._arrivals.keep_late()
        complete = [event for event in rows if event.arrived_s >= 0 or not is_exchange(event)]
        self._waiting = [event for event in rows if event.arrived_s < 0 and is_exchange(event)]
        return complete

    def drop(self) -> list[Event]:
        """Await nothing any more; return the rows that have waited, without their arrivals."""
        waiting, self._waiting, self._arrivals = self._waiting, [], _Arrivals()
        return waiting


class _Arrivals:
    """The arrivals that no send has been given yet, in order, by message."""

    def __init__(self) -> None:
        self._rows = defaultdict[_Identity, deque[Event]](deque)

    def told(self, rows: Sequence[Event]) -> list[Event]:
        """Return rows with the arrivals that these or earlier ones tell, without receives that only mark arrivals."""
        for event in sorted(rows, key=_arrived_s):
            if event.kind is EventKind.RECEIVE:
                self._rows[_identity(event, event.peer, event.device, event.stage)].append(event)
            elif event.kind is EventKind.UPDATE and event.action != OUTER_ACTION:
                told = replace(event, action=UPDATE_ACTION)
                self._rows[_identity(told, event.peer, event.device, event.stage)].append(event)
        found = []
        for event in rows:
            if event.kind in (EventKind.SEND, EventKind.MIGRATE, EventKind.BACKUP):
                waiting = self._rows[_identity(event, event.device, event.peer, _receiving_stage(event))]
                if waiting:
                    # The clocks of two hosts differ, so that an arrival may seem to precede the send.
                    event = replace(event, arrived_s=max(event.start_s, _arrived_s(waiting.popleft())))
            if not _only_marks(event):
                found.append(event)
        return found

    def keep_late(self) -> None:
        """Forget the arrivals of all messages but exchanges, whose sends have come before."""
        late = {message: rows for message, rows in self._rows.items() if rows and message[3] == UPDATE_ACTION}
        self._rows = defaultdict(deque, late)


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
