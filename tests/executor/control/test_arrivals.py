"""The arrivals that receivers have seen come into the rows of the sends: against logs of the simulator."""

from collections.abc import Iterable
from dataclasses import replace

from hypothesis import given, settings

from executor.control.arrivals import with_arrivals
from planner.events.event import PROBE_ACTION, Event, EventKind
from planner.runs.record import RunRecord
from sim.simulator import Simulator
from tests.helpers.strategies.run_strategies import chains
from tests.helpers.strategies.scripted_policy import Scripted


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


def _sends(events: Iterable[Event]) -> list[tuple[object, ...]]:
    return sorted(
        (e.device, e.peer, e.step, e.action, e.start_s, e.end_s, e.arrived_s)
        for e in events
        if e.kind is EventKind.SEND
    )
