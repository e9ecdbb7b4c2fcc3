"""Files of events that are read and written part by part, so that memory does not grow with the length of a run."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from planner.events.arrow import number_array, numbers_of, text_array
from planner.events.event import GROUP_ROWS, SCHEMA, EventKind
from planner.events.log import FIELDS, TEXTS, TIMES, EventLog, EventParts, join
from traces.common.errors import InputError, RunError

# Rows that are in memory at once while a file is read or spooled.
PART_ROWS = 65_536

# Columns of events in the order in which they came; texts are indices.
_UNSORTED = pa.schema([(name, pa.float64() if name in TIMES else pa.int64()) for name in FIELDS])


class EventFile(EventParts):
    """The events of a Parquet file, of which only a part is in memory at a time.

    The file stays open, and can be read after it has been renamed.

    Args:
        path: File that `planner.events.event.write_events` or `EventSpool` wrote.
        names: Strings that occur in the file, in the order in which parts number them; by default in the order of
            their first occurrence.

    Raises:
        ValueError: The file is not Parquet, or another version of ropebridge has written it.
    """

    def __init__(self, path: Path, names: Sequence[str] | None = None) -> None:
        self.path = path
        if path.exists() and not path.is_file():
            raise ValueError(f"{path.name} is no file")
        self._file = pq.ParquetFile(path, read_dictionary=sorted(TEXTS))
        schema = pq.read_schema(path)
        if schema != SCHEMA:
            raise ValueError(f"{path.name} has the columns {', '.join(schema.names)}; it is of another version")
        self._given = names
        for name in self._occurring("kind"):
            EventKind(name)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Strings that occur in the fields `TEXTS`."""
        if self._given is not None:
            return tuple(self._given)
        return tuple(dict.fromkeys(name for field in FIELDS if field in TEXTS for name in self._occurring(field)))

    def parts(self) -> Iterator[EventLog]:
        """Read the events in order, at most `PART_ROWS` at a time; all parts number the names alike.

        Raises:
            InputError: The file is damaged.
        """
        number = {name: index for index, name in enumerate(self.names)}
        for batch in self._batches(FIELDS):
            columns: dict[str, NDArray[Any]] = {}
            for name in FIELDS:
                column = batch.column(name)
                if name in TEXTS:
                    of_entry = np.array([number[text] for text in column.dictionary.to_pylist()], np.int64)
                    columns[name] = of_entry[numbers_of(column.indices)]
                else:
                    columns[name] = numbers_of(column).astype(np.float64 if name in TIMES else np.int64, copy=False)
            yield EventLog(self.names, columns)

    def __len__(self) -> int:
        return int(self._file.metadata.num_rows)

    def _occurring(self, field: str) -> list[str]:
        found: dict[str, None] = {}
        for batch in self._batches([field]):
            column = batch.column(0)
            _, firsts = np.unique(numbers_of(column.indices), return_index=True)
            found |= dict.fromkeys(column[int(first)].as_py() for first in np.sort(firsts))
        return list(found)

    def _batches(self, fields: Sequence[str]) -> Iterator[pa.RecordBatch]:
        try:
            for batch in self._file.iter_batches(PART_ROWS, columns=list(fields), use_threads=False):
                if any(column.null_count for column in batch.columns):
                    raise ValueError("an event lacks a value")
                yield batch
        except (OSError, ValueError, pa.ArrowException) as error:
            raise InputError(f"the events are damaged: {error}", where=str(self.path), valid="run it again") from None


class EventSpool:
    """Takes the events of a run as they happen, and writes them to a file in order when the run is over.

    Meanwhile they are in a file beside it, in the order in which they came. They are then sorted by merging: a part is
    read when the events before it have been written.

    Args:
        path: Path of the file to write.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unsorted = path.with_suffix(".unsorted")
        # Closed by `sort`. If the run fails first, its folder is removed with the file in it.
        self._writer = pq.ParquetWriter(self._unsorted, _UNSORTED, compression="zstd")
        self._starts_s: list[float] = []

    def append(self, columns: dict[str, NDArray[Any]]) -> None:
        """Write the columns of at least one event; those of `TEXTS` hold indices into the names that `sort` takes.

        Raises:
            RunError: The disk is full or fails.
        """
        try:
            arrays = [number_array(columns[field.name], field.type) for field in _UNSORTED]
            self._writer.write_table(pa.Table.from_arrays(arrays, schema=_UNSORTED), len(columns["start_s"]))
        except OSError as error:
            raise self._unwritable(error) from error
        self._starts_s.append(float(columns["start_s"].min()))

    def sort(self, names: tuple[str, ...]) -> EventFile:
        """Write all events in the order of `planner.events.event.in_order`, and return the file.

        Raises:
            RunError: The disk is full or fails.
        """
        try:
            self._writer.close()
            _write_sorted(self._merged(names), self._path)
            self._unsorted.unlink()
            return EventFile(self._path, names)
        except OSError as error:
            raise self._unwritable(error) from error

    def _merged(self, names: tuple[str, ...]) -> Iterator[EventLog]:
        """Yield the events in order, several at a time."""
        order = sorted(range(len(self._starts_s)), key=self._starts_s.__getitem__)
        later_s = [self._starts_s[part] for part in order[1:]]
        # Rows that no part after the one read last precedes can be written. Ties keep the order of the run.
        pending: dict[int, EventLog] = {}
        with pq.ParquetFile(self._unsorted) as file:
            for part, until_s in zip(order, [*later_s, np.inf], strict=True):
                table = file.read_row_group(part, use_threads=False)
                chunks = {name: table.column(name).chunks for name in FIELDS}
                columns = {name: np.concatenate([*map(numbers_of, chunks[name])]) for name in FIELDS}
                pending[part] = EventLog(names, columns)
                ready = []
                for number in sorted(pending):
                    log = pending.pop(number)
                    is_ready = log.columns["start_s"] < until_s
                    ready.append(log.take(np.flatnonzero(is_ready)))
                    if not is_ready.all():
                        pending[number] = log.take(np.flatnonzero(~is_ready))
                yield join(ready).in_order()

    def _unwritable(self, error: OSError) -> RunError:
        return RunError(f"the run cannot be written into '{self._path.parent}': {error.strerror or error}")


def _table(log: EventLog) -> pa.Table:
    """Return a log as `planner.events.event.to_table` does, without an object for each event."""
    arrays = []
    for field in SCHEMA:
        column = log.columns[field.name]
        is_text = field.name in TEXTS
        arrays.append(text_array(log.names, column.tolist()) if is_text else number_array(column, field.type))
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def _write_sorted(logs: Iterable[EventLog], path: Path) -> None:
    """Write logs to a Parquet file; the bytes are those that `planner.events.event.write_events` would write."""
    waiting: list[pa.Table] = []
    rows = 0
    with pq.ParquetWriter(path, SCHEMA) as writer:
        for log in logs:
            waiting.append(_table(log))
            rows += len(log)
            while rows >= GROUP_ROWS:
                joined = pa.concat_tables(waiting)
                writer.write_table(joined.slice(0, GROUP_ROWS).combine_chunks(), GROUP_ROWS)
                waiting, rows = [joined.slice(GROUP_ROWS)], rows - GROUP_ROWS
        if rows:
            writer.write_table(pa.concat_tables(waiting).combine_chunks(), GROUP_ROWS)
