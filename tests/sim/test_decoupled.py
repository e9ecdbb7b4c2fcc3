"""Workers at their own speed, and syncers: by hand, beside Streaming DiLoCo, and what no run may lose."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.check import check_plan
from planner.events.event import OUTER_ACTION, Event, EventKind
from planner.plan.outer_step import OuterStep
from planner.plan.plan import Plan, Synchronisation
from planner.runs.event_totals import worker_steps
from planner.runs.metrics import measure
from planner.runs.record import RunRecord
from planner.scenario.cluster import Cluster, Device
from planner.scenario.faults import Absence, Fault, Hang
from planner.scenario.scenario import Scenario
from planner.scenario.training import Optimizer
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import mesh_scenario
from tests.sim.test_outer_steps import BYTES_PER_S, begins_s, regions

HUB = "hub"


def apart(
    step_s: Sequence[float],
    transfer_s: Sequence[float],
    every: int,
    outer: OuterStep,
    latency_s: float = 0.0,
    faults: tuple[Fault, ...] = (),
) -> tuple[Scenario, Plan]:
    """The case of `regions`, with a device between the workers that takes the outer steps."""
    scenario, plan = regions(step_s, transfer_s, every, outer, latency_s)
    count = len(step_s)
    wider = mesh_scenario(count + 1, [1.0], [1.0], link=lambda a, b: (8.0 * BYTES_PER_S, latency_s))
    links = tuple(
        replace(
            link, source=link.source.replace(f"device-{count}", HUB), target=link.target.replace(f"device-{count}", HUB)
        )
        for link in wider.cluster.links
    )
    hub = Device(HUB, scenario.cluster.devices[0].kind, "region-hub", 1)
    cluster = Cluster((*scenario.cluster.devices, hub), links)
    how = Synchronisation("diloco-decoupled", interval_steps=every, outer=replace(outer, syncers=(HUB,)))
    scenario, plan = replace(scenario, cluster=cluster, faults=faults), replace(plan, synchronisation=how)
    check_plan(plan, scenario)
    return scenario, plan


def simulated(case: tuple[Scenario, Plan], steps: int) -> RunRecord:
    return Simulator().run(*case, None, steps)


def sends(record: RunRecord, device: str, peer: str) -> list[tuple[float, int, int]]:
    """When which step or version left, and its bytes."""
    return [
        (event.start_s, event.step, event.size_bytes)
        for event in record.events
        if event.kind is EventKind.SEND and (event.device, event.peer) == (device, peer)
    ]


def outer_steps(record: RunRecord, device: str) -> list[Event]:
    return [event for event in record.events if event.action == OUTER_ACTION and event.device == device]


def steps_of(record: RunRecord) -> Counter[int]:
    return Counter(pipeline for _, pipeline, _ in worker_steps(record.events))


# --- by hand ----------------------------------------------------------------------------------------------------


def test_nobody_waits_and_the_faster_worker_takes_more_steps() -> None:
    # 12 samples: each worker has two steps at first, and one more with the end of each, until 8 and 4 are given out.
    record = simulated(apart([1.0, 2.5], [0.5], 2, OuterStep(quorum=1), 0.25), steps=6)
    assert begins_s(record, "device-0") == [float(step) for step in range(8)]
    assert begins_s(record, "device-1") == [0, 2.5, 5, 7.5]
    assert steps_of(record) == {0: 8, 1: 4}
    # The first two samples are trained at 2, the last ones at 10.
    metrics = measure(record)
    assert (metrics.steps, metrics.samples_per_s) == (6, pytest.approx(10 / (10 - 2)))


def test_the_way_there_and_back() -> None:
    # Sent at 2, there at 2.75, and back at 3.5: taken over before the step that begins at 4, after which it sends again
    # at 6. The other one's pseudo-gradient is sent at 5, and its outer step reaches both at 6.5: while the fast one
    # awaits another answer, which comes after its last step.
    record = simulated(apart([1.0, 2.5], [0.5], 2, OuterStep(quorum=1), 0.25), steps=6)
    assert sends(record, "device-0", HUB) == [(2.0, 1, 2000), (6.0, 5, 2000)]
    assert sends(record, "device-1", HUB) == [(5.0, 1, 2000), (10.0, 3, 2000)]
    merged = [(event.end_s, event.peer, event.step, event.staleness) for event in outer_steps(record, HUB)]
    # The slow one knew nothing of the first outer step when it sent its own; nor the fast one of the second.
    assert merged[:3] == [(2.75, "device-0", 1, 0), (5.75, "device-1", 1, 1), (6.75, "device-0", 5, 1)]
    taken = [(event.start_s, event.end_s, event.step) for event in outer_steps(record, "device-0")]
    assert [each[2] for each in taken] == [1, 4]
    assert taken[0] == (3.5, 4.0, 1)


def test_a_quorum_and_the_grace_after_it() -> None:
    # Three workers send at 2, 2.5 and 4; the quorum of two is there at 3.25.
    steps_s = [1.0, 1.25, 2.0]
    for grace_s, merged in [(0.0, {0: 3.25, 1: 3.25}), (1.0, {0: 4.25, 1: 4.25}), (2.0, {0: 4.75, 1: 4.75, 2: 4.75})]:
        outer = OuterStep(quorum=2, grace_s=grace_s)
        record = simulated(apart(steps_s, [0.5], 2, outer, 0.25), steps=3)
        first = {event.peer[-1]: event.end_s for event in reversed(outer_steps(record, HUB))}
        found = {worker: first[str(worker)] for worker in merged}
        assert found == merged, grace_s


def test_without_a_fixed_grace_an_outer_step_waits_as_long_as_nobody_is_delayed() -> None:
    # Workers send at 5 and 6.25, which is there at 5.75 and 7. The first one takes the outer step over at 9, and it
    # should come a step before. The way back takes as long as the way there: so a third one has until 7.25.
    for third_s, merged in [(1.28125, {0: 7.15625, 1: 7.15625, 2: 7.15625}), (1.5, {0: 7.25, 1: 7.25})]:
        outer = OuterStep(quorum=2, grace_s=None, overlap_steps=4)
        record = simulated(apart([1.0, 1.25, third_s], [0.5], 5, outer, 0.25), steps=9)
        first = {int(event.peer[-1]): event.end_s for event in reversed(outer_steps(record, HUB))}
        assert {worker: first[worker] for worker in merged} == merged
        assert outer_steps(record, "device-0")[0].end_s == 9.0


def exchanges_behind(share: float, outer: OuterStep) -> list[int]:
    """How often each of three workers sends pseudo-gradients if the links of worker 1 have a share of their rate."""
    scenario, plan = apart([1.0] * 3, [0.25, 0.25], 5, replace(outer, fragments=2, pattern="strided", overlap_steps=1))
    links = tuple(
        replace(link, bandwidth_bps=share * link.bandwidth_bps) if "device-1" in (link.source, link.target) else link
        for link in scenario.cluster.links
    )
    record = simulated((replace(scenario, cluster=replace(scenario.cluster, links=links)), plan), steps=100)
    # Nobody waits for a link: only the outer steps under way at the end come later.
    assert max(begins_s(record, device)[-1] for device in plan.devices) == 99.0
    return [len(sends(record, device, HUB)) for device in plan.devices]


@pytest.mark.parametrize("share", [1 / 8, 1 / 50])
def test_with_a_quorum_of_one_a_slow_link_makes_only_its_own_worker_exchange_less_often(
    share: float,
) -> None:
    """Nothing else has to change settings where a link changes, as policies do with other methods."""
    one, everyone = OuterStep(quorum=1, grace_s=None), OuterStep()
    first, behind, last = exchanges_behind(share, one)
    assert [first, last] == [exchanges_behind(1.0, one)[place] for place in (0, 2)]
    assert behind <= 0.5 * last
    assert max(exchanges_behind(share, everyone)) < 0.6 * last


def test_a_worker_sends_nothing_more_before_its_last_is_taken_over() -> None:
    # With a quorum of both, the fast worker's first pseudo-gradient waits for the slow one's at 10.
    record = simulated(apart([1.0, 5.0], [0.25], 2, OuterStep()), steps=9)
    assert [step for _, step, _ in sends(record, "device-0", HUB)] == [1, 11]
    assert begins_s(record, "device-0") == [float(step) for step in range(14)]


def test_versions_that_a_newer_one_replaces_are_not_sent() -> None:
    # The way back to the slow worker takes 4 s; meanwhile the fast one's outer steps have made newer versions.
    scenario, plan = apart([1.0, 1.0, 8.0], [0.25], 1, OuterStep(quorum=1))
    links = tuple(
        replace(link, bandwidth_bps=link.bandwidth_bps / 16)
        if (link.source, link.target) == (HUB, "device-2")
        else link
        for link in scenario.cluster.links
    )
    record = simulated((replace(scenario, cluster=Cluster(scenario.cluster.devices, links)), plan), steps=8)
    starts = sends(record, HUB, "device-2")
    assert {later[0] - earlier[0] for earlier, later in pairwise(starts[:4])} == {4.0}
    versions = [version for _, version, _ in starts]
    assert versions[1] - versions[0] > 1


def test_stages_merge_their_layers_by_themselves() -> None:
    """Layers of a pipeline of two stages reach the syncer at two times, and other workers in two messages."""
    scenario, plan = apart([0.5, 1.0, 1.0], [0.5, 0.25], 2, OuterStep(), 0.25)
    whole, first, second = plan.pipelines
    halves = (replace(first.stages[0], end_layer=1, in_flight=2), replace(second.stages[0], first_layer=1))
    plan = replace(plan, pipelines=(replace(whole, microbatches=(2,)), replace(first, stages=halves)))
    check_plan(plan, scenario)
    record = simulated((scenario, plan), steps=4)
    assert sends(record, HUB, "device-0")[:2] == [(3.75, 1, 1000), (4.75, 1, 2000)]
    assert {size_bytes for _, _, size_bytes in sends(record, HUB, "device-1")} == {2000}
    assert {size_bytes for _, _, size_bytes in sends(record, HUB, "device-2")} == {1000}


def test_what_is_there_at_the_end_is_merged_and_taken_over() -> None:
    record = simulated(apart([1.0, 1.0, 3.0], [0.5], 4, OuterStep(quorum=3)), steps=4)
    assert {event.peer for event in outer_steps(record, HUB)} == {"device-0", "device-1"}
    end_s = max(event.end_s for event in record.events)
    assert [event.end_s for event in outer_steps(record, "device-2")] == [end_s]


# --- absences ---------------------------------------------------------------------------------------------------


def test_an_absent_worker_stops_nobody_and_takes_the_present_parameters_over() -> None:
    fault = Absence("device-1", 3.5, 9.0)
    record = simulated(apart([1.0, 1.0], [0.5], 2, OuterStep(quorum=1), 0.25, (fault,)), steps=8)
    assert begins_s(record, "device-0") == [float(step) for step in range(11)]
    # Its fourth step is interrupted at 3.5, and goes on at 9; what it sends after it leads away from what it has then.
    begun = begins_s(record, "device-1")
    assert begun[:3] == [0, 1, 2]
    joined = [event for event in outer_steps(record, "device-1") if event.start_s > 9]
    assert (joined[0].start_s, joined[0].end_s) == (9.75, 9.75)
    assert sends(record, "device-1", HUB)[1:] == [(9.75, 3, 2000)]
    assert [event.staleness for event in outer_steps(record, HUB) if event.peer == "device-1"] == [1, 0]
    assert measure(record).steps == 8


def test_a_quorum_of_all_is_one_of_those_that_are_there() -> None:
    # What is there at 6.75 waits for the other one until its loss at 8.5, and later outer steps do not wait.
    fault = Absence("device-1", 8.5, 20.0)
    record = simulated(apart([1.0, 4.5], [0.5], 6, OuterStep(), 0.25, (fault,)), steps=20)
    assert [(event.end_s, event.peer) for event in outer_steps(record, HUB)][:2] == [
        (8.5, "device-0"),
        (12.75, "device-0"),
    ]
    # It takes over the version of then, and is awaited again.
    assert outer_steps(record, "device-1")[0].end_s == 20.75
    later = [(event.end_s, event.peer) for event in outer_steps(record, HUB) if event.end_s > 20]
    assert [peer for _, peer in later[:2]] == ["device-0", "device-1"]
    assert later[0][0] == later[1][0]


def test_a_worker_of_two_devices_is_back_with_the_last_of_them() -> None:
    faults = (Absence("device-1", 5.0, 10.0), Absence("device-2", 7.0, 20.0))
    scenario, plan = apart([1.0, 1.0, 1.0], [0.25, 0.25], 2, OuterStep(), 0.125, faults)
    whole, first, second = plan.pipelines
    halves = (replace(first.stages[0], end_layer=1, in_flight=2), replace(second.stages[0], first_layer=1))
    plan = replace(plan, pipelines=(replace(whole, microbatches=(2,)), replace(first, stages=halves)))
    record = simulated((scenario, plan), steps=40)
    alone = [event.end_s for event in outer_steps(record, HUB) if event.peer == "device-0" and 10 < event.end_s < 20]
    assert alone == [12.625, 16.625]


def with_adamw(case: tuple[Scenario, Plan]) -> tuple[Scenario, Plan]:
    """The optimizer's state of a layer is twice as large as its parameters, and moves together with them."""
    scenario, plan = case
    return replace(scenario, training=replace(scenario.training, optimizer=Optimizer("adamw", 0.01))), plan


def moves(record: RunRecord) -> list[tuple[str, str, float, float, float]]:
    """Who sends whom the state of layers, and when it leaves and arrives."""
    found = [event for event in record.events if event.kind is EventKind.MIGRATE]
    return [(event.device, event.peer, event.start_s, event.end_s, event.arrived_s) for event in found]


def test_a_worker_that_returns_waits_for_the_optimizer_of_another() -> None:
    fault = Absence("device-1", 3.5, 9.25)
    case = apart([1.0, 1.0], [0.5], 2, OuterStep(quorum=1), 0.25, (fault,))
    record = simulated(with_adamw(case), steps=10)
    # The other one gives it after the step that ends at 10, behind the pseudo-gradient of half a second.
    assert moves(record) == [("device-0", HUB, 10.0, 12.0, 12.25), (HUB, "device-1", 12.25, 13.75, 14.0)]
    joined = [event for event in outer_steps(record, "device-1") if event.end_s > 9]
    assert joined[0].end_s == 14.0
    assert begins_s(record, "device-0")[:13] == [float(step) for step in range(13)]
    assert sum(steps_of(record).values()) == 20


def test_if_the_giver_is_lost_another_one_gives() -> None:
    # The next one after device-1 is device-2, which is away from 9.5 on, before its step ends at 10.
    faults = (Absence("device-1", 3.5, 9.25), Absence("device-2", 9.5, 20.0))
    record = simulated(with_adamw(apart([1.0] * 3, [0.5], 2, OuterStep(quorum=1), 0.25, faults)), steps=30)
    assert [ends[:2] for ends in moves(record)] == [
        ("device-0", HUB),
        (HUB, "device-1"),
        ("device-0", HUB),
        (HUB, "device-2"),
    ]


def test_without_another_worker_a_worker_returns_with_an_empty_optimizer() -> None:
    faults = (Absence("device-0", 3.25, 9.0), Absence("device-1", 3.5, 9.25))
    record = simulated(with_adamw(apart([1.0, 1.0], [0.5], 2, OuterStep(quorum=1), 0.25, faults)), steps=8)
    # Nor does the first to return give what it has, before it has sent something.
    assert not moves(record)
    assert sum(steps_of(record).values()) == 16


def test_the_stages_of_a_giver_end_one_after_the_other() -> None:
    """Whenever the other worker returns, nobody is asked that takes no further step."""
    scenario, plan = with_adamw(apart([1.0] * 3, [0.25, 0.5], 2, OuterStep(quorum=1), 0.125))
    _, before, last = plan.pipelines
    halves = (replace(before.stages[0], end_layer=1, in_flight=2), replace(last.stages[0], first_layer=1))
    pipelines = (plan.pipelines[0], replace(last, stages=halves, microbatches=(1, 1)))
    for tenths in range(120):
        faults = (Absence("device-0", 0.5, 1 + tenths / 10),)
        record = simulated((replace(scenario, faults=faults), replace(plan, pipelines=pipelines)), steps=3)
        assert steps_of(record)[0] >= 2, tenths


@settings(max_examples=40)
@given(st.data())
def test_whoever_returns_trains_on_whatever_happens_to_those_that_give(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 3))
    steps_s = data.draw(st.lists(st.sampled_from([0.5, 1.0, 1.75]), min_size=count, max_size=count))
    has_stages = count > 1 and data.draw(st.booleans())
    outer = OuterStep(quorum=data.draw(st.integers(1, count - has_stages)))
    scenario, plan = with_adamw(apart(steps_s, [0.25, 0.5], 2, outer, 0.125))
    if has_stages:
        # The first worker becomes the second stage of the last one.
        *_, before, last = plan.pipelines
        halves = (replace(before.stages[0], end_layer=1, in_flight=2), replace(last.stages[0], first_layer=1))
        worker = replace(last, stages=halves, microbatches=(1, 1))
        plan = replace(plan, pipelines=(*plan.pipelines[:-2], worker))
    faults = []
    for device in plan.devices:
        now_s = 0.0
        for _ in range(data.draw(st.integers(0, 2))):
            start_s = now_s + data.draw(st.sampled_from([0.5, 1.25, 3.0]))
            now_s = start_s + data.draw(st.sampled_from([0.25, 2.0, 5.5]))
            faults.append(Absence(device, start_s, now_s))
    struck = replace(scenario, faults=tuple(faults))
    record = simulated((struck, plan), steps=7)
    trained = sum(plan.pipelines[worker].samples * steps for worker, steps in steps_of(record).items())
    # What is left over is less than a step of any worker.
    assert 7 * count - min(pipeline.samples for pipeline in plan.pipelines) < trained <= 7 * count
    # A run that ends by time ends too, whoever waits then.
    assert Simulator(duration_s=4.0).run(struck, plan, None, 10**6).events
    # A device sends, and gets, the state of its own layers at most: three times their parameters.
    held = {r.device: sum((1000, 2000)[layer] for layer in s.layers) for s in plan.stages for r in s.replicas}
    for event in record.events:
        if event.kind is EventKind.MIGRATE:
            assert event.size_bytes <= 3 * held[event.device if event.peer == HUB else event.peer]
            assert event.arrived_s > event.end_s


def test_a_worker_that_never_returns_leaves_its_steps_to_the_others() -> None:
    fault = Absence("device-1", 3.5)
    record = simulated(apart([1.0, 1.0], [0.5], 2, OuterStep(quorum=1), 0.25, (fault,)), steps=8)
    assert steps_of(record) == {0: 13, 1: 3}


def test_a_stopped_worker_stops_nobody() -> None:
    fault = Hang("device-1", 3.5, 6.0)
    record = simulated(apart([1.0, 1.0], [0.5], 2, OuterStep(quorum=1), 0.25, (fault,)), steps=8)
    assert begins_s(record, "device-0")[:8] == [float(step) for step in range(8)]
    assert begins_s(record, "device-1")[:5] == [0, 1, 2, 3, 6.5]


# --- beside Streaming DiLoCo ------------------------------------------------------------------------------------


@settings(max_examples=20)
@given(st.integers(2, 3), st.integers(3, 6), st.integers(1, 3), st.sampled_from(["none", "int4"]))
def test_with_all_workers_at_one_speed_the_same_pseudo_gradients_leave_as_in_streaming(
    workers: int, every: int, fragments: int, compression: str
) -> None:
    outer = OuterStep(fragments=fragments, overlap_steps=2, mixing=0.5, compression=compression)
    steps_s, transfer_s = [1.0] * workers, [0.25, 0.125, 0.25]
    record = simulated(apart(steps_s, transfer_s, every, outer, 0.125), steps=2 * every)
    streaming = replace(outer, exchange="allgather")
    beside = simulated(regions(steps_s, transfer_s, every, streaming, 0.125), steps=2 * every)
    for number in range(workers):
        name, other = f"device-{number}", f"device-{(number + 1) % workers}"
        assert begins_s(record, name) == begins_s(beside, name)
        assert _by_step(sends(record, name, HUB)) == _by_step(sends(beside, name, other))
        taken = {event.end_s for event in outer_steps(record, name)}
        # Where Streaming DiLoCo takes the outer step, except those at the end of the run.
        expected = {start_s + 2 for start_s, step, _ in sends(beside, name, other) if step + 2 < 2 * every - 1}
        assert expected <= taken


def _by_step(sent: list[tuple[float, int, int]]) -> list[tuple[float, int, int]]:
    """Streaming DiLoCo sends each run of layers by itself."""
    total: Counter[tuple[float, int]] = Counter()
    for start_s, step, size_bytes in sent:
        total[start_s, step] += size_bytes
    return [(start_s, step, size_bytes) for (start_s, step), size_bytes in sorted(total.items())]


@settings(max_examples=30)
@given(
    st.lists(st.sampled_from([0.5, 1.0, 1.75]), min_size=1, max_size=3),
    st.integers(1, 4),
    st.data(),
)
def test_every_run_trains_its_samples_and_loses_no_pseudo_gradient(
    step_s: list[float], every: int, data: st.DataObject
) -> None:
    outer = OuterStep(
        fragments=data.draw(st.integers(1, min(2, every))),
        overlap_steps=data.draw(st.integers(0, every - 1)),
        quorum=data.draw(st.integers(1, len(step_s))),
        grace_s=data.draw(st.sampled_from([0.0, 0.75, None])),
    )
    record = simulated(apart(step_s, [0.25, 0.5], every, outer, 0.125), steps=7)
    assert sum(steps_of(record).values()) == 7 * len(step_s)
    for number, own_s in enumerate(step_s):
        starts = begins_s(record, f"device-{number}")
        assert starts == [own_s * step for step in range(len(starts))]
    names = [f"device-{number}" for number in range(len(step_s))]
    sent = {(name, step) for name in names for _, step, _ in sends(record, name, HUB)}
    assert {(event.peer, event.step) for event in outer_steps(record, HUB)} == sent
