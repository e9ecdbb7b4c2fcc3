"""Events of a run, their order, and their Parquet files."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from planner.events.arrow import number_array, text_array
from planner.scenario.faults import Absence, Fault, LinkOutage


class EventKind(StrEnum):
    """Kinds of events."""

    COMPUTE = "compute"
    SEND = "send"
    RECEIVE = "receive"
    SYNC = "sync"
    DECISION = "decision"
    UPDATE = "update"
    FAULT = "fault"
    MIGRATE = "migrate"
    BACKUP = "backup"


@dataclass(frozen=True, slots=True)
class Event:
    """One interval of a run: a device computes, communicates or fails, or a policy decides.

    - ``send``: from the call that sends until the last byte has left; in a real run over TCP, until the system has
      taken it. ``arrived_s`` is when the receiver had it.
    - ``receive``: from the moment at which the device has nothing else to do until the bytes have arrived. Bytes that
      arrive before that moment have no event.
    - ``update``: from the arrival of another pipeline's update until the update is applied, in the simulator at once,
      in the executor with the receiver's next update. ``step`` is the sender's step.
    - ``update`` with the action O (diloco-decoupled): from the arrival of pseudo-gradients at a syncer until its outer
      step, or from the arrival of common parameters at a worker until it takes them over. ``step`` is the worker's
      step, or the number of outer steps that the parameters have had.
    - ``fault``: while a device is absent or hangs, or a link is out; ``action`` is ``absent``, ``hangs`` or ``out``.
      For a link, ``device`` and ``peer`` are its ends.
    - ``migrate``: as ``send``, for the state of layers that change devices; ``step`` is the first step of the new plan.
      With diloco-decoupled, for the state that a worker gives one that returns; ``step`` is -1.
    - ``backup``: as ``send``, for a copy of the state of layers before ``step``, which another device keeps.

    ``pipeline``, ``stage``, ``microbatch`` and ``step`` are indices, -1 where they do not apply. Times are in seconds
    from the start of the run. In a real run they are readings of the clock of the rank that saw the start or the end,
    also if compute is paced.

    Attributes:
        peer: Name of the other device of a transfer, or the other end of a link; empty for other events.
        action: F (forward), B (unsplit backward), I (input gradient) or W (weight gradient), of a compute or of the
            compute whose result is transferred; S: sum of gradients; U: optimizer's update, or update sent to another
            pipeline; O: outer step; M: migration of layers; P: probe of a path, or of a link that the plan does not use
            (then of no pipeline); K: backup; or the kind of a fault.
        size_bytes: Bytes on the wire; 0 for kinds other than send, receive, sync, update, migrate and backup.
        staleness: Number of the receiver's steps that another pipeline's update did not include; at a syncer, number of
            outer steps; -1 for other events.
        arrived_s: Arrival of the last byte of a send, migration or backup, by the receiver's clock; -1 for other
            events, and if no arrival was seen.
        late_s: How much later than planned an action of paced compute ended, seconds, because the machine was busy; 0
            for other events.
    """

    kind: EventKind
    device: str
    peer: str
    pipeline: int
    stage: int
    microbatch: int
    step: int
    action: str
    start_s: float
    end_s: float
    size_bytes: int
    staleness: int = -1
    arrived_s: float = -1.0
    late_s: float = 0.0


SYNC_ACTION = "S"
UPDATE_ACTION = "U"
OUTER_ACTION = "O"
MIGRATE_ACTION = "M"
PROBE_ACTION = "P"
BACKUP_ACTION = "K"

_ARROW: dict[Any, pa.DataType] = {EventKind: pa.string(), str: pa.string(), int: pa.int32(), float: pa.float64()}
SCHEMA = pa.schema(
    [(each.name, pa.int64() if each.name == "size_bytes" else _ARROW[each.type]) for each in fields(Event)]
)


def is_exchange(event: Event) -> bool:
    """Return whether a row is the send of an update between pipelines, which later steps may overtake."""
    return event.kind is EventKind.SEND and event.action == UPDATE_ACTION


def in_order(events: Iterable[Event]) -> list[Event]:
    """Return the events sorted by start; other fields break ties, so that the order is unique."""
    return sorted(
        events,
        key=lambda e: (e.start_s, e.end_s, e.device, e.kind, e.peer, e.step, e.stage, e.microbatch, e.size_bytes),
    )


def to_table(events: Iterable[Event]) -> pa.Table:
    """Return the events as an Arrow table with a column per field."""
    rows = list(events)
    columns = []
    for field in SCHEMA:
        values = [getattr(row, field.name) for row in rows]
        columns.append(text_array(values) if field.type == pa.string() else number_array(values, field.type))
    return pa.Table.from_arrays(columns, schema=SCHEMA)


# Rows of a row group of a Parquet file, all of which are in memory while the file is written in parts.
GROUP_ROWS = 131_072


def write_events(events: Iterable[Event], path: Path) -> None:
    """Write the events to a Parquet file; equal events give equal bytes."""
    pq.write_table(to_table(events), path, row_group_size=GROUP_ROWS)


class EventWriter:
    """Writes events to an Arrow stream part by part, so that a long run need not hold them all.

    Args:
        path: Path of the file, which `read_event_stream` reads at any time.
    """

    def __init__(self, path: Path) -> None:
        self._file = pa.OSFile(str(path), "wb")
        self._stream = pa.ipc.new_stream(self._file, SCHEMA)

    def append(self, events: Iterable[Event]) -> None:
        """Append these events to the file; then they outlive this process."""
        self._stream.write_table(to_table(events))

    def close(self) -> None:
        """Complete the file and close it."""
        self._stream.close()
        self._file.close()


def read_event_stream(path: Path) -> list[Event]:
    """Return the events that an `EventWriter` has written, up to the part that a killed process has left torn."""
    parts = []
    with pa.OSFile(str(path)) as file, suppress(pa.ArrowInvalid, OSError), pa.ipc.open_stream(file) as stream:
        # Reading stops with an error at a torn part, and without one where the writer was not closed.
        parts.extend(stream)
    columns = pa.Table.from_batches(parts, SCHEMA).to_pydict()
    kinds = [EventKind(kind) for kind in columns.pop("kind")]
    return [Event(*row) for row in zip(kinds, *columns.values(), strict=True)]


ABSENT, HANGS, OUT = "absent", "hangs", "out"


def fault_events(faults: Iterable[Fault], end_s: float) -> list[Event]:
    """Return an event for each fault that starts before the run's end, ``end_s``, at which longer faults are cut."""
    return [_scheduled(fault, min(fault.end_s, end_s)) for fault in faults if fault.start_s < end_s]


def fault_event(device: str, action: str, start_s: float, end_s: float, peer: str = "") -> Event:
    """Return the event of a fault, with times in seconds from the start of the run."""
    return Event(EventKind.FAULT, device, peer, -1, -1, -1, -1, action, start_s, end_s, 0)


def _scheduled(fault: Fault, end_s: float) -> Event:
    if isinstance(fault, LinkOutage):
        source, target = fault.link.split("->")
        return fault_event(source, OUT, fault.start_s, end_s, target)
    return fault_event(fault.device, ABSENT if isinstance(fault, Absence) else HANGS, fault.start_s, end_s)
