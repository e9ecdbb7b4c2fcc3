"""Devices that choose for themselves: by hand, by the planner's own rule, and what any such choice must hold."""

from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planner.check import check_plan
from planner.cost.stage import scheduling_problem
from planner.events.event import Event, EventKind
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.runs.event_totals import step_ends_s
from planner.runs.memory_timeline import memory_timelines
from planner.runs.record import RunRecord
from planner.scenario.effects import ComputeEffects, Effects
from planner.scenario.faults import Absence, Fault, Hang
from planner.scenario.scenario import Scenario
from planner.schedules import WHOLE
from planner.schedules.kernel.problem import SchedulingProblem
from planner.step.evaluate import step_time_s
from planner.step.orders import plan_orders
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import chain_plan, chain_scenario, layered_plan, makespan_s, mesh_scenario
from tests.helpers.strategies.run_strategies import (
    chains,
    in_order,
    on_shared_links,
    recomputing,
    replicated,
    with_effects,
)
from traces.common.errors import InputError

EXACT = 1e-9
Case = tuple[Scenario, Plan]
SPLITTING = st.sampled_from(["1f1b", "zb-h1"])


def dynamic(case: Case, schedule: str = "1f1b") -> Case:
    return case[0], replace(in_order(case[1], "dynamic"), schedule=schedule)


def simulated(case: Case, steps: int = 1) -> RunRecord:
    return Simulator().run(*case, None, steps)


def row(record: RunRecord, device: str) -> str:
    """What a device computed, in order: 0F0 1F0 1B0."""
    own = sorted(
        (event for event in record.events if event.kind is EventKind.COMPUTE and event.device == device),
        key=lambda event: (event.start_s, event.end_s),
    )
    return " ".join(f"{event.stage}{event.action}{event.microbatch}" for event in own)


# --- by hand --------------------------------------------------------------------------------------------------


def test_gradients_go_before_forwards_and_weights_fill_the_gaps() -> None:
    # F 1 s, I 1 s, W 1 s; a way of 2 s. The second stage waits for its first activation from 0 to 3 s, and the first
    # one does what it may: three forwards. Then both take what comes, and W where nothing else does.
    scenario = chain_scenario([1.0, 1.0], [2.0, 2.0], output_bytes=[0, 0], latency_s=2.0, global_batch=4)
    record = simulated(dynamic((scenario, chain_plan(scenario, depths=[3, 1])), "zb-h1"))
    assert row(record, "device-0") == "0F0 0F1 0F2 0I0 0F3 0I1 0W0 0I2 0W1 0W2 0I3 0W3"
    assert row(record, "device-1") == "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1F3 1I3 1W2 1W3"


def test_a_late_activation_is_overtaken_by_nothing_but_waited_for_by_nobody() -> None:
    # The second stage is free at 3 s. Its next activation comes at 4 s: it takes a weight gradient meanwhile.
    scenario = chain_scenario([3.0, 1.0], [2.0, 2.0], output_bytes=[0, 0], global_batch=2)
    record = simulated(dynamic((scenario, chain_plan(scenario, depths=[2, 1])), "zb-h1"))
    starts_s = {(e.stage, e.action, e.microbatch): e.start_s for e in record.events if e.kind is EventKind.COMPUTE}
    # F0 3..4, I0 4..5, W0 5..6 in the gap before the activation of 6 s.
    assert starts_s[1, "W", 0] == pytest.approx(5.0)
    assert starts_s[1, "F", 1] == pytest.approx(6.0)


def test_an_input_that_is_late_by_less_than_a_nanosecond_counts_as_there_but_is_waited_for() -> None:
    # The middle stage is free at 2 s less 0.3 ns, its second activation comes at 2 s: it is taken before the gradient.
    shorter_s = 3e-10
    scenario = chain_scenario([1.0, 1.0 - shorter_s, 5.0], [1.0] * 3, output_bytes=[0] * 3, global_batch=2)
    record = simulated(dynamic((scenario, chain_plan(scenario, depths=[2, 2, 1]))))
    times_s = {
        e.microbatch: (e.start_s, e.end_s)
        for e in record.events
        if e.device == "device-1" and e.action == "F" and e.kind is EventKind.COMPUTE
    }
    assert times_s == {0: (1.0, 2.0 - shorter_s), 1: (2.0, 3.0 - shorter_s)}


def test_depth_holds_forwards_back() -> None:
    scenario = chain_scenario([1.0, 1.0], [1.0, 1.0], latency_s=5.0, global_batch=3)
    record = simulated(dynamic((scenario, chain_plan(scenario, depths=[1, 1]))))
    assert row(record, "device-0") == "0F0 0B0 0F1 0B1 0F2 0B2"


@pytest.mark.parametrize(
    "fault", [Absence("device-0", 2.5, 20.0), Absence("device-0", 2.0, 20.0), Hang("device-0", 2.0, 20.0)]
)
def test_who_was_away_chooses_from_what_is_ready_at_its_return(fault: Fault) -> None:
    # At 2 s only F2 is ready; at 20 s the first two gradients are there, and go before it.
    scenario = chain_scenario([1.0, 1.0], [1.0, 1.0], output_bytes=[0, 0], global_batch=3)
    record = simulated(dynamic((replace(scenario, faults=(fault,)), chain_plan(scenario, depths=[3, 1]))))
    assert row(record, "device-0") == "0F0 0F1 0B0 0B1 0F2 0B2"


def test_a_replica_without_samples_has_nothing_to_do_but_sum() -> None:
    scenario = mesh_scenario(2, [1.0], [1.0], global_batch=1)
    record = simulated(dynamic((scenario, layered_plan(scenario, [([(1, 2, 1)], [1])]))), steps=2)
    assert row(record, "device-0").count("F") + row(record, "device-1").count("F") == 2
    assert {event.device for event in record.events if event.kind is EventKind.SYNC} == {"device-0", "device-1"}


def test_room_is_kept_for_the_later_stages_of_a_device() -> None:
    # Two forwards of stage 0 would fill the memory for ever.
    scenario = mesh_scenario(1, [1.0, 1.0], [2.0, 2.0], parameter_bytes=[0, 0], memory_bytes=2000, global_batch=4)
    record = simulated(dynamic((scenario, folded_plan(scenario, 2, [4, 4]))))
    assert row(record, "device-0").startswith("0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1")
    assert makespan_s(record) == 24.0


# --- the planner's rule ---------------------------------------------------------------------------------------


def folded_plan(scenario: Scenario, stages: int, depths: list[int], *, back: bool = False) -> Plan:
    """Stages of one layer each that go round the devices, or down and back up."""
    names = [device.name for device in scenario.cluster.devices]
    ring = [*names, *reversed(names)] if back else names
    made = tuple(
        Stage(index, index + 1, (Replica(ring[index % len(ring)]),), depth)
        for index, depth in enumerate(depths[:stages])
    )
    pipeline = Pipeline(made, (1,) * scenario.training.global_batch)
    return Plan(scenario.name, scenario.model.name, "hand", "1f1b", (pipeline,), order="dynamic")


# Whole numbers of eighths: sums are exact, and much happens at the same time.
EIGHTHS_S = st.integers(1, 24).map(lambda eighths: eighths / 8)


@st.composite
def folded(draw: st.DrawFn) -> Case:
    """One stage on a device or several, with room for all microbatches or hardly any; nothing computes in no time."""
    devices, rounds = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    stages, microbatches = devices * rounds, draw(st.integers(1, 6))
    durations_s = st.lists(draw(st.sampled_from([EIGHTHS_S, st.floats(0.01, 3)])), min_size=stages, max_size=stages)
    room = draw(st.integers(rounds, rounds + 3))
    scenario = mesh_scenario(
        devices,
        draw(durations_s),
        draw(durations_s),
        output_bytes=draw(st.lists(st.sampled_from([0, 250, 750, 1000]), min_size=stages, max_size=stages)),
        parameter_bytes=[0] * stages,
        link=lambda a, b: (draw(st.sampled_from([8e3, 16e3, 1e5])), draw(st.just(0.0) | EIGHTHS_S)),
        memory_bytes=1000 * room,
        global_batch=microbatches,
    )
    depths = draw(st.lists(st.integers(1, 6), min_size=stages, max_size=stages))
    back = rounds == 2 and draw(st.booleans())
    plan = replace(folded_plan(scenario, stages, depths, back=back), schedule=draw(SPLITTING))
    lighter = draw(recomputing(plan))
    return scenario, lighter if fits(lighter, scenario) else plan


def fits(plan: Plan, scenario: Scenario) -> bool:
    """Whether memory holds what the stages recompute, where an input is larger than what it replaces."""
    try:
        check_plan(plan, scenario)
    except InputError:
        return False
    return True


@st.composite
def splitting(draw: st.DrawFn, cases: st.SearchStrategy[Case]) -> Case:
    return dynamic(draw(cases), draw(SPLITTING))


@settings(max_examples=80)
@given(folded())
def test_on_steady_links_devices_come_to_the_orders_that_the_planner_foresees(case: Case) -> None:
    scenario, plan = case
    record = simulated(case)
    (orders,) = plan_orders(plan, scenario)
    names = list(dict.fromkeys(stage.replicas[0].device for stage in plan.pipelines[0].stages))
    foreseen = [" ".join(map(str, orders.actions(worker))) for worker in range(orders.worker_count)]
    assert [row(record, name) for name in names] == foreseen
    assert makespan_s(record) == pytest.approx(step_time_s(plan, scenario), rel=EXACT)


# --- what any choice must hold --------------------------------------------------------------------------------


@st.composite
def jittered(draw: st.DrawFn, cases: st.SearchStrategy[Case]) -> Case:
    scenario, plan = draw(cases)
    effects = Effects(compute=ComputeEffects(jitter=draw(st.floats(0.1, 2)), seed=draw(st.integers(0, 1000))))
    return replace(scenario, effects=effects), plan


RUNS = st.one_of(
    jittered(folded()),
    jittered(splitting(on_shared_links(replicated()))),
    splitting(with_effects(on_shared_links(replicated()))),
)


@settings(max_examples=80)
@given(RUNS)
def test_whatever_the_times_nobody_waits_for_ever_and_limits_hold(case: Case) -> None:
    scenario, plan = case
    record = simulated(case, steps=2)
    lasting = [event for event in computed(record) if event.start_s < event.end_s]
    # What ends at a moment makes room for what starts then.
    ends = [(event.end_s, 0, event) for event in lasting if event.action in "BI"]
    starts = [(event.start_s, 1, event) for event in lasting if event.action == "F"]
    live: Counter[tuple[str, int, int]] = Counter()
    for _, is_start, event in sorted([*ends, *starts], key=lambda each: each[:2]):
        place = (event.device, event.pipeline, event.stage)
        live[place] += 1 if is_start else -1
        assert live[place] <= plan.pipelines[event.pipeline].stages[event.stage].in_flight
    for device, line in memory_timelines(record).items():
        assert line.held_bytes.max() <= scenario.cluster.by_name[device].memory_bytes * (1 + EXACT)


def computed(record: RunRecord) -> list[Event]:
    return [event for event in record.events if event.kind is EventKind.COMPUTE]


@settings(max_examples=40)
@given(jittered(st.one_of(chains(), replicated())))
def test_the_same_bytes_pass_as_with_a_fixed_order(case: Case) -> None:
    counts = []
    for order in ("scheduled", "dynamic"):
        record = simulated((case[0], in_order(case[1].without_overlap, order)), steps=2)
        counts.append(
            Counter(
                (e.device, e.peer, e.action, e.stage, e.microbatch, e.step, e.size_bytes)
                for e in record.events
                if e.kind is EventKind.SEND
            )
        )
    assert counts[0] == counts[1]


@settings(max_examples=80)
@given(jittered(st.one_of(splitting(chains()), folded())))
def test_a_device_never_idles_while_something_is_ready_and_allowed(case: Case) -> None:
    scenario, plan = case
    record = simulated(case)
    (pipeline,) = plan.pipelines
    problem = scheduling_problem(pipeline, scenario)
    ready_s = ready_times_s(record, plan)
    of_device: dict[str, list[Event]] = defaultdict(list)
    for event in sorted(computed(record), key=lambda event: (event.start_s, event.end_s)):
        of_device[event.device].append(event)
    for own in of_device.values():
        stages = [
            stage for stage in range(len(pipeline.stages)) if pipeline.stages[stage].replicas[0].device == own[0].device
        ]
        capacity = float(problem.capacity_bytes[pipeline.workers[stages[0]]])
        reserve = float(problem.reserve_bytes[pipeline.workers[stages[0]]])
        largest = {stage: float(problem.activation_bytes[stage].max()) for stage in stages}
        live: Counter[int] = Counter()
        held: dict[int, float] = dict.fromkeys(stages, 0.0)
        for index, (earlier, later) in enumerate(pairwise(own)):
            account(earlier, live, held, problem)
            if later.start_s <= earlier.end_s:
                continue
            for event in own[index + 1 :]:
                there_s = ready_s[event.action, event.stage, event.microbatch]
                if there_s >= later.start_s:
                    continue
                # Ready, and yet the device idled: only a forward may be held up.
                assert event.action == "F"
                needed = problem.activation_bytes[event.stage, event.microbatch]
                kept = [max(held[stage], largest[stage] if stage > event.stage else 0.0) for stage in stages]
                is_full = live[event.stage] >= problem.in_flight[event.stage]
                assert is_full or needed > capacity - reserve - sum(kept)


def account(event: Event, live: Counter[int], held: dict[int, float], problem: SchedulingProblem) -> None:
    """Take note of an action that is over."""
    waiting = float(problem.activation_bytes[event.stage, event.microbatch])
    staying = float(problem.weight_bytes[event.stage, event.microbatch])
    live[event.stage] += {"F": 1, "W": 0}.get(event.action, -1)
    held[event.stage] += {"F": waiting, "B": -waiting, "I": staying - waiting, "W": -staying}[event.action]


def ready_times_s(record: RunRecord, plan: Plan) -> dict[tuple[str, int, int], float]:
    """When each action has all that it needs."""
    cluster = record.scenario.cluster
    backward = "B" if plan.schedule in WHOLE else "I"
    ends_s = {(e.action, e.stage, e.microbatch): e.end_s for e in computed(record)}
    arrived_s: dict[tuple[str, int, int], float] = {}
    for event in record.events:
        if event.kind is EventKind.SEND:
            stage = event.stage + (1 if event.action == "F" else -1)
            latency_s = sum(link.latency_s for link in cluster.path(event.device, event.peer))
            arrived_s[event.action, stage, event.microbatch] = event.end_s + latency_s
    ready_s = {}
    for action, stage, microbatch in ends_s:
        needs = {
            "F": [("F", stage - 1, microbatch)],
            backward: [("F", stage, microbatch), (backward, stage + 1, microbatch)],
            "W": [("I", stage, microbatch)],
        }[action]
        there_s = [
            arrived_s.get((action, stage, microbatch), ends_s[need]) if need[1] != stage else ends_s[need]
            for need in needs
            if need in ends_s
        ]
        ready_s[action, stage, microbatch] = max(there_s, default=0.0)
    return ready_s


@settings(max_examples=40)
@given(folded())
def test_a_plan_that_the_planner_refuses_for_its_memory_is_refused_before_anything_runs(case: Case) -> None:
    scenario, plan = case
    rounds = len(plan.pipelines[0].stages) // (max(plan.pipelines[0].workers) + 1)
    assume(rounds > 1)
    devices = tuple(replace(each, memory_bytes=1000 * rounds - 1) for each in scenario.cluster.devices)
    small = replace(scenario, cluster=replace(scenario.cluster, devices=devices))
    # Nothing is recomputed, which might fit.
    (pipeline,) = plan.pipelines
    stages = tuple(replace(stage, recompute=False) for stage in pipeline.stages)
    with pytest.raises(InputError, match=r"need|holds"):
        check_plan(replace(plan, pipelines=(replace(pipeline, stages=stages),)), small)


def test_replicas_that_get_their_inputs_in_different_orders_do_not_wait_for_each_other() -> None:
    """Replica 2 of the first stage takes nothing of microbatch 0, and would start microbatch 1 before the others."""
    nothing = [0] * 3
    scenario = mesh_scenario(7, [0.0] * 3, [1.0] * 3, output_bytes=nothing, parameter_bytes=nothing, global_batch=6)
    shares = ((1.0, 1.0, 0.5), (0.5, 0.5, 0.5), (1.0,))
    names = iter(device.name for device in scenario.cluster.devices)
    stages = tuple(
        Stage(index, index + 1, tuple(Replica(next(names), share) for share in each), 1)
        for index, each in enumerate(shares)
    )
    plan = Plan("mesh", scenario.model.name, "hand", "1f1b", (Pipeline(stages, (2, 4)),), order="dynamic")
    assert len(step_ends_s(Simulator().run(scenario, plan, None, 3).events)) == 3
