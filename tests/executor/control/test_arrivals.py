"""The arrivals that receivers have seen come into the rows of the sends: against logs of the simulator."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from executor.control.record.arrivals import LateArrivals, with_arrivals
from planner.adapt.observation import is_exchange
from planner.events.event import PROBE_ACTION, Event, EventKind
from planner.plan.outer_step import OuterStep
from planner.runs.record import RunRecord
from sim.simulator import Simulator
from tests.helpers.strategies.run_strategies import chains
from tests.helpers.strategies.scripted_policy import Scripted
from tests.sim.test_outer_steps import regions


def send(microbatch: int, start_s: float, end_s: float, arrived_s: float = -1.0) -> Event:
    return Event(EventKind.SEND, "a", "b", 0, 0, microbatch, 0, "F", start_s, end_s, 8, arrived_s=arrived_s)


def arrival(microbatch: int, start_s: float, end_s: float) -> Event:
    return Event(EventKind.RECEIVE, "b", "a", 0, 1, microbatch, 0, "F", start_s, end_s, 8)


def test_a_send_gets_its_arrival() -> None:
    # The first was waited for; the second only told when it came, and its row goes.
    rows = [send(0, 1.0, 1.001), send(1, 1.0, 1.002), arrival(0, 0.5, 3.0), arrival(1, 4.0, 4.0)]
    assert with_arrivals(rows) == [send(0, 1.0, 1.001, 3.0), send(1, 1.0, 1.002, 4.0), arrival(0, 0.5, 3.0)]


def test_nothing_arrives_before_it_is_sent_and_what_nobody_saw_has_no_arrival() -> None:
    assert with_arrivals([send(0, 1.0, 1.001), arrival(0, 0.9, 0.9)]) == [send(0, 1.0, 1.001, 1.0)]
    assert with_arrivals([send(0, 1.0, 1.001)]) == [send(0, 1.0, 1.001)]


def as_seen(record: RunRecord) -> list[Event]:
    """The rows of a run as ranks write them: sends without arrivals, and a row for every arrival."""
    waited = {_key(e, e.peer, e.device, e.stage) for e in record.events if e.kind is EventKind.RECEIVE}
    rows: list[Event] = []
    for event in record.events:
        if event.kind is not EventKind.SEND:
            rows.append(event)
            continue
        rows.append(replace(event, arrived_s=-1.0))
        stage = event.stage + 1 if event.action == "F" else event.stage - 1
        if event.action in ("S", PROBE_ACTION) or _key(event, event.device, event.peer, stage) not in waited:
            told = replace(event, kind=EventKind.RECEIVE, device=event.peer, peer=event.device, stage=stage)
            rows.append(replace(told, start_s=event.arrived_s, end_s=event.arrived_s, arrived_s=-1.0))
    return rows


def _key(event: Event, source: str, target: str, stage: int) -> tuple[object, ...]:
    return source, target, event.step, event.action, event.pipeline, stage, event.microbatch


@settings(max_examples=25)
@given(chains())
def test_the_simulators_arrivals_come_back(case: tuple) -> None:
    scenario, plan = case[:2]
    record = Simulator().run(scenario, plan, Scripted({}), 3)
    assert any(event.action == PROBE_ACTION for event in record.events) == (len(plan.devices) > 1)
    assert _sends(with_arrivals(as_seen(record))) == _sends(record.events)


@settings(max_examples=25)
@given(st.lists(st.floats(0, 25), max_size=12), st.floats(0, 3))
def test_arrivals_come_back_whatever_part_a_send_and_its_arrival_come_with(cuts_s: list[float], late_s: float) -> None:
    """Rows come when they end; those of exchanges later than the marks of their arrivals, or before."""
    record = Simulator().run(*regions([1.0, 1.5], [0.5, 2.0], 3, OuterStep(fragments=2, overlap_steps=1)), None, 12)
    comes_s = [(event.end_s + late_s * is_exchange(event), event) for event in as_seen(record)]
    late, found = LateArrivals(), list[Event]()
    bounds_s = [-1.0, *sorted(cuts_s), 1e9]
    for begin_s, end_s in pairwise(bounds_s):
        found += late.add(event for at_s, event in comes_s if begin_s < at_s <= end_s)
        assert all(event.arrived_s >= 0 for event in found if is_exchange(event))
    assert _sends(found) == _sends(record.events)
    assert late.drop() == []


def test_rows_that_wait_are_given_back_without_arrivals() -> None:
    late = LateArrivals()
    update = replace(send(-1, 1.0, 2.0), action="U")
    told = replace(arrival(-1, 3.0, 3.0), action="U")
    assert late.add([update, send(0, 1.0, 2.0)]) == [send(0, 1.0, 2.0)]
    assert late.drop() == [update]
    # What arrives afterwards belongs to steps that are done again.
    assert late.add([told]) == []
    assert late.drop() == []


def _sends(events: Iterable[Event]) -> list[tuple[object, ...]]:
    return sorted(
        (e.device, e.peer, e.step, e.action, e.start_s, e.end_s, e.arrived_s)
        for e in events
        if e.kind is EventKind.SEND
    )
