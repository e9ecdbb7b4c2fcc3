"""The faults that fall into a run, as events.

Their action says what it was: ``absent``, ``hangs`` or ``out``; a link is named by its ends as device and peer.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from planner.scenario.faults import Absence, Fault, LinkOutage


class EventKind(StrEnum):
    """What happened."""

    COMPUTE = "compute"
    SEND = "send"
    RECEIVE = "receive"
    SYNC = "sync"
    DECISION = "decision"
    UPDATE = "update"
    FAULT = "fault"
    MIGRATE = "migrate"


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened on one device.

    A ``send`` lasts from the moment the bytes are handed over until the last one has left; a ``receive`` from the
    moment the device has nothing else to do until the bytes are there (it is absent where they were there before). An
    ``update``, of the sender's step, lasts from the arrival of what another pipeline sent without waiting until it is
    applied: at once in the simulator, with the receiver's next update in the executor. A ``fault`` lasts while a device
    is gone or hangs, or a link is out. A ``migrate``, of the first step that runs the new plan, is a send of state of
    layers that change devices. Times count from the start of the run.

    Attributes:
        kind: What happened.
        device: Where.
        peer: The other device of a send, receive or migrate, else empty.
        pipeline: Index of the pipeline, -1 where none applies.
        stage: The device's stage, -1 where none applies.
        microbatch: Index, -1 where none applies.
        step: Index of the training step.
        action: F, B, I or W: of a compute, or what a transfer feeds; S for gradients being summed; U for the
            optimizer's update, and for updates sent to another pipeline; M for layers that change devices.
        start_s: Seconds.
        end_s: Seconds.
        size_bytes: On the wire; 0 for anything but send, receive, sync, update and migrate.
        staleness: Of an update that another pipeline sent: steps of the receiver that it did not know of; else -1.
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


SYNC_ACTION = "S"
UPDATE_ACTION = "U"
MIGRATE_ACTION = "M"

_SCHEMA = pa.schema(
    [
        ("kind", pa.string()),
        ("device", pa.string()),
        ("peer", pa.string()),
        ("pipeline", pa.int32()),
        ("stage", pa.int32()),
        ("microbatch", pa.int32()),
        ("step", pa.int32()),
        ("action", pa.string()),
        ("start_s", pa.float64()),
        ("end_s", pa.float64()),
        ("size_bytes", pa.int64()),
        ("staleness", pa.int32()),
    ]
)
assert _SCHEMA.names == [field.name for field in fields(Event)]


def in_order(events: Iterable[Event]) -> list[Event]:
    """Return the events by time, with ties broken by what they are, so that a log has one order."""
    return sorted(events, key=lambda e: (e.start_s, e.end_s, e.device, e.kind, e.peer, e.step, e.stage, e.microbatch))


def to_table(events: Iterable[Event]) -> pa.Table:
    """Return the events as an Arrow table, a column per field."""
    rows = list(events)
    columns = [pa.array([getattr(row, field.name) for row in rows], field.type) for field in _SCHEMA]
    return pa.Table.from_arrays(columns, schema=_SCHEMA)


def write_events(events: Iterable[Event], path: Path) -> None:
    """Write the events to a Parquet file; equal events give equal bytes."""
    pq.write_table(to_table(events), path)


class EventWriter:
    """Writes events to a Parquet file part by part, so that a long run need not hold them all.

    Args:
        path: Of the file; it can be read once this is closed.
    """

    def __init__(self, path: Path) -> None:
        self._file = pq.ParquetWriter(path, _SCHEMA)
        # With its first array pyarrow loads pandas, for up to a second: now, not in the middle of a run.
        to_table([])

    def append(self, events: Iterable[Event]) -> None:
        """Write some more."""
        self._file.write_table(to_table(events))

    def close(self) -> None:
        """Complete the file."""
        self._file.close()


def read_events(path: Path) -> list[Event]:
    """Return the events of a Parquet file."""
    columns = pq.read_table(path, schema=_SCHEMA).to_pydict()
    # Runs of before pipelines could send updates do not say how stale these are.
    columns["staleness"] = [-1 if value is None else value for value in columns["staleness"]]
    kinds = [EventKind(kind) for kind in columns.pop("kind")]
    return [Event(*row) for row in zip(kinds, *columns.values(), strict=True)]


ABSENT, HANGS, OUT = "absent", "hangs", "out"


def fault_events(faults: Iterable[Fault], end_s: float) -> list[Event]:
    """Return a row for each fault that began before the run's end, a second of it, at which one that lasts is cut."""
    return [_foreseen(fault, min(fault.end_s, end_s)) for fault in faults if fault.start_s < end_s]


def fault_event(device: str, action: str, start_s: float, end_s: float, peer: str = "") -> Event:
    """Return the row of a fault from one second of the run to another."""
    return Event(EventKind.FAULT, device, peer, -1, -1, -1, -1, action, start_s, end_s, 0)


def _foreseen(fault: Fault, end_s: float) -> Event:
    if isinstance(fault, LinkOutage):
        source, target = fault.link.split("->")
        return fault_event(source, OUT, fault.start_s, end_s, target)
    return fault_event(fault.device, ABSENT if isinstance(fault, Absence) else HANGS, fault.start_s, end_s)
