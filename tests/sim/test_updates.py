"""Pipelines that send each other updates without waiting, against sums by hand and a recursion of a few lines."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.check import check_plan
from planner.cost.synchronisation import UpdateEdge, update_edges
from planner.events.event import SYNC_ACTION, UPDATE_ACTION, Event, EventKind
from planner.plan.plan import ORDERS, Pipeline, Plan, Replica, Stage, Synchronisation
from planner.runs.event_totals import step_ends_s
from planner.runs.memory_timeline import peak_memory_bytes
from planner.runs.metrics import measure
from planner.runs.record import RunRecord
from planner.scenario.cluster import Cluster, Link
from planner.scenario.faults import Absence
from planner.scenario.profile import LayerProfile, ModelProfile, TimeTable
from planner.scenario.scenario import Scenario
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import layered_plan, mesh_scenario
from traces.common.errors import RunError

EXACT = 1e-9

# An update of so many bytes takes a second on a link.
BYTES_PER_S = 1000


def two_regions(
    step_s: Sequence[float],
    *,
    transfer_s: float = 0.0,
    latency_s: float = 0.0,
    method: str = "asgd",
    every: int = 1,
    bound: int | None = None,
) -> tuple[Scenario, Plan]:
    """One layer and a pipeline of one device for each entry, which takes that long for a step of one sample.

    An update takes ``transfer_s`` to leave and ``latency_s`` to arrive. All times that are eighths are exact.
    """
    count = len(step_s)
    scenario = mesh_scenario(
        count,
        [1.0],
        [1.0],
        parameter_bytes=[round(BYTES_PER_S * transfer_s)],
        link=lambda a, b: (8.0 * BYTES_PER_S, latency_s),
        global_batch=count,
        regions=[f"region-{index}" for index in range(count)],
    )
    tables = {f"kind-{i}": TimeTable((1,), (each / 2,), (each / 4,), (each / 4,)) for i, each in enumerate(step_s)}
    (layer,) = scenario.model.layers
    devices = tuple(replace(device, kind=f"kind-{i}") for i, device in enumerate(scenario.cluster.devices))
    scenario = replace(
        scenario,
        cluster=Cluster(devices, scenario.cluster.links),
        model=ModelProfile("mesh", (replace(layer, times=tables),)),
    )
    plan = layered_plan(scenario, [([(1, 1, 1)], [1])] * count)
    return scenario, replace(plan, synchronisation=Synchronisation(method, interval_steps=every, staleness_bound=bound))


def simulated(case: tuple[Scenario, Plan], steps: int) -> RunRecord:
    return Simulator().run(*case, None, steps)


def staleness(record: RunRecord, receiver: str) -> list[int]:
    """Of the updates that a device applied, in the order of the sender's steps."""
    updates = [event for event in record.events if event.kind is EventKind.UPDATE and event.device == receiver]
    return [event.staleness for event in sorted(updates, key=lambda event: event.step)]


def begins_s(record: RunRecord, device: str) -> list[float]:
    """When the device began each step's first action."""
    first: dict[int, float] = {}
    for event in record.events:
        if event.kind is EventKind.COMPUTE and event.device == device:
            first[event.step] = min(event.start_s, first.get(event.step, event.start_s))
    return [first[step] for step in sorted(first)]


# --- by hand --------------------------------------------------------------------------------------------------


def test_equal_pipelines_with_quick_links() -> None:
    # The update of step n leaves at n + 1 and arrives 1/4 s later, when the receiver has finished n + 1 steps. The
    # sender began step n at n, and knew of n - 1: the update of step n - 1 arrived 1/4 s after that.
    record = simulated(two_regions([1.0, 1.0], transfer_s=0.125, latency_s=0.125), steps=6)
    for receiver in ("device-0", "device-1"):
        assert staleness(record, receiver) == [1, 2, 2, 2, 2, 2]
    assert measure(record).staleness == pytest.approx(11 / 6)


def test_an_update_that_arrives_as_a_step_ends_finds_it_finished() -> None:
    # 1 s under way: the update of step n is there at n + 2, the last one when all 5 steps are over. Its sender knew of
    # n - 1 steps, the last of which arrived at the moment at which it began.
    record = simulated(two_regions([1.0, 1.0], transfer_s=1.0), steps=5)
    assert staleness(record, "device-0") == [2, 3, 3, 3, 2]


def test_a_pipeline_twice_as_fast() -> None:
    record = simulated(two_regions([1.0, 2.0], transfer_s=0.25, latency_s=0.25), steps=6)
    # Fast to slow: step n of the fast one arrives at n + 1.5, when the slow one has finished floor((n + 1.5) / 2)
    # steps: 0 1 1 2 2 3. The fast one began it at n, knowing those that had arrived at 2.5, 4.5, ...: 0 0 0 1 1 2.
    assert staleness(record, "device-1") == [0, 1, 1, 1, 1, 1]
    # Slow to fast: step n arrives at 2n + 2.5, when the fast one has finished 2n + 2 steps, 6 at most. The slow one
    # began it at 2n, knowing those that had arrived at 1.5, 2.5, ...: 0 1 3 5 6 6 of them.
    assert staleness(record, "device-0") == [2, 3, 3, 1, 0, 0]


def test_nobody_waits_without_a_bound() -> None:
    record = simulated(two_regions([1.0, 2.0], transfer_s=7.0, latency_s=3.0), steps=8)
    assert begins_s(record, "device-0") == [1.0 * step for step in range(8)]
    assert begins_s(record, "device-1") == [2.0 * step for step in range(8)]


def test_a_bound_of_nothing_keeps_pipelines_in_step() -> None:
    # 1 s of compute, 0.5 s until the last byte has left, 0.25 s of latency.
    record = simulated(two_regions([1.0, 1.0], transfer_s=0.5, latency_s=0.25, bound=0), steps=6)
    for device in ("device-0", "device-1"):
        assert begins_s(record, device) == [1.75 * step for step in range(6)]
        # An update misses the one step that the receiver computed at the same time.
        assert staleness(record, device) == [1] * 6
    assert step_ends_s(record.events) == [1.75 * step + 1 for step in range(6)]


def test_unequal_pipelines_in_step_share_the_waiting() -> None:
    record = simulated(two_regions([1.0, 2.0], transfer_s=0.5, latency_s=0.25, bound=0), steps=5)
    # An update goes out and one comes back in two steps: 1 s and 2 s of compute, and twice 0.75 s.
    assert begins_s(record, "device-0") == [0.0, 2.75, 4.75, 7.25, 9.25]
    assert begins_s(record, "device-1") == [0.0, 2.0, 4.5, 6.5, 9.0]


def test_a_bound_larger_than_the_round_trip_costs_nothing() -> None:
    # Under way for 1.5 s: whoever may be 2 steps ahead never waits, with 1 step half a second on every other one.
    free = simulated(two_regions([1.0, 1.0], transfer_s=0.5, latency_s=1.0, bound=2), steps=6)
    assert begins_s(free, "device-0") == [0, 1, 2, 3, 4, 5]
    bound = simulated(two_regions([1.0, 1.0], transfer_s=0.5, latency_s=1.0, bound=1), steps=6)
    # Step s waits for update s - 2, which left at the end of step s - 2: 2.5 s for two steps.
    assert begins_s(bound, "device-0") == [0, 1, 2.5, 3.5, 5, 6]


@settings(max_examples=40)
@given(
    st.sampled_from(["asgd-ga", "ma"]),
    st.floats(0.01, 10),
    st.floats(0, 10),
    st.floats(0, 10),
    st.integers(1, 6),
    st.integers(1, 4),
)
def test_exchanging_less_often_is_faster_by_the_published_ratio_where_updates_are_waited_for(
    method: str, step_s: float, transfer_s: float, latency_s: float, every: int, rounds: int
) -> None:
    """Of (Tc + tau) / (Tc + tau / f): with equal pipelines and a bound of 0, and in no other setting.

    Without a bound nobody waits and the ratio is 1; of unequal ones the faster hides part of tau. Nobody waits for the
    last exchange, so it is the period between rounds of f steps that has this ratio.
    """
    parameters_s = round(BYTES_PER_S * transfer_s) / BYTES_PER_S
    tau_s = parameters_s + latency_s if parameters_s else 0.0
    periods_s = []
    for method_now, every_now in (("asgd", 1), (method, every)):
        case = two_regions(
            [step_s, step_s], transfer_s=transfer_s, latency_s=latency_s, method=method_now, every=every_now, bound=0
        )
        begins = begins_s(simulated(case, steps=every * rounds + 1), "device-0")
        periods_s.append((begins[every * rounds] - begins[0]) / (every * rounds))
    assert periods_s[0] == pytest.approx(step_s + tau_s, rel=EXACT)
    assert periods_s[1] == pytest.approx(step_s + tau_s / every, rel=EXACT)


@pytest.mark.parametrize("method", ["asgd-ga", "ma"])
def test_wan_bytes_fall_by_how_seldom_pipelines_exchange(method: str) -> None:
    whole = measure(simulated(two_regions([1.0, 1.0], transfer_s=1.0), steps=12)).wan_bytes
    assert whole == 2 * 12 * 1000
    for every in (1, 2, 3, 4, 6, 12):
        case = two_regions([1.0, 1.0], transfer_s=1.0, method=method, every=every)
        assert measure(simulated(case, steps=12)).wan_bytes == whole // every
    # What is left of the last round is not sent.
    case = two_regions([1.0, 1.0], transfer_s=1.0, method=method, every=5)
    assert measure(simulated(case, steps=12)).wan_bytes == 2 * 2 * 1000


def test_averaging_and_summing_move_the_same_bytes_at_the_same_times() -> None:
    sums, means = (
        simulated(two_regions([1.0, 2.0], transfer_s=1.5, latency_s=0.5, method=method, every=2, bound=1), steps=8)
        for method in ("asgd-ga", "ma")
    )
    assert sums.events == means.events


# --- a recursion ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Times in eighths of a second, which floating point adds exactly."""

    step: list[int]
    transfer: int
    latency: int
    every: int
    bound: int | None
    steps: int


@st.composite
def exchanges(draw: st.DrawFn) -> Case:
    return Case(
        draw(st.lists(st.integers(1, 12), min_size=2, max_size=3)),
        draw(st.integers(1, 12)),
        draw(st.integers(0, 12)),
        draw(st.integers(1, 4)),
        draw(st.none() | st.integers(0, 4)),
        draw(st.integers(1, 12)),
    )


def by_recursion(case: Case) -> tuple[list[list[Fraction]], dict[tuple[int, int], list[tuple[Fraction, int]]]]:
    """When each pipeline begins its steps, and by (sender, receiver) the arrival and staleness of each update."""
    count, every = len(case.step), case.every
    compute = [Fraction(each, 8) for each in case.step]
    begins: list[list[Fraction]] = [[] for _ in range(count)]
    arrivals: dict[tuple[int, int], list[Fraction]] = {(p, q): [] for p in range(count) for q in range(count) if p != q}
    while any(len(own) < case.steps for own in begins):
        for p, own in enumerate(begins):
            step = len(own)
            needed = 0 if case.bound is None else max(0, (step - case.bound) // every)
            sources = [arrivals[q, p] for q in range(count) if q != p]
            if step == case.steps or any(len(source) < needed for source in sources):
                continue
            begin = max(
                [own[-1] + compute[p] if own else Fraction(), *(source[needed - 1] for source in sources if needed)]
            )
            own.append(begin)
            if (step + 1) % every == 0:
                for (sender, _), times in arrivals.items():
                    if sender == p:
                        free = times[-1] - Fraction(case.latency, 8) if times else Fraction()
                        left = max(free, begin + compute[p]) + Fraction(case.transfer, 8)
                        times.append(left + Fraction(case.latency, 8))
    updates = {}
    for (sender, receiver), times in arrivals.items():
        updates[sender, receiver] = [
            (
                arrival,
                sum(begin + compute[receiver] <= arrival for begin in begins[receiver])
                - every * sum(other <= begins[sender][number * every] for other in arrivals[receiver, sender]),
            )
            for number, arrival in enumerate(times)
        ]
    return begins, updates


@settings(max_examples=150)
@given(exchanges(), st.sampled_from(ORDERS))
def test_begins_arrivals_and_staleness_are_those_of_a_recursion(case: Case, order: str) -> None:
    scenario, plan = two_regions(
        [each / 8 for each in case.step],
        transfer_s=case.transfer / 8,
        latency_s=case.latency / 8,
        method="asgd" if case.every == 1 else "asgd-ga",
        every=case.every,
        bound=case.bound,
    )
    record = simulated((scenario, replace(plan, order=order)), case.steps)
    begins, updates = by_recursion(case)
    for pipeline, expected in enumerate(begins):
        assert begins_s(record, f"device-{pipeline}") == expected
    found: dict[tuple[int, int], list[tuple[float, int]]] = {pair: [] for pair in updates}
    for event in record.events:
        if event.kind is EventKind.UPDATE:
            found[int(event.peer[-1]), int(event.device[-1])].append((event.start_s, event.staleness))
    assert found == updates


@settings(max_examples=60)
@given(exchanges(), st.integers(0, 3))
def test_nobody_runs_ahead_of_what_it_has_received_by_more_than_the_bound(case: Case, bound: int) -> None:
    # Updates come in rounds of `every` steps: between two of them the bound can be exceeded by the rest of a round.
    begins, updates = by_recursion(replace(case, bound=bound))
    for (_, receiver), arrived in updates.items():
        for step, begin in enumerate(begins[receiver]):
            received = case.every * sum(arrival <= begin for arrival, _ in arrived)
            assert step - received <= bound + case.every - 1


# --- who sends what to whom -----------------------------------------------------------------------------------


def cut_elsewhere(latency_s: float = 0.0) -> tuple[Scenario, Plan]:
    """Three layers of 125, 250 and 500 bytes, cut after the first by one pipeline and after the second by the other."""
    scenario = mesh_scenario(
        4,
        [1.0] * 3,
        [1.0] * 3,
        output_bytes=[0] * 3,
        parameter_bytes=[125, 250, 500],
        link=lambda a, b: (8000.0, latency_s if (a < 2) != (b < 2) else 0.0),
        global_batch=2,
        regions=["west", "west", "east", "east"],
    )
    pipelines = [([(1, 1, 2), (3, 1, 1)], [1]), ([(2, 1, 2), (3, 1, 1)], [1])]
    return scenario, replace(layered_plan(scenario, pipelines), synchronisation=Synchronisation("asgd"))


def test_stages_that_are_cut_elsewhere_exchange_the_layers_that_both_hold() -> None:
    scenario, plan = cut_elsewhere()
    assert set(update_edges(plan, scenario)) == {
        UpdateEdge("device-0", "device-2", (0, 1), 0, (0, 1), 125),
        UpdateEdge("device-1", "device-2", (0, 1), 0, (1, 2), 250),
        UpdateEdge("device-1", "device-3", (0, 1), 1, (2, 3), 500),
        UpdateEdge("device-2", "device-0", (1, 0), 0, (0, 1), 125),
        UpdateEdge("device-2", "device-1", (1, 0), 1, (1, 2), 250),
        UpdateEdge("device-3", "device-1", (1, 0), 1, (2, 3), 500),
    }
    assert update_edges(replace(plan, synchronisation=Synchronisation()), scenario) == ()


def test_the_rows_of_an_update() -> None:
    record = simulated(cut_elsewhere(latency_s=0.25), steps=2)
    rows = [event for event in record.events if event.kind is EventKind.UPDATE]
    assert len(rows) == 2 * 6
    # Forwards of layer 0, then of 1 and 2 until 3 s; the backward of 1 and 2 until 5 s.
    assert [row for row in rows if (row.device, row.peer, row.step) == ("device-2", "device-1", 0)] == [
        Event(EventKind.UPDATE, "device-2", "device-1", 1, 0, -1, 0, "", 5.5, 5.5, 250, 0)
    ]
    sends = [event for event in record.events if event.kind is EventKind.SEND and event.action == UPDATE_ACTION]
    assert len(sends) == 2 * 6
    assert [row for row in sends if (row.device, row.peer, row.step) == ("device-1", "device-2", 0)] == [
        Event(EventKind.SEND, "device-1", "device-2", 0, -1, -1, 0, UPDATE_ACTION, 5.0, 5.25, 250, arrived_s=5.5)
    ]
    assert all(event.staleness == -1 for event in record.events if event.kind is not EventKind.UPDATE)
    assert sum(row.size_bytes for row in sends) == measure(record).wan_bytes == 2 * 2 * (125 + 250 + 500)


@st.composite
def cut_twice(draw: st.DrawFn) -> tuple[Scenario, Plan]:
    """Pipelines of stages cut anywhere, of replicas, in a region each."""
    layers = draw(st.integers(1, 5))
    pipelines, regions = [], []
    for number in range(draw(st.integers(2, 3))):
        count = draw(st.integers(1, min(3, layers)))
        ends = [*sorted(draw(st.permutations(range(1, layers)))[: count - 1]), layers]
        widths = draw(st.lists(st.integers(1, 2), min_size=count, max_size=count))
        pipelines.append(
            ([(end, width, count - i) for i, (end, width) in enumerate(zip(ends, widths, strict=True))], [2])
        )
        regions += [f"region-{number}"] * sum(widths)
    sizes = draw(st.lists(st.integers(1, 1000).map(lambda size: 4 * size), min_size=layers, max_size=layers))
    scenario = mesh_scenario(
        len(regions),
        [1.0] * layers,
        [1.0] * layers,
        parameter_bytes=sizes,
        global_batch=2 * len(pipelines),
        regions=regions,
    )
    return scenario, layered_plan(scenario, pipelines)


@settings(max_examples=60)
@given(cut_twice(), st.sampled_from(["asgd", "asgd-ga", "ma"]), st.integers(1, 3), st.none() | st.integers(0, 2))
def test_every_layer_crosses_once_an_exchange_and_replicas_inside_sum_in_every_step(
    case: tuple[Scenario, Plan], method: str, every: int, bound: int | None
) -> None:
    scenario, plan = case
    every = 1 if method == "asgd" else every
    plan = replace(plan, synchronisation=Synchronisation(method, interval_steps=every, staleness_bound=bound))
    check_plan(plan, scenario)
    steps = 4
    record = simulated((scenario, plan), steps)
    crossed: Counter[tuple[int, int]] = Counter()
    summed: Counter[str] = Counter()
    owner = {
        replica.device: number
        for number, pipeline in enumerate(plan.pipelines)
        for stage in pipeline.stages
        for replica in stage.replicas
    }
    for event in record.events:
        if event.kind is EventKind.SEND and owner[event.device] != owner[event.peer]:
            assert event.action == UPDATE_ACTION
            crossed[owner[event.device], owner[event.peer]] += event.size_bytes
        elif event.kind is EventKind.SEND and event.action == SYNC_ACTION:
            summed[event.device] += event.size_bytes
    whole = scenario.model.parameter_bytes(0, len(scenario.model.layers)) * (steps // every)
    count = len(plan.pipelines)
    assert crossed == {(p, q): whole for p in range(count) for q in range(count) if p != q}
    # A ring of two sends each half of the gradients twice.
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            size_bytes = scenario.model.parameter_bytes(stage.first_layer, stage.end_layer)
            total = sum(summed[replica.device] for replica in stage.replicas)
            assert total == (2 * steps * size_bytes if len(stage.replicas) == 2 else 0)
    # Every update that is sent is applied, and none before it was sent.
    sent = Counter((e.device, e.peer, e.step, e.size_bytes) for e in record.events if e.action == UPDATE_ACTION)
    applied = Counter((e.peer, e.device, e.step, e.size_bytes) for e in record.events if e.kind is EventKind.UPDATE)
    assert sent == applied


def test_updates_share_a_link_with_what_crosses_it_otherwise() -> None:
    # Two pipelines of a device each in region west, one in east: both of west's updates take one link, half each.
    scenario, plan = two_regions([1.0, 1.0, 1.0], transfer_s=1.0)
    devices = tuple(
        replace(device, region="west" if index < 2 else "east") for index, device in enumerate(scenario.cluster.devices)
    )
    links = tuple(Link(a, b, 8.0 * BYTES_PER_S, 0.0) for a in ("west", "east") for b in ("west", "east"))
    record = simulated((replace(scenario, cluster=Cluster(devices, links)), plan), steps=1)
    arrived = {(e.peer, e.device): e.start_s for e in record.events if e.kind is EventKind.UPDATE}
    assert arrived == {
        ("device-0", "device-1"): 3.0,
        ("device-1", "device-0"): 3.0,
        ("device-0", "device-2"): 3.0,
        ("device-1", "device-2"): 3.0,
        ("device-2", "device-0"): 3.0,
        ("device-2", "device-1"): 3.0,
    }


def test_a_device_of_two_stages_sends_the_layers_of_both() -> None:
    scenario = mesh_scenario(2, [1.0, 1.0], [1.0, 1.0], output_bytes=[0, 0], parameter_bytes=[100, 300], global_batch=2)
    folded = tuple(
        Pipeline((Stage(0, 1, (Replica(name),), 2), Stage(1, 2, (Replica(name),), 1)), (1,))
        for name in ("device-0", "device-1")
    )
    plan = Plan(
        scenario.name,
        "mesh",
        "hand",
        "interleaved-1f1b",
        folded,
        synchronisation=Synchronisation("asgd", staleness_bound=0),
    )
    record = simulated((scenario, plan), steps=3)
    assert {(e.device, e.stage, e.size_bytes) for e in record.events if e.kind is EventKind.UPDATE} == {
        (name, stage, size) for name in ("device-0", "device-1") for stage, size in ((0, 100), (1, 300))
    }
    assert peak_memory_bytes(record).keys() == {"device-0", "device-1"}


def test_a_layer_profile_without_parameters_sends_nothing() -> None:
    layers = (LayerProfile("layer", 0, 0, 0, {"kind": TimeTable((1,), (1.0,), (0.5,), (0.5,))}),)
    scenario, plan = two_regions([1.0, 1.0])
    devices = tuple(replace(device, kind="kind") for device in scenario.cluster.devices)
    scenario = replace(scenario, cluster=Cluster(devices, scenario.cluster.links), model=ModelProfile("mesh", layers))
    record = simulated((scenario, replace(plan, synchronisation=Synchronisation("asgd", staleness_bound=0))), steps=3)
    assert {event.kind for event in record.events} == {EventKind.COMPUTE}


@pytest.mark.parametrize("order", ORDERS)
def test_a_run_whose_updates_never_arrive_names_those_who_wait(order: str) -> None:
    scenario, plan = two_regions([1.0, 1.0], transfer_s=0.5, bound=0)
    gone = replace(scenario, faults=(Absence("device-0", 1.0, math.inf),))
    # One device leaves after its first step; the other waits for what it would have sent after a second one.
    with pytest.raises(RunError, match=r"the run stalls at .*: device-0, device-1 wait for bytes that never arrive"):
        simulated((gone, replace(plan, order=order)), steps=3)


@settings(max_examples=40)
@given(exchanges())
def test_a_policy_that_decides_nothing_delays_nobody_who_waits_for_updates(case: Case) -> None:
    scenario, plan = two_regions(
        [each / 8 for each in case.step], transfer_s=case.transfer / 8, latency_s=case.latency / 8, bound=0
    )

    class Never:
        """Looks on."""

        def decide(self, observation: object, current: Plan) -> Plan | None:
            return None

    watched = Simulator().run(scenario, plan, Never(), case.steps)
    # All pipelines finish a step before any begins the next but one, so that a step's decision is known by then.
    assert watched.events == simulated((scenario, plan), case.steps).events
