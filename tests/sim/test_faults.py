"""Devices that leave, return and hang, and links that are out: what a run makes of them, against exact answers."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planner.events.event import Event, EventKind
from planner.files.scenario import read_scenario
from planner.plan.plan import Plan, Replica, Synchronisation
from planner.runs.record import RunRecord
from planner.scenario.cluster import Cluster, Link
from planner.scenario.effects import ComputeEffects, Effects
from planner.scenario.faults import Absence, Fault, Hang, LinkOutage
from planner.scenario.scenario import Scenario
from planner.scenario.size_curve import SizeCurve
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import chain_plan, chain_scenario, layered_plan, makespan_s, mesh_scenario
from tests.helpers.strategies.run_strategies import chains, on_shared_links, on_traces, replicated, with_links
from traces.common.errors import RunError
from traces.trace import LinkTrace

EXACT = 1e-9


def run(scenario: Scenario, plan: Plan, faults: Sequence[Fault] = (), steps: int = 1) -> RunRecord:
    return Simulator().run(replace(scenario, faults=tuple(faults)), plan, None, steps)


def of_kind(record: RunRecord, kind: EventKind, device: str) -> list[tuple[str, float, float]]:
    """Action, start and end of what happened on a device."""
    return [(e.action, e.start_s, e.end_s) for e in record.events if (e.kind, e.device) == (kind, device)]


def computed(record: RunRecord, device: str = "device-0") -> list[tuple[str, float, float]]:
    return of_kind(record, EventKind.COMPUTE, device)


def one_device() -> tuple[Scenario, Plan]:
    """Forward and backward of 2 s each; a second device stands idle."""
    scenario = chain_scenario([2.0], [2.0], global_batch=1)
    cluster = chain_scenario([2.0, 2.0], [2.0, 2.0]).cluster
    plan = chain_plan(scenario)
    return replace(scenario, cluster=cluster), plan


# --- devices that leave, and devices that hang ----------------------------------------------------------------

LEAVING: dict[str, tuple[Sequence[Fault], list[tuple[str, float, float]]]] = {
    "nothing happens": ((), [("F", 0, 2), ("B", 2, 4)]),
    "what is under way is lost": ((Absence("device-0", 1, 10),), [("F", 10, 12), ("B", 12, 14)]),
    "what ends just then is kept": ((Absence("device-0", 2, 10),), [("F", 0, 2), ("B", 10, 12)]),
    "and lost twice": (
        (Absence("device-0", 1, 10), Absence("device-0", 11.5, 20)),
        [("F", 20, 22), ("B", 22, 24)],
    ),
    "there is just enough time": (
        (Absence("device-0", 12, 20), Absence("device-0", 1, 10)),
        [("F", 10, 12), ("B", 20, 22)],
    ),
    "gone from the start": ((Absence("device-0", 0, 10),), [("F", 10, 12), ("B", 12, 14)]),
    "back for no time": (
        (Absence("device-0", 1, 10), Absence("device-0", 10, 20)),
        [("F", 20, 22), ("B", 22, 24)],
    ),
    "what is under way goes on": ((Hang("device-0", 1, 10),), [("F", 0, 11), ("B", 11, 13)]),
    "what ends just then does not hang": ((Hang("device-0", 2, 10),), [("F", 0, 2), ("B", 10, 12)]),
    "hangs from the start": ((Hang("device-0", 0, 10),), [("F", 10, 12), ("B", 12, 14)]),
    "hangs twice in an action": (
        (Hang("device-0", 3.5, 10), Hang("device-0", 1, 3)),
        [("F", 0, 10.5), ("B", 10.5, 12.5)],
    ),
    "hangs, then leaves: what was done is lost": (
        (Hang("device-0", 1, 3), Absence("device-0", 3.5, 10)),
        [("F", 10, 12), ("B", 12, 14)],
    ),
    "returns, and hangs": (
        (Absence("device-0", 1, 3), Hang("device-0", 3, 10)),
        [("F", 10, 12), ("B", 12, 14)],
    ),
    "gone for days": ((Absence("device-0", 1, 1e6),), [("F", 1e6, 1e6 + 2), ("B", 1e6 + 2, 1e6 + 4)]),
    "another device leaves": ((Absence("device-1", 1, 3),), [("F", 0, 2), ("B", 2, 4)]),
    "a link is out": ((LinkOutage("region-0->region-1", 1, 3),), [("F", 0, 2), ("B", 2, 4)]),
}


@pytest.mark.parametrize("case", LEAVING)
def test_a_device_by_hand(case: str) -> None:
    faults, expected = LEAVING[case]
    scenario, plan = one_device()
    assert computed(run(scenario, plan, faults)) == expected


# Seconds that add up without rounding: an action may end as a fault begins.
SIXTEENTHS = st.integers(0, 128).map(lambda count: count / 16)


@st.composite
def faults_of_one_device(draw: st.DrawFn) -> list[Absence | Hang]:
    """Absences and hangs that follow each other, in any order."""
    now_s, faults = draw(SIXTEENTHS), []
    for _ in range(draw(st.integers(1, 6))):
        end_s = now_s + 0.125 + draw(SIXTEENTHS)
        faults.append(draw(st.sampled_from([Absence, Hang]))("device-0", now_s, end_s))
        now_s = end_s + draw(SIXTEENTHS)
    return draw(st.permutations(faults))


def first_chance(faults: Sequence[Absence | Hang], ready_s: float, duration_s: float) -> tuple[float, float]:
    """Start and end of an action: in the first presence of the device that is long enough, its hangs left out."""
    gone = sorted((fault.start_s, fault.end_s) for fault in faults if isinstance(fault, Absence))
    hangs = sorted((fault.start_s, fault.end_s) for fault in faults if isinstance(fault, Hang))
    leaves = [start_s for start_s, _ in gone] + [math.inf]
    for from_s, until_s in zip([0.0, *(end_s for _, end_s in gone)], leaves, strict=True):
        start_s, left_s = max(ready_s, from_s), duration_s
        now_s = start_s
        for hang_s, goes_on_s in hangs:
            if goes_on_s > now_s and hang_s < now_s + left_s:
                if hang_s <= now_s == start_s:
                    start_s = goes_on_s
                left_s -= max(0.0, hang_s - now_s)
                now_s = goes_on_s
        if now_s + left_s <= until_s:
            return start_s, now_s + left_s
    raise AssertionError("the last presence lasts for ever")


@settings(max_examples=150)
@given(
    faults_of_one_device(),
    st.lists(st.integers(1, 4), min_size=1, max_size=6),
    SIXTEENTHS.map(lambda length_s: length_s / 4 + 0.125),
    SIXTEENTHS.map(lambda length_s: length_s / 4 + 0.125),
)
def test_each_action_takes_the_first_presence_that_is_long_enough(
    faults: list[Absence | Hang], microbatches: list[int], forward_s: float, backward_s: float
) -> None:
    scenario = chain_scenario([forward_s], [backward_s], global_batch=sum(microbatches))
    plan = chain_plan(scenario, microbatches=microbatches)
    now_s = 0.0
    lengths_s = [end_s - start_s for _, start_s, end_s in computed(run(scenario, plan))]
    for (_, *times_s), duration_s in zip(computed(run(scenario, plan, faults)), lengths_s, strict=True):
        expected_s = first_chance(faults, now_s, duration_s)
        assert times_s == pytest.approx(expected_s, rel=EXACT)
        now_s = expected_s[1]


def test_what_was_handed_over_arrives_though_its_sender_has_left() -> None:
    # 8,000 bits from 1 to 9 s, there at 10 s; the sender is gone from 1 to 30 s, the receiver from 5 to 12 s.
    scenario = chain_scenario([1.0, 1.0], [1.0, 1.0], bandwidth_bps=1000.0, latency_s=1.0, global_batch=1)
    record = run(scenario, chain_plan(scenario), [Absence("device-0", 1.0, 30.0), Absence("device-1", 5.0, 12.0)])
    assert computed(record, "device-1") == [("F", 12.0, 13.0), ("B", 13.0, 14.0)]
    # The gradient is there at 23 s, and waits for the device.
    assert computed(record) == [("F", 0.0, 1.0), ("B", 30.0, 31.0)]


@pytest.mark.parametrize(
    ("faults", "second_round_s", "end_s"),
    [
        ((), 3.25, (4.5, 4.5)),
        ((Absence("device-1", 3.1, 10.0),), 10.0, (11.25, 10.0)),
        ((Hang("device-1", 3.1, 10.0),), 10.0, (11.25, 10.0)),
        ((Absence("device-1", 3.25, 10.0),), 10.0, (11.25, 10.0)),
        ((Absence("device-1", 3.5, 10.0),), 3.25, (4.5, 10.0)),
        ((Absence("device-1", 5.0, 6.0),), 3.25, (4.5, 4.5)),
    ],
)
def test_an_absence_during_a_gradient_sum_delays_its_next_round(
    faults: Sequence[Fault], second_round_s: float, end_s: tuple[float, float]
) -> None:
    # 8 numbers of 4 bytes: two rounds of 16 bytes, 1 s at 128 bit/s and 0.25 s on the way, from 2 s on. What a device
    # sent before it left arrives; it takes part in the next round when it is back.
    scenario = mesh_scenario(2, [1.0], [1.0], parameter_bytes=[32], link=lambda a, b: (128.0, 0.25), global_batch=2)
    record = run(scenario, layered_plan(scenario, [([(1, 2, 1)], [2])]), faults)
    for device, round_s, sum_s in zip(("device-0", "device-1"), (3.25, second_round_s), end_s, strict=True):
        assert [start_s for _, start_s, _ in of_kind(record, EventKind.SEND, device)] == [2.0, round_s]
        assert of_kind(record, EventKind.SYNC, device) == [("S", 2.0, sum_s)]


def with_partners(scenario: Scenario, plan: Plan) -> tuple[Scenario, Plan]:
    """The first two devices share the layers of the first stage, the others have a stage each."""
    devices = [replace(each, host="box" if n < 2 else "") for n, each in enumerate(scenario.cluster.devices)]
    groups = [Replica("device-0", partners=("device-1",)), *(Replica(each.name) for each in devices[2:])]
    pipeline = plan.pipelines[0]
    stages = [replace(stage, replicas=(group,)) for stage, group in zip(pipeline.stages, groups, strict=True)]
    model = replace(scenario.model, sharded={2: scenario.model})
    scenario = replace(scenario, cluster=Cluster(tuple(devices), scenario.cluster.links), model=model)
    return scenario, replace(plan, pipelines=(replace(pipeline, stages=tuple(stages)),))


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (Absence("device-1", 1.0, 10.0), [("F", 10.0, 12.0), ("B", 14.0, 16.0)]),
        (Hang("device-1", 1.0, 10.0), [("F", 0.0, 11.0), ("B", 13.0, 15.0)]),
        (Absence("device-2", 0.5, 10.0), [("F", 0.0, 2.0), ("B", 12.0, 14.0)]),
    ],
)
def test_a_partner_that_is_gone_stops_its_group(fault: Fault, expected: list[tuple[str, float, float]]) -> None:
    scenario = mesh_scenario(3, [2.0, 1.0], [2.0, 1.0], output_bytes=[0, 0], global_batch=1)
    scenario, plan = with_partners(scenario, layered_plan(scenario, [([(1, 1, 2), (2, 1, 1)], [1])]))
    record = run(scenario, plan, [fault])
    assert computed(record, "device-0") == expected
    assert computed(record, "device-1") == expected


def test_absences_of_two_partners_count_both() -> None:
    scenario = mesh_scenario(2, [2.0], [2.0], global_batch=1)
    scenario, plan = with_partners(scenario, layered_plan(scenario, [([(1, 1, 1)], [1])]))
    faults = [Absence("device-1", 4.0, 8.0), Absence("device-0", 1.0, 6.0), Absence("device-0", 9.0, 10.0)]
    assert computed(run(scenario, plan, faults)) == [("F", 10.0, 12.0), ("B", 12.0, 14.0)]


# --- links that are out ---------------------------------------------------------------------------------------


@st.composite
def outages(draw: st.DrawFn, cases: st.SearchStrategy[tuple[Scenario, Plan]]) -> tuple[Scenario, Plan]:
    """The case with outages of some of its links, several of one link among them."""
    scenario, plan = draw(cases)
    faults: list[LinkOutage] = []
    for link in scenario.cluster.links[:4]:
        now_s = 0.0
        for _ in range(draw(st.integers(0, 3))):
            start_s = now_s + draw(st.floats(0, 30))
            now_s = start_s + draw(st.floats(0.1, 30))
            faults.append(LinkOutage(link.name, start_s, now_s))
            now_s += 0.1
    return replace(scenario, faults=tuple(draw(st.permutations(faults)))), plan


def with_zeros(link: Link, faults: Sequence[Fault], horizon_s: float) -> Link:
    """The link with a trace, written out until a time, that is zero during the link's outages."""
    out = [(each.start_s, each.end_s) for each in faults if isinstance(each, LinkOutage) and each.link == link.name]
    if not out:
        return link
    trace = link.trace or LinkTrace(np.zeros(1), np.array([link.bandwidth_bps]), horizon_s, loops=False)
    turns = math.ceil(horizon_s / trace.duration_s) if trace.loops else 1
    starts_s = (trace.times_s + trace.duration_s * np.arange(turns)[:, None]).ravel()
    cuts_s = np.unique(np.concatenate([starts_s, *out]))
    pieces = np.searchsorted(starts_s, cuts_s, side="right") - 1
    is_out = np.any([(start_s <= cuts_s) & (cuts_s < end_s) for start_s, end_s in out], axis=0)
    rates_bps = np.where(is_out, 0.0, np.tile(trace.bandwidth_bps, turns)[pieces])
    latencies_s = None if trace.latency_s is None else np.tile(trace.latency_s, turns)[pieces]
    lasts_s = max(horizon_s, float(cuts_s[-1])) + 1.0
    return replace(link, trace=LinkTrace(cuts_s, rates_bps, lasts_s, latencies_s, loops=False))


@settings(max_examples=200)
@given(
    outages(
        st.one_of(
            chains(),
            on_traces(chains()),
            on_shared_links(replicated()),
            on_traces(on_shared_links(replicated())),
        )
    ),
    st.booleans(),
)
def test_an_outage_is_a_rate_of_zero(case: tuple[Scenario, Plan], blocks: bool) -> None:
    scenario, plan = case
    scenario = replace(scenario, effects=Effects(compute=ComputeEffects(transfers_block=blocks)))
    faulty = [e for e in run(scenario, plan, scenario.faults).events if e.kind is not EventKind.FAULT]
    horizon_s = max(event.end_s for event in faulty) + 100.0
    assume(all(link.trace is None or horizon_s < 1000 * link.trace.duration_s for link in scenario.cluster.links))
    links = [with_zeros(link, scenario.faults, horizon_s) for link in scenario.cluster.links]
    same = run(with_links(scenario, links), plan).events
    key = [(e.kind, e.device, e.peer, e.action, e.microbatch) for e in faulty]
    assert sorted(key) == sorted((e.kind, e.device, e.peer, e.action, e.microbatch) for e in same)
    assert sorted(times(faulty)) == [pytest.approx(each, rel=1e-8, abs=1e-8) for each in sorted(times(same))]


def times(events: Sequence[Event]) -> list[tuple[float, float]]:
    return [(event.start_s, event.end_s) for event in events]


@pytest.mark.parametrize("curve", [None, SizeCurve(0.0, 0.0, 1.0, 1e9)])
def test_an_outage_long_after_the_link_last_carried_anything(curve: SizeCurve | None) -> None:
    # Nobody waits for the link during the first days. Then 8,000 bits at 8 kbit/s, out until 200,010 s.
    scenario = chain_scenario([1.0, 1.0], [1.0, 1.0], bandwidth_bps=8000.0, global_batch=1)
    scenario = with_links(scenario, [replace(link, size_curve=curve) for link in scenario.cluster.links])
    faults = [Absence("device-0", 0.0, 2e5), LinkOutage("region-0->region-1", 2e5, 2e5 + 10)]
    record = run(scenario, chain_plan(scenario), faults)
    assert computed(record, "device-1") == [("F", 200_011.0, 200_012.0), ("B", 200_012.0, 200_013.0)]


# --- who waits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [Absence("device-1", 1.5), Hang("device-1", 1.5)])
def test_a_device_that_never_returns_ends_the_run_with_the_names_of_who_waits(fault: Fault) -> None:
    scenario = chain_scenario([1.0, 1.0, 1.0], [1.0, 1.0, 1.0], output_bytes=[0, 0, 0], global_batch=1)
    with pytest.raises(RunError, match=r"at 1\.000 s: device-0, device-1, device-2 wait .* a device never return"):
        run(scenario, chain_plan(scenario), [fault])


@pytest.mark.parametrize(("bound", "waiting"), [(None, "device-1"), (2, "device-0, device-1")])
def test_who_need_not_wait_for_a_device_that_never_returns_is_not_named(bound: int | None, waiting: str) -> None:
    scenario = mesh_scenario(2, [1.0], [1.0], global_batch=2)
    plan = layered_plan(scenario, [([(1, 1, 1)], [1]), ([(1, 1, 1)], [1])])
    plan = replace(plan, synchronisation=Synchronisation("asgd", staleness_bound=bound))
    with pytest.raises(RunError, match=rf" s: {waiting} wait for"):
        run(scenario, plan, [Absence("device-1", 1.0)], steps=6)


def test_a_device_that_never_returns_holds_nobody_up_when_its_work_is_done() -> None:
    scenario, plan = one_device()
    assert makespan_s(run(scenario, plan, [Absence("device-0", 4.0)])) == 4.0


# --- rows -----------------------------------------------------------------------------------------------------


def fault_row(device: str, peer: str, action: str, start_s: float, end_s: float) -> Event:
    return Event(EventKind.FAULT, device, peer, -1, -1, -1, -1, action, start_s, end_s, 0)


def fault_rows(record: RunRecord) -> list[Event]:
    return [event for event in record.events if event.kind is EventKind.FAULT]


def test_faults_are_rows_that_end_with_the_run() -> None:
    # Forward from 1 to 2 s, there at 4 s; until 5.5 s with the hang, backward until 6.5 s, back at 8.5 s.
    scenario = chain_scenario([1.0, 1.0], [1.0, 1.0], bandwidth_bps=4000.0, global_batch=1)
    faults = (
        LinkOutage("region-1->region-0", 8.5, 100.0),
        Hang("device-1", 4.5, 5.0),
        Absence("device-0", 500.0),
        Absence("device-0", 0.0, 1.0),
        LinkOutage("region-0->region-1", 10.5, 11.0),
        Absence("device-1", 6.5, 20.0),
    )
    record = run(scenario, chain_plan(scenario), faults)
    assert makespan_s(record) == 9.5
    assert fault_rows(record) == [
        fault_row("device-0", "", "absent", 0.0, 1.0),
        fault_row("device-1", "", "hangs", 4.5, 5.0),
        fault_row("device-1", "", "absent", 6.5, 9.5),
        fault_row("region-1", "region-0", "out", 8.5, 9.5),
    ]


@pytest.mark.parametrize("fault", [Absence("device-0", 4.0, 5.0), Hang("device-0", 4.0), Absence("device-1", 9.0)])
def test_a_fault_from_the_end_on_is_none(fault: Fault) -> None:
    assert fault_rows(run(*one_device(), [fault])) == []


# --- from a file ----------------------------------------------------------------------------------------------

SCENARIO = """\
name: spot
cluster:
  devices:
    - {name: left, kind: a100-40, region: west}
    - {name: right, kind: a100-40, region: east}
  links:
    - {between: [west, east], bandwidth: 8 kbit/s, latency: 500 ms}
model:
  name: tiny
  layers:
    - name: layer
      repeat: 2
      parameters: 4 kB
      output: 1 kB
      activation: 1 kB
      times: {a100-40: {samples: [1], forward: [1 s], backward_input: [1 s], backward_weight: [1 s]}}
training: {global_batch: 1}
effects: none
faults:
  - {preemption: spot.csv, from: 100 s, nodes: {n1: left, n2: right, n3: right}}
  - {link: 'east->west', out: 30 s, back: 40 s}
"""


def test_a_trace_of_pre_emptions_from_its_file_to_the_run(tmp_path: Path) -> None:
    # From 100 s on: n1 is there; n2 leaves 4 s later, and n3 takes its place after 20 s.
    (tmp_path / "spot.csv").write_text("0,add,n1\n0,add,n2\n104000,remove,n2\n120000,add,n3\n990000,remove,n1\n")
    (tmp_path / "spot.yaml").write_text(SCENARIO)
    scenario = read_scenario(tmp_path / "spot.yaml")
    plan = layered_plan(scenario, [([(1, 1, 2), (2, 1, 1)], [1])])
    record = Simulator().run(scenario, plan, None, steps=2)
    # The first message is there at 2.5 s; the backward that begins at 3.5 s is lost, and done from 20 to 22 s.
    # The gradient is back at 23.5 s; backward until 25.5 s, forward until 26.5 s, there at 28 s, done at 31 s; the
    # link carries from 40 to 41 s, and the last backward lasts from 41.5 to 43.5 s.
    assert computed(record, "right") == [("F", 2.5, 3.5), ("B", 20.0, 22.0), ("F", 28.0, 29.0), ("B", 29.0, 31.0)]
    assert computed(record, "left") == [("F", 0.0, 1.0), ("B", 23.5, 25.5), ("F", 25.5, 26.5), ("B", 41.5, 43.5)]
    assert fault_rows(record) == [
        fault_row("right", "", "absent", 4.0, 20.0),
        fault_row("east", "west", "out", 30.0, 40.0),
    ]
