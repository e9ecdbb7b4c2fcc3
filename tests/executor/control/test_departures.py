"""When sends ended, found out from when they arrived: against logs of the simulator, which knows both."""

from dataclasses import replace

from hypothesis import given, settings

from executor.control.results import settle_departures, settling
from planner.events.event import Event, EventKind
from planner.runs.record import RunRecord
from planner.scenario.scenario import Scenario
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import mesh_scenario
from tests.helpers.strategies.run_strategies import chains

LATENCY_S = 0.25


def send(microbatch: int, start_s: float, end_s: float, action: str = "F") -> Event:
    return Event(EventKind.SEND, "a", "b", 0, 0 if action == "F" else 1, microbatch, 0, action, start_s, end_s, 8)


def arrival(microbatch: int, start_s: float, end_s: float, action: str = "F") -> Event:
    return Event(EventKind.RECEIVE, "b", "a", 0, 1 if action == "F" else 0, microbatch, 0, action, start_s, end_s, 8)


def after(events: list[Event]) -> list[Event]:
    return settle_departures(events, lambda source, target, now_s: LATENCY_S)


def test_a_send_ends_a_latency_before_it_arrives() -> None:
    # The first was waited for; the second only told when it came, and its row goes.
    rows = [send(0, 1.0, 1.001), send(1, 1.0, 1.002), arrival(0, 0.5, 3.0), arrival(1, 4.0, 4.0)]
    assert after(rows) == [send(0, 1.0, 2.75), send(1, 1.0, 3.75), arrival(0, 0.5, 3.0)]


def test_a_send_never_ends_before_it_began_and_one_that_nobody_saw_stays() -> None:
    assert after([send(0, 1.0, 1.001), arrival(0, 1.1, 1.1)]) == [send(0, 1.0, 1.0)]
    assert after([send(0, 1.0, 1.001)]) == [send(0, 1.0, 1.001)]


def test_a_shaper_knew_already() -> None:
    scenario = mesh_scenario(2, [1.0, 1.0], [1.0, 1.0])
    rows = [send(0, 1.0, 2.0), arrival(0, 4.0, 4.0)]
    assert settling("shaper", scenario.cluster)(rows) == [send(0, 1.0, 2.0)]


def blurred(record: RunRecord, scenario: Scenario) -> list[Event]:
    """The rows of a run as ranks write them: sends end when the system has the bytes; every arrival has a row."""
    latency_s = {link.name: link.latency_s for link in scenario.cluster.links}
    waited = {_key(e, e.peer, e.device, e.stage): e for e in record.events if e.kind is EventKind.RECEIVE}
    rows: list[Event] = []
    for event in record.events:
        if event.kind is not EventKind.SEND:
            rows.append(event)
            continue
        rows.append(replace(event, end_s=event.start_s))
        stage = event.stage + 1 if event.action == "F" else event.stage - 1
        if event.action == "S" or _key(event, event.device, event.peer, stage) not in waited:
            path = scenario.cluster.path(event.device, event.peer)
            at_s = event.end_s + sum(latency_s[link.name] for link in path)
            told = replace(event, kind=EventKind.RECEIVE, device=event.peer, peer=event.device, stage=stage)
            rows.append(replace(told, start_s=at_s, end_s=at_s))
    return rows


def _key(event: Event, source: str, target: str, stage: int) -> tuple[object, ...]:
    return source, target, event.step, event.action, event.pipeline, stage, event.microbatch


@settings(deadline=None, max_examples=25)
@given(chains())
def test_the_simulators_departures_come_back(case: tuple) -> None:
    scenario, plan = case[:2]
    record = Simulator().run(scenario, plan, None, 2)
    found = settling("relay", scenario.cluster)(blurred(record, scenario))
    expected = sorted((e.device, e.peer, e.step, e.action, e.start_s, round(e.end_s, 6)) for e in _sends(record.events))
    assert sorted((e.device, e.peer, e.step, e.action, e.start_s, round(e.end_s, 6)) for e in _sends(found)) == expected


def _sends(events: object) -> list[Event]:
    return [event for event in events if event.kind is EventKind.SEND]  # type: ignore[attr-defined]
