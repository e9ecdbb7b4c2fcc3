"""Events stored in columns, which saves memory and time for runs with a thousand devices."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from planner.events.event import Event, EventKind

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class EventLog(Sequence[Event]):
    """A sequence of events, stored as a column per field of `planner.events.event.Event`.

    Attributes:
        names: Strings that occur in the fields `TEXTS`; the columns of these fields hold indices into this tuple.
        columns: Column of each field, shape [events]; float64 for `TIMES`, int64 for all others.
    """

    names: tuple[str, ...]
    columns: dict[str, NDArray[Any]]

    @classmethod
    def from_events(cls, events: Iterable[Event]) -> "EventLog":
        """Return a log of these events, in the given order."""
        rows = list(events)
        numbers: dict[str, int] = {}
        columns = {}
        for name in FIELDS:
            values = [getattr(row, name) for row in rows]
            if name in TEXTS:
                values = [numbers.setdefault(str(value), len(numbers)) for value in values]
            columns[name] = np.array(values, np.float64 if name in TIMES else np.int64)
        return cls(tuple(numbers), columns)

    def __len__(self) -> int:
        return len(self.columns["start_s"])

    def __iter__(self) -> Iterator[Event]:
        names = self.names
        kinds = {number: EventKind(name) for number, name in enumerate(names) if name in set(EventKind)}
        for row in zip(*(self.columns[name].tolist() for name in FIELDS), strict=True):
            kind, device, peer, pipeline, stage, microbatch, step, action, *rest = row
            place = (names[device], names[peer], pipeline, stage, microbatch, step)
            yield Event(kinds[kind], *place, names[action], *rest)

    @overload
    def __getitem__(self, index: int) -> Event: ...

    @overload
    def __getitem__(self, index: slice) -> "EventLog": ...

    def __getitem__(self, index: int | slice) -> "Event | EventLog":
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        (event,) = self.take(np.array([range(len(self))[index]]))
        return event

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Sequence)
            and len(self) == len(other)
            and all(a == b for a, b in zip(self, other, strict=True))
        )

    __hash__ = None  # type: ignore[assignment]

    def take(self, rows: NDArray[np.intp]) -> "EventLog":
        """Return a log of the events with these indices, in this order."""
        return EventLog(self.names, {name: column[rows] for name, column in self.columns.items()})

    def texts(self, field: str) -> NDArray[np.str_]:
        """Return the column of a field of `TEXTS` as strings, shape [events]."""
        return np.array(self.names)[self.columns[field]] if self.names else np.empty(0, np.str_)

    def frame(self) -> "pd.DataFrame":
        """Return the events as a pandas table: a row per event, a column per field."""
        # Imported here because pandas takes longer to load than the planner.
        import pandas as pd

        return pd.DataFrame({name: self.texts(name) if name in TEXTS else self.columns[name] for name in FIELDS})

    def is_a(self, *kinds: EventKind) -> NDArray[np.bool_]:
        """Return a mask of the events of these kinds, bool, shape [events]."""
        wanted = [number for number, name in enumerate(self.names) if name in kinds]
        return np.isin(self.columns["kind"], wanted)

    def in_order(self) -> "EventLog":
        """Return the events in the order of `planner.events.event.in_order`."""
        place = np.empty(len(self.names), np.int64)
        place[np.argsort(np.array(self.names, dtype=np.str_), kind="stable")] = np.arange(len(self.names))
        keys = []
        for name in ("size_bytes", "microbatch", "stage", "step", "peer", "kind", "device", "end_s", "start_s"):
            column = self.columns[name]
            keys.append(place[column] if name in TEXTS else column)
        return self.take(np.lexsort(keys))


class EventParts(Sequence[Event]):
    """A sequence of events that are not in memory, but read part by part."""

    @abstractmethod
    def parts(self) -> Iterator[EventLog]:
        """Read the events in order, as logs that all have the same names."""

    def __iter__(self) -> Iterator[Event]:
        for part in self.parts():
            yield from part

    @overload
    def __getitem__(self, index: int) -> Event: ...

    @overload
    def __getitem__(self, index: slice) -> EventLog: ...

    def __getitem__(self, index: int | slice) -> Event | EventLog:
        return as_log(self)[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and as_log(self) == other

    __hash__ = None  # type: ignore[assignment]


FIELDS = tuple(field.name for field in fields(Event))
TEXTS = frozenset({"kind", "device", "peer", "action"})
TIMES = frozenset({"start_s", "end_s", "arrived_s", "late_s"})


def as_log(events: Sequence[Event]) -> EventLog:
    """Return the events, all in memory, as an `EventLog`; a log is returned unchanged."""
    if isinstance(events, EventParts):
        return join(list(events.parts()))
    return events if isinstance(events, EventLog) else EventLog.from_events(events)


def parts_of(events: Sequence[Event]) -> Iterator[EventLog]:
    """Yield the events as logs with the same names: one after the other if they are read in parts, else one."""
    yield from events.parts() if isinstance(events, EventParts) else (as_log(events),)


def join(logs: Sequence[EventLog]) -> EventLog:
    """Return the events of logs with the same names, one log after the other."""
    if not logs:
        return EventLog.from_events(())
    return EventLog(logs[0].names, join_columns([log.columns for log in logs]))


def join_columns(parts: Sequence[Mapping[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    """Return the columns of the events of several parts, one part after the other."""
    return {name: np.concatenate([part[name] for part in parts]) for name in FIELDS}
