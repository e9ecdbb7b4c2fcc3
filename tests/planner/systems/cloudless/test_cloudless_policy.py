from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.core.step_program import compile_plan
from planner.adapt.observation import Observation
from planner.check import check_plan
from planner.events.event import EventKind
from planner.plan.plan import Plan, Synchronisation
from planner.runs.event_totals import step_ends_s
from planner.runs.metrics import measure
from planner.scenario.effects import ComputeEffects, Effects, Slowdown
from planner.scenario.scenario import Scenario
from planner.systems.cloudless.policy import CloudlessPolicy
from planner.systems.registry import make_plan, make_policy
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import mesh_scenario


@pytest.fixture
def scenario() -> Scenario:
    """Two regions of four equal devices; the first one has twice the data, so the second one needs half of its own."""
    regions = ["north"] * 4 + ["south"] * 4
    mesh = mesh_scenario(8, [0.01], [0.02], link=lambda a, b: (1e8, 1e-4), regions=regions, global_batch=192)
    devices = tuple(replace(device, price_per_hour=1.0) for device in mesh.cluster.devices)
    return replace(mesh, cluster=replace(mesh.cluster, devices=devices), data={"north": 2000, "south": 1000})


def in_step(scenario: Scenario) -> Plan:
    """The strategy's plan with a barrier between steps, at which devices can come and go."""
    return replace(make_plan("cloudless", scenario), synchronisation=Synchronisation())


def seen(scenario: Scenario, plan: Plan, step: int, slowdown: Mapping[str, float]) -> Observation:
    """A step in which devices took so many times as long as profiled."""
    compute_s = [
        (name, slowdown.get(name, 1.0) * sum(work.duration_s for work in program.work))
        for name, program in compile_plan(plan, scenario).items()
    ]
    return Observation(step, plan, tuple(sorted(compute_s)), ())


def settled(policy: CloudlessPolicy, scenario: Scenario, plan: Plan, slowdown: Mapping[str, float]) -> Plan:
    for step in range(8):
        plan = policy.decide(seen(scenario, plan, step, slowdown), plan) or plan
        check_plan(plan, scenario)
    return plan


def rented(plan: Plan) -> list[int]:
    return [len(pipeline.stages[0].replicas) for pipeline in plan.pipelines]


def slow(region: range, factor: float) -> dict[str, float]:
    return {f"device-{index}": factor for index in region}


SOUTH, NORTH = range(4, 8), range(4)


def test_a_region_that_slows_rents_more_and_gives_back_what_it_no_longer_needs(scenario: Scenario) -> None:
    policy = CloudlessPolicy(scenario)
    calm = settled(policy, scenario, in_step(scenario), {})
    assert rented(calm) == [4, 2]
    # At two thirds of the speed two devices are too few; those that were never seen are taken at their profile.
    slowed = settled(policy, scenario, calm, slow(SOUTH, 1.5))
    assert rented(slowed) == [4, 3]
    assert rented(settled(policy, scenario, slowed, {})) == [4, 2]


def test_when_the_region_that_all_wait_for_slows_the_others_rent_less(scenario: Scenario) -> None:
    policy = CloudlessPolicy(scenario)
    slowed = settled(policy, scenario, in_step(scenario), slow(NORTH, 2.0))
    assert rented(slowed) == [4, 1]


def test_a_slow_device_gets_fewer_samples(scenario: Scenario) -> None:
    plan = settled(CloudlessPolicy(scenario), scenario, in_step(scenario), {"device-0": 2.0})
    shares = [replica.share for replica in plan.pipelines[0].stages[0].replicas]
    assert shares == pytest.approx([0.5, 1.0, 1.0, 1.0], rel=0.02)


def test_without_a_placement_samples_move_to_where_they_are_faster(scenario: Scenario) -> None:
    free = replace(scenario, data={})
    plan = settled(CloudlessPolicy(free), free, in_step(free), slow(SOUTH, 2.0))
    north, south = (pipeline.samples for pipeline in plan.pipelines)
    assert (north, south) == (128, 64)


@pytest.mark.parametrize("method", ["asgd-ga", "ma"])
def test_without_a_barrier_regions_rent_too_but_keep_the_device_that_exchanges_updates(
    method: str, scenario: Scenario
) -> None:
    policy, placed = CloudlessPolicy(scenario), make_plan("cloudless", scenario)
    # Another order of regions, and the last device of a region as its first replica.
    north, south = placed.pipelines
    (stage,) = north.stages
    led = replace(north, stages=(replace(stage, replicas=stage.replicas[::-1]),))
    how = replace(placed.synchronisation, method=method)
    placed = replace(placed, pipelines=(south, led), synchronisation=how)
    slowed = settled(policy, scenario, placed, slow(SOUTH, 1.5))
    assert rented(slowed) == [3, 4]
    again = settled(policy, scenario, slowed, slow(NORTH, 2.0))
    assert rented(again) == [1, 4]
    for plan in (slowed, again):
        assert plan.synchronisation == placed.synchronisation
        firsts = [pipeline.stages[0].replicas[0].device for pipeline in plan.pipelines]
        assert firsts == [south.stages[0].replicas[0].device, "device-3"]
    broken = replace(seen(scenario, placed, 0, {}), gone=("device-4",), away=("device-4",))
    assert CloudlessPolicy(scenario).decide(broken, placed) is None


@pytest.mark.parametrize("gone", ["device-0", "device-4"])
def test_a_device_that_has_gone_is_replaced_where_it_can_be(gone: str, scenario: Scenario) -> None:
    policy, plan = CloudlessPolicy(scenario), in_step(scenario)
    decided = policy.decide(replace(seen(scenario, plan, 0, {}), gone=(gone,), away=(gone,)), plan)
    assert decided is not None
    check_plan(decided, scenario)
    assert gone not in decided.devices
    assert rented(decided) == ([3, 2] if gone == "device-0" else [4, 2])
    # It comes back: the region that all wait for takes it again.
    assert rented(settled(policy, scenario, decided, {})) == [4, 2]


def test_where_nobody_is_left_it_waits(scenario: Scenario) -> None:
    everybody = tuple(scenario.cluster.by_name)
    plan = in_step(scenario)
    broken = replace(seen(scenario, plan, 0, {}), gone=plan.devices, away=everybody)
    assert CloudlessPolicy(scenario).decide(broken, plan) is None


@settings(max_examples=8)
@given(sways=st.lists(st.floats(0.98, 1.02), min_size=8, max_size=8))
def test_jitter_of_a_few_percent_changes_nothing(sways: list[float]) -> None:
    regions = ["north"] * 4 + ["south"] * 4
    mesh = mesh_scenario(8, [0.01], [0.02], link=lambda a, b: (1e8, 1e-4), regions=regions, global_batch=192)
    jittery = replace(mesh, data={"north": 2000, "south": 1000})
    policy, plan = CloudlessPolicy(jittery), in_step(jittery)
    for step in range(4):
        slowdown = {f"device-{index}": sways[(index + step) % 8] for index in range(8)}
        assert policy.decide(seen(jittery, plan, step, slowdown), plan) is None


def test_all_but_the_pipelines_stays(scenario: Scenario) -> None:
    plan = replace(in_step(scenario), connections=2, compression="bf16")
    changed = settled(CloudlessPolicy(scenario), scenario, plan, slow(SOUTH, 1.5))
    assert changed.pipelines != plan.pipelines
    assert changed == replace(plan, pipelines=changed.pipelines)


def test_simulated_it_costs_less_when_the_region_that_all_wait_for_slows(scenario: Scenario) -> None:
    slowdowns = tuple(Slowdown(f"device-{index}", (0.0, 6.0), (1.0, 0.5)) for index in NORTH)
    slowing = replace(scenario, effects=Effects(compute=ComputeEffects(slowdowns=slowdowns)))
    plan = in_step(slowing)
    adapted = Simulator().run(slowing, plan, CloudlessPolicy(slowing), 20)
    plain = Simulator().run(slowing, plan, None, 20)
    (decision,) = adapted.decisions
    assert set(decision.plan.devices) < set(plan.devices)
    assert rented(decision.plan) == [4, 1]
    assert measure(adapted).cost_usd < 0.92 * measure(plain).cost_usd
    assert measure(adapted).samples_per_s == pytest.approx(measure(plain).samples_per_s, rel=0.05)


def test_simulated_without_a_barrier_it_is_faster_when_a_device_slows(scenario: Scenario) -> None:
    slowdowns = (Slowdown("device-0", (0.0, 6.0), (1.0, 0.5)),)
    slowing = replace(scenario, effects=Effects(compute=ComputeEffects(slowdowns=slowdowns)))
    plan = make_plan("cloudless", slowing)
    adapted, plain = (Simulator().run(slowing, plan, make_policy(name, slowing), 40) for name in ("cloudless", "none"))
    assert adapted.decisions
    assert measure(adapted).samples_per_s > 1.3 * measure(plain).samples_per_s


def test_simulated_without_a_barrier_it_costs_less_per_second_and_sends_as_many_updates(scenario: Scenario) -> None:
    slowdowns = tuple(Slowdown(f"device-{index}", (0.0, 6.0), (1.0, 0.5)) for index in NORTH)
    slowing = replace(scenario, effects=Effects(compute=ComputeEffects(slowdowns=slowdowns)))
    plan = make_plan("cloudless", slowing)
    adapted = Simulator().run(slowing, plan, CloudlessPolicy(slowing), 32)
    plain = Simulator().run(slowing, plan, None, 32)
    (decision,) = adapted.decisions
    assert rented(decision.plan) == [4, 1]
    assert measure(adapted).wan_bytes == measure(plain).wan_bytes
    assert measure(adapted).samples_per_s == pytest.approx(measure(plain).samples_per_s, rel=0.05)
    # One of six devices is given back, from when the change takes effect.
    ends_s = step_ends_s(adapted.events)
    begun_s, over_s = ends_s[decision.first_step - 1], ends_s[-1]
    first_s = min(event.start_s for event in adapted.events)
    paid_s = 6 * (begun_s - first_s) + 5 * (over_s - begun_s)
    assert measure(adapted).cost_usd == pytest.approx(paid_s / 3600, rel=0.02)
    exchanges = {event.peer: [] for event in adapted.events if event.kind is EventKind.UPDATE}
    for event in sorted(adapted.events, key=lambda event: event.start_s):
        if event.kind is EventKind.UPDATE:
            exchanges[event.peer].append(event.step)
    interval = plan.synchronisation.interval_steps
    assert set(map(tuple, exchanges.values())) == {tuple(range(interval - 1, 32, interval))}


def test_it_is_found_by_its_name(scenario: Scenario) -> None:
    assert isinstance(make_policy("cloudless", scenario), CloudlessPolicy)
