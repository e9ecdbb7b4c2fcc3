"""When pipelines that meet in outer steps wait, and what travels when; by hand, and where waiting must vanish."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.check import check_plan
from planner.events.event import Event, EventKind
from planner.plan.outer_step import EXCHANGES, OUTER_COMPRESSIONS, PATTERNS, OuterStep, fragment_exchanges
from planner.plan.plan import Plan, Synchronisation
from planner.runs.metrics import measure
from planner.runs.record import RunRecord
from planner.scenario.cluster import Cluster
from planner.scenario.profile import TimeTable
from planner.scenario.scenario import Scenario
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import layered_plan, mesh_scenario
from tests.helpers.strategies.scripted_policy import Scripted

# A layer's pseudo-gradients take a second on a link for so many bytes.
BYTES_PER_S = 4000


def regions(
    step_s: Sequence[float], transfer_s: Sequence[float], every: int, outer: OuterStep, latency_s: float = 0.0
) -> tuple[Scenario, Plan]:
    """A pipeline of one device for each of ``step_s``, its duration of a step; a layer for each of ``transfer_s``."""
    layers = len(transfer_s)
    scenario = mesh_scenario(
        len(step_s),
        [1.0] * layers,
        [1.0] * layers,
        parameter_bytes=[round(BYTES_PER_S * each) for each in transfer_s],
        link=lambda a, b: (8.0 * BYTES_PER_S, latency_s),
        global_batch=len(step_s),
        regions=[f"region-{index}" for index in range(len(step_s))],
    )
    tables = {
        f"kind-{index}": TimeTable((1,), (each / 2 / layers,), (each / 4 / layers,), (each / 4 / layers,))
        for index, each in enumerate(step_s)
    }
    devices = tuple(replace(device, kind=f"kind-{i}") for i, device in enumerate(scenario.cluster.devices))
    model = replace(scenario.model, layers=tuple(replace(layer, times=tables) for layer in scenario.model.layers))
    scenario = replace(scenario, cluster=Cluster(devices, scenario.cluster.links), model=model)
    plan = layered_plan(scenario, [([(layers, 1, 1)], [1])] * len(step_s))
    how = Synchronisation("diloco-streaming", interval_steps=every, outer=outer)
    return scenario, replace(plan, synchronisation=how)


def simulated(case: tuple[Scenario, Plan], steps: int) -> RunRecord:
    return Simulator().run(*case, None, steps)


def begins_s(record: RunRecord, device: str) -> list[float]:
    first: dict[int, float] = {}
    for event in record.events:
        if event.kind is EventKind.COMPUTE and event.device == device:
            first[event.step] = min(event.start_s, first.get(event.step, event.start_s))
    return [first[step] for step in sorted(first)]


def sends(record: RunRecord, device: str) -> list[Event]:
    return [event for event in record.events if event.kind is EventKind.SEND and event.device == device]


def test_an_outer_step_waits_for_the_pseudo_gradients() -> None:
    # 2 steps of 1 s, 0.5 s until the last byte has left, and 0.25 s of latency.
    record = simulated(regions([1.0, 1.0], [0.5], 2, OuterStep(), 0.25), steps=6)
    for device in ("device-0", "device-1"):
        assert begins_s(record, device) == [0, 1, 2.75, 3.75, 5.5, 6.5]
    assert [event.step for event in sends(record, "device-0")] == [1, 3, 5]
    assert measure(record).wan_bytes == 2 * 3 * 2000


def test_pipelines_wait_for_the_slowest() -> None:
    record = simulated(regions([1.0, 2.0], [0.5], 2, OuterStep()), steps=4)
    assert begins_s(record, "device-0") == [0, 1, 4.5, 5.5]
    # The pseudo-gradients of the faster one have arrived at 2.5 s.
    assert begins_s(record, "device-1") == [0, 2, 4, 6]


def test_during_the_overlap_training_goes_on() -> None:
    # Sent at 4, needed at 6, arrived at 5.5; then the next ones are sent at 8.
    record = simulated(regions([1.0, 1.0], [1.25], 4, OuterStep(overlap_steps=2), 0.25), steps=12)
    assert begins_s(record, "device-0") == [float(step) for step in range(12)]


def test_what_the_overlap_does_not_hide_is_waited_for() -> None:
    # Sent at 4, needed at 5, arrived at 6.5.
    record = simulated(regions([1.0, 1.0], [2.25], 4, OuterStep(overlap_steps=1), 0.25), steps=8)
    assert begins_s(record, "device-0") == [0, 1, 2, 3, 4, 6.5, 7.5, 8.5]


def test_fragments_leave_one_after_the_other() -> None:
    outer = OuterStep(fragments=3, pattern="strided", overlap_steps=1)
    record = simulated(regions([1.0, 1.0], [0.25, 0.5, 0.75, 1.0], 6, outer), steps=12)
    # Fragment 0 has layers 0 and 3, in two messages; fragments 1 and 2 have layers 1 and 2.
    found = [(event.step, event.size_bytes) for event in sends(record, "device-0")]
    each = [(1, 1000), (1, 4000), (3, 2000), (5, 3000)]
    assert found == [*each, *((step + 6, size_bytes) for step, size_bytes in each)]
    # Fragment 0 leaves from 2 to 3.25, a quarter of a second too late for the step that begins at 3.
    assert begins_s(record, "device-0")[:5] == [0, 1, 2, 3.25, 4.25]


def test_means_of_parts_leave_when_all_pseudo_gradients_are_there() -> None:
    # Of three pipelines each sends a third, 0.25 s; the slowest one at 2.5 s, so that all others' means leave at 3.
    outer = OuterStep(overlap_steps=1, exchange="reduce-scatter")
    record = simulated(regions([1.0, 1.0, 1.25], [0.75], 2, outer, 0.25), steps=4)
    times_s = {
        device: [(event.start_s, event.end_s) for event in sends(record, device)[:4]]
        for device in ("device-0", "device-2")
    }
    assert times_s["device-0"] == [(2, 2.25), (2, 2.25), (3, 3.25), (3, 3.25)]
    # The slowest one has had theirs since 2.5 s, and sends means at once, behind its pseudo-gradients.
    assert times_s["device-2"] == [(2.5, 2.75), (2.5, 2.75), (2.5, 3.0), (2.5, 3.0)]
    # The means of the other two arrive at 3.5 s.
    assert begins_s(record, "device-0") == [0, 1, 2, 3.5]
    assert begins_s(record, "device-2") == [0, 1.25, 2.5, 3.75]
    # Each sends 4 thirds instead of 2 wholes.
    assert measure(record).wan_bytes == 2 * 3 * 4 * 1000


@given(
    st.lists(st.sampled_from([0.5, 1.0, 1.75]), min_size=2, max_size=5),
    st.lists(st.integers(0, 40), min_size=1, max_size=4),
    st.sampled_from(OUTER_COMPRESSIONS),
)
def test_reduce_scatter_sends_two_nth_of_the_bytes(step_s: list[float], sizes: list[int], compression: str) -> None:
    """Of n pipelines; but for compression, whose chunks end with parts, and for layers of fewer values than parts."""
    count, sent = len(step_s), []
    for exchange in EXCHANGES:
        outer = OuterStep(compression=compression, exchange=exchange)
        case = regions(step_s, [size * count / 1000 for size in sizes], 2, outer)
        check_plan(case[1], case[0])
        sent.append(measure(simulated(case, steps=4)).wan_bytes)
    whole, parts = sent
    if compression in ("none", "bf16"):
        assert parts == whole * 2 / count
    else:
        assert whole * 2 / count <= parts <= whole * 2 / count + 2 * 2 * len(sizes) * count * count * 5


def test_exchanges_change_when_all_that_is_under_way_has_arrived() -> None:
    scenario, plan = regions([1.0, 1.0], [2.25], 4, OuterStep(overlap_steps=3), 0.25)
    how = plan.synchronisation
    other = replace(how, interval_steps=2, outer=replace(how.outer, overlap_steps=1))
    packed = replace(other, outer=replace(other.outer, compression="int8"))
    # Sent at 4, needed at 5 since step 5 begins with other settings, arrived at 6.5; then sent at 7.5, needed at 8.5.
    for later, begins, size_bytes in ((other, 10.0, 9000), (packed, 8.5, 9 * (250 + 4))):
        policy = Scripted({3: replace(plan, synchronisation=later)})
        record = Simulator().run(scenario, plan, policy, 8)
        assert begins_s(record, "device-0") == [0, 1, 2, 3, 4, 6.5, 7.5, begins]
        found = [(event.step, event.size_bytes) for event in sends(record, "device-0")]
        assert found == [(3, 9000), (5, size_bytes), (7, size_bytes)]


def test_a_single_pipeline_sends_nothing_and_never_waits() -> None:
    record = simulated(regions([1.0], [0.5], 2, OuterStep()), steps=4)
    assert begins_s(record, "device-0") == [0, 1, 2, 3]
    assert not sends(record, "device-0")


@settings(max_examples=30)
@given(
    st.lists(st.sampled_from([0.5, 1.0, 1.75]), min_size=2, max_size=3),
    st.integers(1, 6),
    st.integers(1, 3),
    st.sampled_from(PATTERNS),
    st.sampled_from(EXCHANGES),
    st.data(),
)
def test_more_overlap_never_makes_a_run_longer_and_sends_the_same(
    step_s: list[float], every: int, fragments: int, pattern: str, exchange: str, data: st.DataObject
) -> None:
    overlaps = sorted(data.draw(st.lists(st.integers(0, every - 1), min_size=2, max_size=2)))
    records = []
    for overlap_steps in overlaps:
        outer = OuterStep(fragments=min(fragments, every), pattern=pattern, overlap_steps=overlap_steps)
        outer = replace(outer, exchange=exchange)
        case = regions(step_s, [0.25, 1.0, 0.5], every, outer, 0.125)
        check_plan(case[1], case[0])
        records.append(simulated(case, steps=9))
    less, more = records
    assert measure(more).wan_bytes == measure(less).wan_bytes
    assert begins_s(more, "device-0")[-1] <= begins_s(less, "device-0")[-1] + 1e-9


# --- the steps after which fragments are exchanged ---------------------------------------------------------------


@given(st.integers(1, 12), st.data(), st.integers(0, 20), st.integers(1, 20))
def test_exchanges_are_those_of_counting_step_by_step(
    every: int, data: st.DataObject, first_step: int, count: int
) -> None:
    outer = OuterStep(fragments=data.draw(st.integers(1, every)))
    fragment = data.draw(st.integers(0, outer.fragments - 1))
    exchanges = fragment_exchanges(every, outer, first_step)[fragment]
    offset = (fragment + 1) * every // outer.fragments
    steps = range(first_step, first_step + count)
    after = [step for step in steps if (step + 1 - offset) % every == 0]
    for step in steps:
        assert exchanges.follows(step) == (step in after)
        assert exchanges.before(step) == sum(each < step for each in after)
    assert [exchanges.last_step(number) for number in range(len(after))] == after


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 8)), min_size=1, max_size=4), st.data(), st.integers(0, 9))
def test_exchanges_after_a_change_contain_all_steps_since_the_last_ones(
    parts: list[tuple[int, int]], data: st.DataObject, first_step: int
) -> None:
    """``parts`` are intervals, and for how many steps they last."""
    step, exchanges = first_step, ()
    contained = [first_step]
    for every, count in parts:
        fragments = data.draw(st.integers(1, every))
        exchanges = fragment_exchanges(every, OuterStep(fragments=fragments), step, exchanges)
        assert {each.end_of(0) for each in exchanges} == {min(contained)}
        ends = [min(contained)] * fragments
        for sent in range(step, step + count):
            for fragment, each in enumerate(exchanges):
                ends[fragment] = sent + 1 if each.follows(sent) else ends[fragment]
                assert each.end_of(each.before(sent + 1)) == ends[fragment]
        step, contained = step + count, ends


@given(st.integers(1, 12), st.data(), st.sampled_from(PATTERNS))
def test_every_layer_is_in_one_fragment_and_fragments_are_equal(layers: int, data: st.DataObject, pattern: str) -> None:
    outer = OuterStep(fragments=data.draw(st.integers(1, layers)), pattern=pattern)
    found = [[layer for run in runs for layer in range(*run)] for runs in outer.fragment_runs(layers)]
    assert sorted(layer for each in found for layer in each) == list(range(layers))
    sizes = [len(each) for each in found]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("method", ["diloco", "diloco-streaming"])
def test_the_whole_model_at_once_is_the_same_by_both_methods(method: str) -> None:
    scenario, plan = regions([1.0, 2.0], [0.5, 0.25], 3, OuterStep(), 0.125)
    plan = replace(plan, synchronisation=replace(plan.synchronisation, method=method))
    check_plan(plan, scenario)
    assert begins_s(simulated((scenario, plan), 6), "device-0") == [0, 1, 2, 6.875, 7.875, 8.875]
