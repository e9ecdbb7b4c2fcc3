"""What no run may break, whatever happens in it: bytes, rates, orders and causes, read from the events alone."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.events.event import SYNC_ACTION, UPDATE_ACTION, Event, EventKind
from planner.plan.plan import Plan
from planner.runs.record import RunRecord
from planner.scenario.cluster import Link
from planner.scenario.effects import ComputeEffects, Effects
from planner.scenario.faults import Absence, LinkOutage
from planner.scenario.scenario import Scenario
from planner.schedules.dynamic import SAME_MOMENT_S
from planner.step.compile import CompiledStep, compile_step
from sim.kernel.piecewise import RateTables, join_tables, link_table, moved
from sim.simulator import Simulator
from tests.helpers.strategies.run_strategies import (
    chains,
    in_order,
    on_shared_links,
    on_traces,
    replicated,
    with_effects,
    with_faults,
    without_waiting,
)
from traces.trace import LinkTrace

EXACT = 1e-9

# A device that chooses its actions does so up to this much after the end of each; messages of actions that take no time
# start as much later.
CHOICE_S = {"dynamic": SAME_MOMENT_S}

BASE = st.one_of(chains(), replicated())
STEADY = st.one_of(BASE, on_shared_links(replicated()))
SWAYING = st.one_of(on_traces(BASE), on_traces(on_shared_links(replicated())))


@st.composite
def orders(draw: st.DrawFn, cases: st.SearchStrategy[tuple[Scenario, Plan]]) -> tuple[Scenario, Plan]:
    scenario, plan = draw(cases)
    return scenario, in_order(plan, draw(st.sampled_from(["scheduled", "dynamic"])))


def of_kind(record: RunRecord, *kinds: EventKind) -> list[Event]:
    return [event for event in record.events if event.kind in kinds]


def by_pair(record: RunRecord) -> dict[tuple[str, str], list[Event]]:
    """Sends of each ordered pair of devices as they were handed over."""
    pairs: dict[tuple[str, str], list[Event]] = defaultdict(list)
    for event in sorted(of_kind(record, EventKind.SEND), key=lambda event: (event.start_s, event.end_s)):
        pairs[event.device, event.peer].append(event)
    return pairs


def ends(step: CompiledStep) -> list[tuple[int, int]]:
    """The actors that hand over and receive each message."""
    columns = (step.actions.actor[step.messages.sender], step.actions.actor[step.messages.receiver])
    return list(zip(*(column.tolist() for column in columns), strict=True))


# --- bytes ----------------------------------------------------------------------------------------------------


def every_message_of_every_step_departs_once_and_is_waited_for_once_at_most(record: RunRecord) -> None:
    steps = 1 + max(event.step for event in record.events)
    step = compile_step(record.plan, record.scenario)
    # A device and its lane are one.
    away = step.messages.size_bytes[[step.actors[a] != step.actors[b] for a, b in ends(step)]]
    sent = [event for event in of_kind(record, EventKind.SEND) if event.action != UPDATE_ACTION]
    assert len(sent) == steps * len(away)
    assert sum(event.size_bytes for event in sent) == steps * int(away.sum())
    assert all(np.isfinite(event.end_s) for event in sent)
    key = {(e.device, e.peer, e.action, e.microbatch, e.step, e.size_bytes) for e in sent if e.action != SYNC_ACTION}
    waits = of_kind(record, EventKind.RECEIVE)
    met = {(e.peer, e.device, e.action, e.microbatch, e.step, e.size_bytes) for e in waits}
    assert met <= key
    assert len(met) == len(waits)


def what_two_devices_exchange_keeps_its_order(record: RunRecord) -> None:
    for sends in by_pair(record).values():
        for earlier, later in pairwise(sends):
            assert earlier.end_s <= later.end_s
    # Arrivals are known of messages that somebody waited for.
    arrivals: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    sent_s = {(e.device, e.peer, e.action, e.microbatch, e.step): e.start_s for e in of_kind(record, EventKind.SEND)}
    for event in of_kind(record, EventKind.RECEIVE):
        start_s = sent_s[event.peer, event.device, event.action, event.microbatch, event.step]
        arrivals[event.peer, event.device].append((start_s, event.end_s))
    for pairs in arrivals.values():
        ends_s = [end_s for _, end_s in sorted(pairs)]
        assert ends_s == sorted(ends_s)


# --- rates ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Passage:
    """A message on a link: not before its handing over, nor before the one ahead of it had left."""

    begin_s: float
    end_s: float
    bits: float


def passages(record: RunRecord) -> dict[str, list[Passage]]:
    """What passed over each link, in terms of bits on the wire."""
    scenario = record.scenario
    efficiency = scenario.effects.network.payload_efficiency
    over: dict[str, list[Passage]] = defaultdict(list)
    for (source, target), sends in by_pair(record).items():
        free_s = 0.0
        for event in sends:
            begin_s, free_s = max(event.start_s, free_s), event.end_s
            for link in scenario.cluster.path(source, target):
                over[link.name].append(Passage(begin_s, event.end_s, 8 * event.size_bytes / efficiency))
    return over


def rates(link: Link, scenario: Scenario) -> RateTables:
    trace = link.trace or LinkTrace(np.zeros(1), np.array([link.bandwidth_bps]), 1.0)
    table = link_table(trace).clipped(scenario.effects.network.share, np.inf)
    outages = [each for each in scenario.faults if isinstance(each, LinkOutage) and each.link == link.name]
    return join_tables([table.without([(outage.start_s, outage.end_s) for outage in outages])])


def carried(tables: RateTables, start_s: float, end_s: float) -> float:
    return moved(tables, 0, start_s, end_s, np.inf)


def no_link_ever_carries_more_than_its_trace_between_any_two_times(record: RunRecord) -> None:
    links = {link.name: link for link in record.scenario.cluster.links}
    for name, over in passages(record).items():
        tables = rates(links[name], record.scenario)
        by_end = sorted(over, key=lambda each: each.end_s)
        for start_s in {each.begin_s for each in over}:
            bits = 0.0
            for each in by_end:
                bits += each.bits if each.begin_s >= start_s else 0.0
                room = carried(tables, start_s, each.end_s)
                rounding = 8 * float(np.spacing(each.end_s) * tables.rate.max())
                assert bits <= room * (1 + EXACT) + rounding


def busy_times(over: Iterable[Passage]) -> list[tuple[float, float, float]]:
    """Start and end of each time without a gap in which something was on the link, and the bits that passed in it."""
    busy: list[tuple[float, float, float]] = []
    for each in sorted(over, key=lambda each: (each.begin_s, each.end_s)):
        if busy and each.begin_s <= busy[-1][1] * (1 + 1e-14):
            start_s, end_s, bits = busy[-1]
            busy[-1] = (start_s, max(end_s, each.end_s), bits + each.bits)
        else:
            busy.append((each.begin_s, each.end_s, each.bits))
    return busy


# --- devices --------------------------------------------------------------------------------------------------


def a_device_does_one_thing_at_a_time(record: RunRecord) -> None:
    hands = [[EventKind.COMPUTE, EventKind.SYNC]]
    if record.plan.synchronisation.bucket_bytes:
        hands = [[EventKind.COMPUTE], [EventKind.SYNC]]
    for device, kinds in product(record.plan.devices, hands):
        own = [event for event in of_kind(record, *kinds) if event.device == device]
        times_s = sorted((event.start_s, event.end_s) for event in own)
        assert all(earlier[1] <= later[0] for earlier, later in pairwise(times_s))


def nothing_begins_before_what_it_needs(record: RunRecord) -> None:
    arrived_s = arrivals(record)
    stages = {index: len(pipeline.stages) for index, pipeline in enumerate(record.plan.pipelines)}
    done_s = {
        (e.device, e.action, e.pipeline, e.stage, e.microbatch, e.step): e.end_s
        for e in of_kind(record, EventKind.COMPUTE)
    }
    for event in of_kind(record, EventKind.COMPUTE):
        place = (event.pipeline, event.stage, event.microbatch, event.step)
        from_elsewhere = event.stage > 0 if event.action == "F" else event.stage < stages[event.pipeline] - 1
        messages = arrived_s.get((event.device, event.action, *place), [])
        assert bool(messages) == (from_elsewhere and event.action != "W")
        assert event.start_s >= max(messages, default=0.0) * (1 - 1e-14)
        for needed in {"F": [], "B": ["F"], "I": ["F"], "W": ["I"]}[event.action]:
            assert event.start_s >= done_s[event.device, needed, *place]
    overlap = record.plan.synchronisation.bucket_bytes > 0
    for event in of_kind(record, EventKind.SYNC):
        own = [each for each in of_kind(record, EventKind.COMPUTE) if each.device == event.device]
        same = [each for each in own if each.step == event.step]
        # What overlaps begins while the last backward of one of the device's stages goes on.
        last_s = {each.stage: each.start_s for each in sorted(same, key=lambda each: each.start_s)}
        ready_s = min(last_s.values(), default=0.0) if overlap else max((each.end_s for each in same), default=0.0)
        assert event.start_s >= ready_s
        assert all(each.start_s >= event.end_s for each in own if each.step > event.step)


def arrivals(record: RunRecord) -> dict[tuple[str, str, int, int, int, int], list[float]]:
    """Of what each action needs from other devices: departures plus the latency of that moment."""
    cluster = record.scenario.cluster
    arrived_s: dict[tuple[str, str, int, int, int, int], list[float]] = defaultdict(list)
    for event in of_kind(record, EventKind.SEND):
        if event.action not in (SYNC_ACTION, UPDATE_ACTION):
            latency_s = latency_of(cluster.path(event.device, event.peer), event.end_s)
            stage = event.stage + (1 if event.action == "F" else -1)
            place = (event.pipeline, stage, event.microbatch, event.step)
            arrived_s[event.peer, event.action, *place].append(event.end_s + latency_s)
    return arrived_s


def latency_of(path: Sequence[Link], time_s: float) -> float:
    """The least latency of just before or after a time: a departure may round to the other side of a change."""
    around_s = (time_s * (1 - 1e-12), time_s, time_s * (1 + 1e-12))
    return sum(min(link.latency_at_s(moment_s) for moment_s in around_s) for link in path)


def nobody_computes_while_away(record: RunRecord) -> None:
    for fault in record.scenario.faults:
        if not isinstance(fault, Absence):
            continue
        for event in of_kind(record, EventKind.COMPUTE):
            if event.device == fault.device:
                assert event.end_s <= fault.start_s or event.start_s >= fault.end_s


# --- the tests ------------------------------------------------------------------------------------------------

LAWS = (
    every_message_of_every_step_departs_once_and_is_waited_for_once_at_most,
    what_two_devices_exchange_keeps_its_order,
    no_link_ever_carries_more_than_its_trace_between_any_two_times,
    a_device_does_one_thing_at_a_time,
    nothing_begins_before_what_it_needs,
    nobody_computes_while_away,
)


def assert_lawful(record: RunRecord) -> None:
    for law in LAWS:
        law(record)


@settings(max_examples=60)
@given(orders(STEADY))
def test_runs_on_steady_links_break_no_law(case: tuple[Scenario, Plan]) -> None:
    assert_lawful(Simulator().run(*case, None, steps=2))


@settings(max_examples=60)
@given(orders(SWAYING))
def test_runs_on_traces_break_no_law(case: tuple[Scenario, Plan]) -> None:
    assert_lawful(Simulator().run(*case, None, steps=2))


@settings(max_examples=60)
@given(orders(with_effects(st.one_of(STEADY, SWAYING))))
def test_runs_with_effects_break_no_law(case: tuple[Scenario, Plan]) -> None:
    assert_lawful(Simulator().run(*case, None, steps=2))


@settings(max_examples=60)
@given(orders(without_waiting(with_faults(with_effects(st.one_of(STEADY, SWAYING))))))
def test_runs_with_faults_and_updates_break_no_law(case: tuple[Scenario, Plan]) -> None:
    assert_lawful(Simulator().run(*case, None, steps=3))


@settings(max_examples=60)
@given(st.one_of(STEADY, SWAYING))
def test_runs_with_transfers_that_block_break_no_law(case: tuple[Scenario, Plan]) -> None:
    scenario, plan = case
    blocking = replace(scenario, effects=Effects(compute=ComputeEffects(transfers_block=True)))
    record = Simulator().run(blocking, plan, None, steps=2)
    assert_lawful(record)
    # Each device's own transfers and actions take turns.
    busy: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for event in record.events:
        if event.kind is EventKind.COMPUTE:
            busy[event.device].append((event.start_s, event.end_s))
    for event in of_kind(record, EventKind.SEND):
        if event.action != SYNC_ACTION:
            for start_s, end_s in busy[event.device]:
                assert end_s <= event.start_s * (1 + 1e-14) or start_s >= event.end_s * (1 - 1e-14)


@settings(max_examples=40)
@given(orders(on_traces(BASE)))
def test_a_lone_message_takes_exactly_what_the_trace_carries_while_it_passes(case: tuple[Scenario, Plan]) -> None:
    record = Simulator().run(*case, None, steps=2)
    links = {link.name: link for link in record.scenario.cluster.links}
    for name, over in passages(record).items():
        tables = rates(links[name], record.scenario)
        for each in over:
            rounding = 8 * float(np.spacing(each.end_s) * tables.rate.max())
            assert carried(tables, each.begin_s, each.end_s) == pytest.approx(each.bits, rel=EXACT, abs=rounding)


@settings(max_examples=40)
@given(orders(st.one_of(on_shared_links(replicated()), on_traces(on_shared_links(replicated())))))
def test_a_shared_link_is_full_as_long_as_anything_waits_for_it(case: tuple[Scenario, Plan]) -> None:
    # Every path is one link here: whoever shares it, none of its rate is lost.
    record = Simulator().run(*case, None, steps=2)
    links = {link.name: link for link in record.scenario.cluster.links}
    chosen_s = CHOICE_S.get(record.plan.order, 0.0) * len(record.events)
    for name, over in passages(record).items():
        tables = rates(links[name], record.scenario)
        for start_s, end_s, bits in busy_times(over):
            rounding = float((8 * np.spacing(end_s) + chosen_s) * tables.rate.max())
            assert carried(tables, start_s, end_s) == pytest.approx(bits, rel=1e-8, abs=rounding)


@settings(max_examples=40)
@given(orders(st.one_of(STEADY, SWAYING)))
def test_every_action_takes_what_the_profile_says(case: tuple[Scenario, Plan]) -> None:
    scenario, plan = case
    actions = compile_step(plan.without_overlap, scenario).actions
    expected = sorted(actions.duration_s[actions.microbatch >= 0].tolist())
    record = Simulator().run(scenario, plan, None, steps=1)
    computed = [event.end_s - event.start_s for event in of_kind(record, EventKind.COMPUTE)]
    assert sorted(computed) == pytest.approx(expected, rel=EXACT, abs=EXACT)
