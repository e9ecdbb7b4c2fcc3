"""Events in columns are the events, in every way of looking at them."""

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.events.event import Event, EventKind, in_order, to_table, write_events
from planner.events.file import EventFile, EventSpool
from planner.events.log import FIELDS, TEXTS, TIMES, EventLog, as_log

NAMES = st.sampled_from(["", "a", "b", "Zürich", "compute", "device-10", "device-9", "F"])
NUMBERS = st.integers(-1, 3)
TIMES_S = st.sampled_from([0.0, 0.5, 1.0]) | st.floats(0, 1e6)
EVENTS = st.builds(
    Event,
    st.sampled_from(EventKind),
    NAMES,
    NAMES,
    NUMBERS,
    NUMBERS,
    NUMBERS,
    NUMBERS,
    st.sampled_from(["", "F", "B", "I", "W", "S", "U", "absent"]),
    TIMES_S,
    TIMES_S,
    st.integers(0, 2**62),
    NUMBERS,
)
LISTS = st.lists(EVENTS, max_size=12)

EVENT = Event(EventKind.UPDATE, "a", "b", 0, 1, -1, 2, "", 3.5, 3.5, 100, 4)


@given(LISTS)
def test_a_log_is_the_list_of_its_events(events: list[Event]) -> None:
    log = EventLog.from_events(iter(events))
    assert list(log) == events
    assert log == events
    assert len(log) == len(events)
    assert list(reversed(log)) == events[::-1]
    assert as_log(log) is log
    assert as_log(events) == log == as_log(tuple(events))
    for event in events:
        assert event in log
        assert log.index(event) == events.index(event)
        assert log.count(event) == events.count(event)
    assert all(type(event.kind) is EventKind for event in log)


@given(LISTS, LISTS)
def test_logs_are_equal_where_their_events_are(events: list[Event], others: list[Event]) -> None:
    assert (EventLog.from_events(events) == EventLog.from_events(others)) == (events == others)
    assert (EventLog.from_events(events) == others) == (events == others)
    # Texts that no row uses make no difference, nor does their numbering.
    joined = EventLog.from_events([*others, *events])[len(others) :]
    assert joined == EventLog.from_events(events)


@given(LISTS, st.slices(12))
def test_slices_and_places_are_those_of_the_list(events: list[Event], part: slice) -> None:
    log = EventLog.from_events(events)
    assert isinstance(log[part], EventLog)
    assert log[part] == events[part]
    for place in range(-len(events), len(events)):
        assert log[place] == events[place]
    for place in (len(events), -len(events) - 1):
        with pytest.raises(IndexError):
            log[place]


@given(LISTS, st.data())
def test_rows_are_taken_in_the_order_in_which_they_are_named(events: list[Event], data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(0, len(events) - 1), max_size=20)) if events else []
    assert EventLog.from_events(events).take(np.array(rows, np.intp)) == [events[row] for row in rows]


@given(LISTS)
def test_the_order_is_that_of_a_list(events: list[Event]) -> None:
    # Rows that tie in all that the order looks at keep theirs.
    assert EventLog.from_events(events).in_order() == in_order(events)


@given(LISTS, st.sets(st.sampled_from(EventKind)))
def test_texts_and_kinds(events: list[Event], kinds: set[EventKind]) -> None:
    log = EventLog.from_events(events)
    for field in TEXTS:
        assert log.texts(field).tolist() == [str(getattr(event, field)) for event in events]
    assert log.is_a(*kinds).tolist() == [event.kind in kinds for event in events]


@given(LISTS)
def test_a_column_for_each_field(events: list[Event]) -> None:
    log = EventLog.from_events(events)
    assert tuple(log.columns) == FIELDS == tuple(field.name for field in fields(Event))
    for name in set(FIELDS) - TEXTS:
        assert log.columns[name].tolist() == [getattr(event, name) for event in events]
        assert log.columns[name].dtype == (np.float64 if name in TIMES else np.int64)


@given(LISTS)
def test_a_file_holds_the_events(tmp_path_factory: pytest.TempPathFactory, events: list[Event]) -> None:
    folder = tmp_path_factory.mktemp("events")
    write_events(EventLog.from_events(events), folder / "log.parquet")
    write_events(events, folder / "list.parquet")
    assert list(EventFile(folder / "log.parquet")) == events
    assert (folder / "log.parquet").read_bytes() == (folder / "list.parquet").read_bytes()
    assert tuple(pq.read_schema(folder / "log.parquet").names) == FIELDS


def test_a_log_without_events(tmp_path: Path) -> None:
    log = EventLog.from_events(())
    assert list(log) == [] == list(log.in_order()) == list(log[:5])
    assert log.is_a(*EventKind).tolist() == log.texts("device").tolist() == []
    write_events(log, tmp_path / "events.parquet")
    assert list(EventFile(tmp_path / "events.parquet")) == []


def test_a_log_is_no_key_and_no_text() -> None:
    with pytest.raises(TypeError):
        hash(EventLog.from_events([EVENT]))
    assert EventLog.from_events([EVENT]) != "e"
    assert EventLog.from_events([EVENT]) != 1


def test_a_file_of_another_version_is_refused(tmp_path: Path) -> None:
    table = to_table([EVENT]).drop_columns(["late_s"])
    pq.write_table(table, tmp_path / "events.parquet")
    with pytest.raises(ValueError, match=r"events\.parquet has the columns .*, arrived_s; it is of another version"):
        EventFile(tmp_path / "events.parquet")


def test_numbers_that_do_not_fit_their_column_are_refused(tmp_path: Path) -> None:
    log = EventLog.from_events([replace(EVENT, step=2**31)])
    spool = EventSpool(tmp_path / "events.parquet")
    spool.append(dict(log.columns))
    with pytest.raises(OverflowError, match="do not fit int32"):
        spool.sort(log.names)
    with pytest.raises(OverflowError):
        to_table([replace(EVENT, step=2**31)])
