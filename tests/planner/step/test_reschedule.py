"""A plan with another schedule holds the same layers on the same devices; the depth policy leaves it whole."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from executor.core.step_program import compile_plan
from planner.adapt.observation import Observation, PathObservation
from planner.check import check_plan
from planner.plan.actions import Kind
from planner.plan.plan import EXPLICIT, ORDERS, Plan
from planner.scenario.scenario import Scenario
from planner.schedules import SCHEDULES, WHOLE
from planner.step.evaluate import step_time_s
from planner.step.orders import (
    SEARCHING,
    TWO_ROUNDS,
    plan_orders,
    with_found_orders,
    with_orders,
    with_schedule,
)
from planner.systems.deepcee.policy import DepthPolicy
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import chain_plan, chain_scenario, layered_plan, mesh_scenario
from tests.helpers.strategies.run_strategies import chains, in_order, replicated
from traces.common.errors import InputError

# The solver is not for hundreds of examples.
QUICK = sorted(set(SCHEDULES) - {"optimal"})
CASES = st.one_of(chains(), replicated())


def held_layers(plan: Plan) -> list[dict[int, tuple[str, ...]]]:
    """The devices of each layer, for each pipeline."""
    return [
        {
            layer: tuple(replica.device for replica in stage.replicas)
            for stage in pipeline.stages
            for layer in range(stage.first_layer, stage.end_layer)
        }
        for pipeline in plan.pipelines
    ]


def layers_per_device(plan: Plan) -> list[dict[tuple[str, ...], int]]:
    counts: list[dict[tuple[str, ...], int]] = []
    for holders in held_layers(plan):
        counts.append({})
        for devices in holders.values():
            counts[-1][devices] = counts[-1].get(devices, 0) + 1
    return counts


# --- another schedule -----------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(CASES, st.sampled_from(sorted(set(QUICK) - set(TWO_ROUNDS))), st.sampled_from(ORDERS))
def test_layers_devices_and_microbatches_stay(case: tuple[Scenario, Plan], schedule: str, order: str) -> None:
    scenario, plan = case[0], in_order(case[1], order)
    made = with_schedule(plan, scenario, schedule, order)
    check_plan(made, scenario)
    assert (made.schedule, made.order) == (schedule, order)
    assert [pipeline.microbatches for pipeline in made.pipelines] == [each.microbatches for each in plan.pipelines]
    assert held_layers(made) == held_layers(plan)
    for old, new in zip(plan.pipelines, made.pipelines, strict=True):
        kept = [replace(stage, in_flight=1) for stage in new.stages]
        assert kept == [replace(stage, in_flight=1) for stage in old.stages]
        if schedule not in SEARCHING and order == "scheduled":
            assert new.stages == old.stages
    # Whatever else a plan says stays, and a schedule is as good as the last one that was asked for.
    assert replace(made, schedule=plan.schedule, order=plan.order, pipelines=plan.pipelines) == plan
    assert with_schedule(made, scenario, schedule, order) == made


@settings(max_examples=100)
@given(CASES, st.sampled_from(sorted(TWO_ROUNDS)), st.sampled_from(ORDERS))
def test_two_rounds_cover_all_layers_once_on_the_same_devices(
    case: tuple[Scenario, Plan], schedule: str, order: str
) -> None:
    scenario, plan = case[0], in_order(case[1], order)
    thin = min(stage.end_layer - stage.first_layer for pipeline in plan.pipelines for stage in pipeline.stages)
    if thin < 2:
        with pytest.raises(InputError, match=rf"stages\[\d\]: stage \d has one layer; schedule '{schedule}'"):
            with_schedule(plan, scenario, schedule, order)
        return
    made = with_schedule(plan, scenario, schedule, order)
    check_plan(made, scenario)
    assert layers_per_device(made) == layers_per_device(plan)
    for old, new in zip(plan.pipelines, made.pipelines, strict=True):
        workers = tuple(range(len(old.stages)))
        assert new.workers == (*workers, *(reversed(workers) if TWO_ROUNDS[schedule] else workers))
        ends = [stage.end_layer for stage in new.stages]
        assert [stage.first_layer for stage in new.stages] == [0, *ends[:-1]]
        assert ends[-1] == len(scenario.model.layers)
        assert min(stage.end_layer - stage.first_layer for stage in new.stages) >= 1
        assert new.microbatches == old.microbatches
    # What has two stages a worker already is not cut again.
    assert held_layers(with_schedule(made, scenario, schedule)) == held_layers(made)


@pytest.mark.parametrize(("devices", "microbatches"), [(1, 3), (2, 1), (2, 4), (2, 7), (3, 8), (4, 12)])
@pytest.mark.parametrize("schedule", sorted(TWO_ROUNDS))
def test_depths_of_two_rounds_are_no_limit_to_the_published_orders(
    schedule: str, devices: int, microbatches: int
) -> None:
    scenario = mesh_scenario(devices, [1.0] * 2 * devices, [2.0] * 2 * devices, global_batch=microbatches)
    stages = [(2 * (index + 1), 1, devices - index) for index in range(devices)]
    plan = with_schedule(layered_plan(scenario, [(stages, [1] * microbatches)]), scenario, schedule)
    (pipeline,) = plan.pipelines
    deep = replace(
        plan, pipelines=(replace(pipeline, stages=tuple(replace(stage, in_flight=99) for stage in pipeline.stages)),)
    )
    (orders,), (published,) = plan_orders(plan, scenario), plan_orders(deep, scenario)
    # With the depths of the cut stages the order is that of depths that never bind.
    assert [orders.actions(worker) for worker in range(devices)] == [
        published.actions(worker) for worker in range(devices)
    ]


@settings(max_examples=50)
@given(CASES, st.sampled_from(sorted(SEARCHING - {"optimal"})))
def test_searched_orders_keep_to_the_depths_of_the_plan(case: tuple[Scenario, Plan], schedule: str) -> None:
    scenario, plan = case
    made = with_schedule(plan, scenario, schedule)
    for pipeline, orders in zip(made.pipelines, plan_orders(made, scenario), strict=True):
        for worker in range(orders.worker_count):
            held: Counter[int] = Counter()
            for action in orders.actions(worker):
                if action.kind is not Kind.BACKWARD_WEIGHT:
                    held[action.stage] += 1 if action.kind is Kind.FORWARD else -1
                assert held[action.stage] <= pipeline.stages[action.stage].in_flight


@settings(max_examples=60)
@given(CASES, st.sampled_from(["1f1b", "gpipe", "zb-h1", "compact-zb"]))
def test_orders_that_a_plan_carries_take_as_long_as_the_schedule_that_made_them(
    case: tuple[Scenario, Plan], schedule: str
) -> None:
    scenario, plan = case
    assume(len({(len(each.stages), len(each.microbatches)) for each in plan.pipelines}) == 1)
    made = with_schedule(plan, scenario, schedule)
    orders = plan_orders(made, scenario)
    rows = [[each.actions(worker) for worker in range(each.worker_count)] for each in orders]
    assume(all(row == rows[0] for row in rows))
    carried = with_orders(made, rows[0])
    check_plan(carried, scenario)
    assert carried.schedule == EXPLICIT
    assert carried.order == "scheduled"
    runs = [Simulator().run(scenario, each, None, 1).events for each in (made, carried)]
    assert runs[0] == runs[1]


def test_orders_of_its_own_give_way_to_a_schedule() -> None:
    scenario = chain_scenario([1.0, 1.0], [1.0, 1.0], global_batch=4)
    plan = chain_plan(scenario)
    orders = plan_orders(plan, scenario)[0]
    carried = with_orders(plan, [orders.actions(worker) for worker in range(2)])
    assert with_schedule(carried, scenario, "1f1b") == plan
    assert with_schedule(carried, scenario, "zb-h1").pipelines[0].orders == ()


def test_the_order_that_the_solver_finds_is_the_plans_own() -> None:
    pytest.importorskip("ortools", reason="OR-tools is not installed")
    scenario = chain_scenario([1.0, 1.0], [2.0, 2.0], latency_s=0.5, global_batch=4)
    made = with_schedule(chain_plan(scenario), scenario, "optimal")
    check_plan(made, scenario)
    assert made.schedule == EXPLICIT
    assert len(made.pipelines[0].orders) == 2
    chosen = with_schedule(chain_plan(scenario), scenario, "optimal", "dynamic")
    check_plan(chosen, scenario)
    assert (chosen.schedule, chosen.order, chosen.pipelines[0].orders) == ("optimal", "dynamic", ())


@pytest.mark.parametrize("schedule", ["compact-zb", "portfolio"])
def test_found_orders_stay_when_links_change(schedule: str) -> None:
    near, far = (chain_scenario([1.0, 1.0], [2.0, 2.0], latency_s=each, global_batch=8) for each in (0.1, 4.0))
    plan = with_schedule(chain_plan(near), near, schedule)
    fixed = with_found_orders(plan, near)
    check_plan(fixed, near)
    assert fixed.schedule == EXPLICIT
    assert step_time_s(fixed, near) == step_time_s(plan, near)
    assert plan_orders(fixed, far)[0].actions(0) == plan_orders(plan, near)[0].actions(0)
    assert plan_orders(fixed, far)[0].actions(0) != plan_orders(plan, far)[0].actions(0)
    for other in (chain_plan(near), replace(plan, order="dynamic")):
        assert with_found_orders(other, near) is other


# --- the depth policy -----------------------------------------------------------------------------------------


def seen(scenario: Scenario, plan: Plan, step: int, rate_bps: float, latency_s: float) -> Observation:
    """A step in which every path of the plan carried at this rate and latency, and compute was as profiled."""
    programs = compile_plan(plan, scenario)
    pairs = sorted({(t.source, t.target) for p in programs.values() for w in p.work for t in w.sends})
    paths = tuple(PathObservation(a, b, 10_000, ((0.0, 80_000 / rate_bps),), latency_s) for a, b in pairs)
    compute_s = tuple(sorted((name, sum(w.duration_s for w in p.work)) for name, p in programs.items()))
    return Observation(step, plan, compute_s, paths)


def stays_whole(scenario: Scenario, plan: Plan, days: Sequence[tuple[float, float]]) -> None:
    """Let the policy decide day after day, and hold what it decides against the scenario."""
    policy = DepthPolicy(scenario)
    for step, weather in enumerate(days):
        decided = policy.decide(seen(scenario, plan, step, *weather), plan)
        if decided is not None:
            check_plan(decided, scenario)
            assert (decided.schedule, decided.order) == (plan.schedule, plan.order)
            assert decided.global_batch == plan.global_batch
            assert held_layers(decided) == held_layers(plan)
            plan = decided


def two_devices(spare_bytes: int) -> tuple[Scenario, Plan]:
    """Two layers a device, and room for 4 samples of both and ``spare_bytes``."""
    scenario = mesh_scenario(
        2, [0.1] * 4, [0.2] * 4, link=lambda a, b: (1e6, 0.01), memory_bytes=24_000 + spare_bytes, global_batch=12
    )
    return scenario, layered_plan(scenario, [([(2, 1, 2), (4, 1, 1)], [1] * 12)])


DAYS = st.lists(st.tuples(st.floats(1e3, 1e8), st.floats(0, 2)), min_size=1, max_size=4)


@settings(max_examples=80)
@given(st.sampled_from(sorted(set(QUICK) - set(TWO_ROUNDS))), st.sampled_from(ORDERS), st.integers(0, 30_000), DAYS)
def test_whatever_the_weather_the_plan_stays_whole(
    schedule: str, order: str, spare_bytes: int, days: list[tuple[float, float]]
) -> None:
    scenario, plan = two_devices(spare_bytes)
    try:
        plan = with_schedule(plan, scenario, schedule, order)
        check_plan(plan, scenario)
    except InputError:
        # Gpipe needs more memory than there is, for example.
        assume(False)
    stays_whole(scenario, plan, days)


@settings(max_examples=40)
@given(st.sampled_from(ORDERS), DAYS)
def test_plans_of_two_stages_a_device_stay_whole_with_room_to_spare(
    order: str, days: list[tuple[float, float]]
) -> None:
    scenario, plan = two_devices(1_000_000)
    stays_whole(scenario, with_schedule(plan, scenario, "interleaved-1f1b", order), days)


def test_neighbouring_stages_on_one_device_need_no_link() -> None:
    scenario, plan = two_devices(1_000_000)
    stays_whole(scenario, with_schedule(plan, scenario, "zb-v"), [(1e3, 0.0)])


def test_plans_of_two_stages_a_device_stay_whole_where_memory_is_short() -> None:
    scenario, plan = two_devices(0)
    plan = with_schedule(plan, scenario, "interleaved-1f1b")
    check_plan(plan, scenario)
    stays_whole(scenario, plan, [(1e3, 0.0)])


@pytest.mark.parametrize("schedule", sorted(SEARCHING))
def test_a_decision_on_a_searching_schedule_takes_no_search(schedule: str) -> None:
    scenario = chain_scenario(
        [0.1, 0.2, 0.1, 0.2],
        [0.2, 0.4, 0.2, 0.4],
        output_bytes=[5000, 5000, 5000, 0],
        bandwidth_bps=1e6,
        latency_s=0.1,
        global_batch=64,
    )
    plan = replace(chain_plan(scenario), schedule=schedule)
    policy = DepthPolicy(scenario)
    observation = seen(scenario, plan, 0, 1e5, 0.5)
    # The first decision may load what is compiled.
    policy.decide(
        seen(scenario, replace(plan, schedule="compact-zb"), 0, 1e5, 0.5), replace(plan, schedule="compact-zb")
    )
    began_s = perf_counter()
    decided = policy.decide(observation, plan)
    # A dozen candidates at most; a search for the best of one of them may take a minute.
    assert perf_counter() - began_s < 5
    assert decided is not None
    assert (decided.schedule, decided.order) == (schedule, "scheduled")


@pytest.mark.parametrize("schedule", sorted(WHOLE - set(TWO_ROUNDS)))
def test_orders_of_its_own_are_left_alone(schedule: str) -> None:
    scenario = chain_scenario([0.1, 0.1], [0.2, 0.2], output_bytes=[5000, 0], bandwidth_bps=1e6, global_batch=16)
    plan = replace(chain_plan(scenario), schedule=schedule)
    orders = plan_orders(plan, scenario)[0]
    carried = with_orders(plan, [orders.actions(worker) for worker in range(2)])
    policy = DepthPolicy(scenario)
    for step in range(4):
        assert policy.decide(seen(scenario, carried, step, 1e4, 1.0), carried) is None
    assert Simulator().run(scenario, carried, policy, 3).decisions == ()
