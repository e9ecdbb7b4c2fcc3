"""Decisions that move layers: nothing is lost or doubled, what travels does so over the links as they are."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from experiments.benches.planning.random_clusters import random_cluster
from planner.adapt.migration import LayerTransfer, Migration, least_migration_s, migration_time_s
from planner.events.event import PROBE_ACTION, Event, EventKind
from planner.plan.plan import Plan, Replica, Synchronisation
from planner.runs.event_totals import step_ends_s
from planner.runs.memory_timeline import memory_timelines, peak_memory_bytes
from planner.runs.metrics import measure
from planner.runs.record import RunRecord
from planner.scenario.cluster import Cluster, Device
from planner.scenario.effects import TCP, Effects, NetworkEffects
from planner.scenario.scenario import Scenario
from sim.migration import travel_s
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import layered_plan, mesh_scenario
from tests.helpers.strategies.scripted_policy import Scripted
from traces.common.errors import RunError
from traces.trace import LinkTrace

EXACT = 1e-9
LAYERS = 6
PARAMETER_BYTES = (10**6, 2 * 10**6, 3 * 10**6, 10**6, 5 * 10**6, 10**6)


def layers_on_three(trace: LinkTrace | None = None, batch: int = 4, latency_s: float = 0.02) -> Scenario:
    """Six layers, three devices in regions of their own, a link of 8 Mbit/s for each pair."""
    scenario = mesh_scenario(
        3,
        [0.1, 0.2, 0.1, 0.3, 0.1, 0.2],
        [0.2, 0.4, 0.2, 0.6, 0.2, 0.4],
        link=lambda a, b: (8e6, latency_s),
        trace=trace,
        global_batch=batch,
        parameter_bytes=PARAMETER_BYTES,
        regions=["west", "north", "east"],
    )
    layers = tuple(replace(layer, update_s={"kind": 0.05}) for layer in scenario.model.layers)
    return replace(scenario, model=replace(scenario.model, layers=layers))


def cut_at(scenario: Scenario, ends: Sequence[int], names: Sequence[int] | None = None) -> Plan:
    """One pipeline with stages that end at some layers, on the named devices."""
    plan = layered_plan(scenario, [([(end, 1, len(ends)) for end in ends], [1] * scenario.training.global_batch)])
    if names is None:
        return plan
    (pipeline,) = plan.pipelines
    stages = tuple(
        replace(stage, replicas=(Replica(f"device-{name}"),))
        for stage, name in zip(pipeline.stages, names, strict=True)
    )
    return replace(plan, pipelines=(replace(pipeline, stages=stages),))


def replicated(scenario: Scenario, shares: Sequence[float]) -> Plan:
    """All layers on every device."""
    return layered_plan(scenario, [([(LAYERS, 3, 1)], [scenario.training.global_batch])], shares=shares)


def of_kind(record: RunRecord, *kinds: EventKind) -> list[Event]:
    return [event for event in record.events if event.kind in kinds]


def run(scenario: Scenario, plan: Plan, plans: dict[int, Plan], steps: int) -> RunRecord:
    return Simulator().run(scenario, plan, Scripted(plans), steps)


def plan_of(record: RunRecord, step: int) -> Plan:
    return next((each.plan for each in reversed(record.decisions) if each.first_step <= step), record.plan)


def expected_work(record: RunRecord, steps: int) -> Counter[tuple[object, ...]]:
    """Forward and backward of every microbatch in every stage of each step's plan, and an update of each device."""
    work: Counter[tuple[object, ...]] = Counter()
    for step in range(steps):
        plan = plan_of(record, step)
        work.update((step, device, "U") for device in plan.devices)
        for number, pipeline in enumerate(plan.pipelines):
            for stage_number, stage in enumerate(pipeline.stages):
                for microbatch, samples in enumerate(pipeline.microbatches):
                    for replica, (first, end) in zip(stage.replicas, stage.intervals(samples), strict=True):
                        key = (step, replica.device, number, stage_number, microbatch)
                        work.update((*key, action) for action in "FB" if first < end)
    return work


def done_work(record: RunRecord) -> Counter[tuple[object, ...]]:
    return Counter(
        (e.step, e.device, "U") if e.action == "U" else (e.step, e.device, e.pipeline, e.stage, e.microbatch, e.action)
        for e in of_kind(record, EventKind.COMPUTE)
    )


# --- one move, by hand ------------------------------------------------------------------------------------------


def test_layers_leave_when_their_holder_is_done_and_who_needs_none_goes_on() -> None:
    scenario = layers_on_three()
    before, after = cut_at(scenario, [2, 4, 6]), cut_at(scenario, [1, 3, 6])
    record = run(scenario, before, {0: after}, 4)
    (decision,) = record.decisions
    assert [(m.source, m.target, m.first_layer, m.end_layer) for m in decision.migration.moves] == [
        ("device-0", "device-1", 1, 2),
        ("device-1", "device-2", 3, 4),
    ]
    assert "layer 1 from device-0 to device-1, 2.0 MB; layer 3 from device-1 to device-2, 1.0 MB" in decision.change
    moved = of_kind(record, EventKind.MIGRATE)
    assert [(e.device, e.peer, e.size_bytes, e.step, e.action) for e in sorted(moved, key=lambda e: e.device)] == [
        ("device-0", "device-1", 2 * 10**6, 2, "M"),
        ("device-1", "device-2", 10**6, 2, "M"),
    ]
    computed = of_kind(record, EventKind.COMPUTE)
    done_s = {name: max(e.end_s for e in computed if e.device == name and e.step == 1) for name in before.devices}
    begun_s = {name: min(e.start_s for e in computed if e.device == name and e.step == 2) for name in after.devices}
    assert {event.device: event.start_s for event in moved} == {name: done_s[name] for name in ("device-0", "device-1")}
    assert begun_s["device-0"] == done_s["device-0"]
    there_s = max(done_s["device-1"], done_s["device-0"] + 2.02)
    # The first microbatch's activations left behind the layers.
    first = min((e for e in of_kind(record, EventKind.SEND) if e.step == 2), key=lambda e: e.start_s)
    assert begun_s["device-1"] == pytest.approx(max(there_s, first.end_s + 0.02), rel=EXACT)
    assert migration_time_s(decision.migration, scenario) == pytest.approx(2.02, rel=EXACT)


@given(
    st.floats(1e-4, 2.0),
    st.floats(1e5, 1e10),
    st.lists(st.integers(1, 10**8), min_size=1, max_size=4),
    st.integers(1, 8),
    st.booleans(),
)
def test_policies_expect_moves_to_take_as_long_as_their_windows_need(
    latency_s: float, rate_bps: float, sizes: list[int], connections: int, has_windows: bool
) -> None:
    """Over an idle path of 1.5 s and 400 Mbit/s a layer of 20 MB takes 41 s, not the 2 s of rate and latency."""
    scenario = mesh_scenario(2, [0.1] * 2, [0.2] * 2, link=lambda a, b: (rate_bps, latency_s), regions=["west", "east"])
    if has_windows:
        scenario = replace(scenario, effects=replace(scenario.effects, network=TCP))
    moves = Migration(tuple(LayerTransfer("device-0", "device-1", 0, 1, size) for size in sizes))
    expected_s, simulated_s = migration_time_s(moves, scenario, connections), travel_s(moves, scenario, connections)
    assert expected_s == pytest.approx(simulated_s, rel=1e-6)


@given(
    st.integers(0, 10**5),
    st.lists(st.tuples(st.integers(0, 63), st.integers(0, 63), st.integers(1, 10**8)), min_size=1, max_size=12),
    st.sampled_from([NetworkEffects(), NetworkEffects(window_bytes=2.8e6), TCP]),
    st.sampled_from([0.0, 1e-4, 1e-3]),
    st.sampled_from([0.0, 0.01]),
    st.integers(1, 8),
)
@example(3, [(0, 1, 10**8), (0, 2, 10**7), (1, 2, 10**8), (1, 3, 10**6)], TCP, 0.0, 0.0, 1)
def test_moves_that_share_links_take_as_long_as_policies_expect(
    seed: int,
    moved: list[tuple[int, int, int]],
    network: NetworkEffects,
    loss: float,
    jitter_s: float,
    connections: int,
) -> None:
    """Interfaces, networks of regions and links between regions, some of which lose packets or delay them."""
    scenario = random_cluster(seed)
    links = tuple(
        replace(link, loss=loss * (number % 3 == 0), jitter_s=jitter_s * (number % 2))
        for number, link in enumerate(scenario.cluster.links)
    )
    scenario = replace(scenario, cluster=replace(scenario.cluster, links=links), effects=Effects(network=network))
    names = [device.name for device in scenario.cluster.devices]
    # Acknowledgements wait for nothing where no device gets something from one to which it sends.
    pairs = [(*sorted((one % len(names), other % len(names))), size) for one, other, size in moved]
    moves = Migration(
        tuple(LayerTransfer(names[one], names[other], 0, 1, size) for one, other, size in pairs if one != other)
    )
    expected_s, simulated_s = migration_time_s(moves, scenario, connections), travel_s(moves, scenario, connections)
    assert expected_s == pytest.approx(simulated_s, rel=1e-6)
    assert least_migration_s(moves, scenario) <= simulated_s * (1 + 1e-9)


def test_before_the_move_the_run_is_the_old_plans_and_after_it_the_new_ones() -> None:
    scenario = layers_on_three()
    before, after = cut_at(scenario, [2, 4, 6]), cut_at(scenario, [3, 6], [2, 0])
    moved = run(scenario, before, {0: after}, 4)
    old, new = (Simulator().run(scenario, plan, None, 2) for plan in (before, after))
    events = [event for event in moved.events if event.action != PROBE_ACTION]
    first = [event for event in events if event.step < 2 and event.kind is not EventKind.DECISION]
    assert first == list(old.events)
    later = [event for event in events if event.step >= 2 and event.kind is not EventKind.MIGRATE]
    assert what_happened(later, 2) == what_happened(new.events, 0)


def what_happened(events: Iterable[Event], first_step: int) -> Counter[tuple[object, ...]]:
    """Rows without times; who waited is a matter of when."""
    return Counter(
        (e.kind, e.device, e.peer, e.stage, e.microbatch, e.step - first_step, e.action, e.size_bytes)
        for e in events
        if e.kind is not EventKind.RECEIVE
    )


def test_moves_between_the_same_two_devices_leave_in_turn_and_others_beside_them() -> None:
    scenario = layers_on_three(latency_s=0.0)
    before, after = cut_at(scenario, [1, 3, 6]), cut_at(scenario, [3, 6], [2, 0])
    record = run(scenario, before, {0: after}, 4)
    moved = {(e.device, e.peer): [] for e in of_kind(record, EventKind.MIGRATE)}
    for event in of_kind(record, EventKind.MIGRATE):
        moved[event.device, event.peer].append((event.size_bytes, event.end_s - event.start_s))
    assert moved == {
        ("device-0", "device-2"): [(10**6, pytest.approx(1))],
        ("device-1", "device-2"): [(5 * 10**6, pytest.approx(5))],
        ("device-2", "device-0"): [(7 * 10**6, pytest.approx(7))],
    }


# --- for any cuts, links and traces -----------------------------------------------------------------------------


@st.composite
def cuts(draw: st.DrawFn) -> Plan:
    scenario = layers_on_three()
    if draw(st.booleans()):
        return replicated(scenario, draw(st.sampled_from([(1, 1, 1), (2, 1, 1), (1, 2, 1)])))
    names = draw(st.permutations(range(3)))[: draw(st.integers(1, 3))]
    ends = sorted(draw(st.sets(st.integers(1, LAYERS - 1), min_size=len(names) - 1, max_size=len(names) - 1)))
    return cut_at(scenario, [*ends, LAYERS], names)


TRACE = LinkTrace(np.array([0.0, 3.0, 5.0, 9.0]), np.array([8e6, 1e6, 0.0, 2e6]), 12.0)


@settings(max_examples=20)
@given(
    start=cuts(),
    plans=st.dictionaries(st.integers(0, 4), cuts(), max_size=4),
    trace=st.sampled_from([None, TRACE]),
    steps=st.integers(1, 7),
)
def test_there_and_back_again_nothing_is_lost_or_doubled(
    start: Plan, plans: dict[int, Plan], trace: LinkTrace | None, steps: int
) -> None:
    scenario = layers_on_three(trace)
    record = run(scenario, start, plans, steps)
    assert len(step_ends_s(record.events)) == steps
    assert done_work(record) == expected_work(record, steps)
    moved = of_kind(record, EventKind.MIGRATE)
    carried_out = [each for each in record.decisions if each.first_step < steps]
    for decision in carried_out:
        own = [event for event in moved if event.step == decision.first_step]
        assert sum(event.size_bytes for event in own) == decision.migration.size_bytes
    assert sum(e.size_bytes for e in moved) == sum(each.migration.size_bytes for each in carried_out)
    assert_in_time(record, moved)
    # Each pair has a link of its own: what left over it while layers travelled is the integral of its rate.
    for source, target in {(event.device, event.peer) for event in moved if event.size_bytes}:
        for step in {e.step for e in moved if (e.device, e.peer) == (source, target)}:
            own = [e for e in moved if (e.device, e.peer, e.step) == (source, target, step)]
            start_s, end_s = own[0].start_s, max(event.end_s for event in own)
            bits = (end_s - start_s) * 8e6 if trace is None else float(trace.bits_between(start_s, end_s))
            assert 8 * sum(event.size_bytes for event in own) == pytest.approx(bits, rel=1e-6)
    assert record.events == run(scenario, start, plans, steps).events
    lines = memory_timelines(record)
    last = set(plan_of(record, steps - 1).devices)
    for device, line in lines.items():
        assert line.held_bytes.min() >= -1e-6
        assert (line.held_bytes[-1] > 1) == (device in last)


def assert_in_time(record: RunRecord, moved: Sequence[Event]) -> None:
    """Nobody sends layers before its last step is over, or computes with layers that are not there."""
    for event in of_kind(record, EventKind.COMPUTE):
        for move in moved:
            if event.device == move.device and event.step < move.step:
                assert event.end_s <= move.start_s + 1e-9
            if event.device == move.peer and event.step >= move.step:
                assert event.start_s >= move.end_s - 1e-9


@settings(max_examples=10)
@given(start=cuts(), plans=st.dictionaries(st.integers(0, 4), cuts(), max_size=3), duration_s=st.floats(0.5, 60))
def test_a_duration_gives_the_run_of_so_many_steps(start: Plan, plans: dict[int, Plan], duration_s: float) -> None:
    scenario = layers_on_three()
    timed = Simulator(duration_s).run(scenario, start, Scripted(plans), 10**9)
    ends_s = step_ends_s(timed.events)
    counted = run(scenario, start, plans, len(ends_s))
    assert timed.events == counted.events
    assert ends_s[-1] >= duration_s or of_kind(timed, EventKind.MIGRATE)


# --- what needs no move -----------------------------------------------------------------------------------------


def test_other_shares_need_no_barrier() -> None:
    scenario = layers_on_three()
    even, uneven = replicated(scenario, (1, 1, 1)), replicated(scenario, (2, 1, 1))
    record = run(scenario, even, {0: uneven}, 4)
    (decision,) = record.decisions
    assert decision.migration == Migration(())
    assert "samples of replicas [[1, 2, 1]] -> [[2, 1, 1]]" in decision.change
    assert not of_kind(record, EventKind.MIGRATE)
    assert done_work(record) == expected_work(record, 4)


def test_more_connections_are_set_up_between_two_steps() -> None:
    scenario = layers_on_three()
    plan = cut_at(scenario, [2, 4, 6])
    other = replace(plan, connections=3, compression="int8", synchronisation=Synchronisation(algorithm="tree"))
    record = run(scenario, plan, {0: other}, 4)
    assert done_work(record) == expected_work(record, 4)
    sent = [event for event in of_kind(record, EventKind.SEND) if event.action != PROBE_ACTION]
    sizes = {step: {event.size_bytes for event in sent if event.step == step} for step in (1, 2)}
    assert max(sizes[2]) < min(sizes[1])


def test_without_a_barrier_there_is_no_moment_for_a_move() -> None:
    scenario = mesh_scenario(2, [1.0], [1.0], global_batch=4)
    plan = replace(layered_plan(scenario, [([(1, 1, 1)], [1, 1])] * 2), synchronisation=Synchronisation("asgd"))
    swapped = replace(plan, pipelines=plan.pipelines[::-1])
    with pytest.raises(RunError, match=r"after step 0 policy Scripted moves layers .* needs method 'allreduce'"):
        run(scenario, plan, {0: swapped}, 4)


# --- what a run amounts to --------------------------------------------------------------------------------------


def test_a_device_counts_while_a_plan_has_it() -> None:
    scenario = layers_on_three()
    cluster = scenario.cluster
    priced = tuple(Device(d.name, d.kind, d.region, d.memory_bytes, price_per_hour=36.0) for d in cluster.devices)
    links = tuple(replace(link, price_per_gb=1.0) for link in cluster.links)
    scenario = replace(scenario, cluster=Cluster(priced, links))
    before, after = cut_at(scenario, [2, 6], [0, 1]), cut_at(scenario, [2, 6], [2, 1])
    record = run(scenario, before, {0: after}, 4)
    ends_s = step_ends_s(record.events)
    metrics = measure(record)
    moved = 3 * 10**6
    sent = sum(event.size_bytes for event in of_kind(record, EventKind.SEND))
    assert metrics.wan_bytes == sent + moved
    seconds = ends_s[1] + (ends_s[3] - ends_s[1]) + ends_s[3]
    assert metrics.cost_usd == pytest.approx(seconds / 100 + (sent + moved) / 1e9, rel=1e-9)
    assert metrics.utilisation.keys() == {"device-0", "device-1", "device-2"}
    busy_s = sum(e.end_s - e.start_s for e in of_kind(record, EventKind.COMPUTE) if e.device == "device-2")
    assert metrics.utilisation["device-2"] == pytest.approx(busy_s / (ends_s[3] - ends_s[1]))
    # Who joins holds nothing before, and who leaves nothing afterwards.
    lines = memory_timelines(record)
    assert lines["device-2"].held_bytes[0] == lines["device-0"].held_bytes[-1] == 0
    assert peak_memory_bytes(record)["device-2"] == peak_memory_bytes(record)["device-0"]
