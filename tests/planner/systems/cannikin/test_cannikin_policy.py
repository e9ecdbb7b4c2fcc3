"""The policy ``cannikin``: it learns from what steps show, and changes shares and microbatches alone."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.adapt.adaptation import Adaptation
from planner.adapt.observation import Observation, Observer
from planner.check import check_plan
from planner.plan.plan import Plan
from planner.runs.event_totals import step_ends_s
from planner.scenario.effects import ComputeEffects, Effects, Slowdown, Straggler
from planner.scenario.scenario import Scenario
from planner.systems.cannikin.policy import LEAST_GAIN, CannikinPolicy
from planner.systems.cannikin.strategy import adaptdl
from planner.systems.registry import make_plan, make_policy
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import chain_plan, chain_scenario, mesh_scenario

FAST_BPS = 1e12


def equal_devices(count: int = 3, *, batch: int = 60, stragglers: dict[int, float] | None = None) -> Scenario:
    """Devices of one kind, some of which take so many times as long as profiled."""
    scenario = mesh_scenario(
        count,
        [1e-3] * 3,
        [2e-3] * 3,
        parameter_bytes=[30_000_000] * 3,
        link=lambda a, b: (FAST_BPS, 0.0),
        global_batch=batch,
    )
    slow = tuple(Straggler(f"device-{index}", factor) for index, factor in (stragglers or {}).items())
    return replace(scenario, effects=Effects(compute=ComputeEffects(stragglers=slow)))


def samples_of(plan: Plan) -> list[int]:
    return [int(replica.share) for replica in plan.pipelines[0].stages[0].replicas]


def observed(scenario: Scenario, plan: Plan) -> Observation:
    """What a simulated step of a plan shows."""
    return Observer().observe(Simulator().run(scenario, plan, None, 1).events, 0, plan)


def settled(scenario: Scenario, plan: Plan, policy: CannikinPolicy | None = None, steps: int = 6) -> Plan:
    """The plan after some steps, each of which is simulated with the latest plan."""
    policy = policy or CannikinPolicy(scenario)
    for _ in range(steps):
        plan = policy.decide(observed(scenario, plan), plan) or plan
    return plan


def test_shares_follow_devices_that_are_not_as_profiled() -> None:
    scenario = equal_devices(stragglers={1: 2.0, 2: 3.0}, batch=110)
    start = adaptdl(scenario)
    assert samples_of(start) == [37, 37, 36]
    assert samples_of(settled(scenario, start)) == [60, 30, 20]


def test_the_second_division_is_in_proportion_to_the_speeds() -> None:
    scenario = equal_devices(stragglers={2: 2.0}, batch=100)
    start = adaptdl(scenario)
    second = CannikinPolicy(scenario).decide(observed(scenario, start), start)
    assert second is not None
    assert samples_of(second) == [40, 40, 20]


def test_only_shares_and_microbatches_change() -> None:
    scenario = equal_devices(stragglers={2: 3.0})
    start = make_plan("ddp", scenario)
    changed = settled(scenario, start)
    assert samples_of(changed) != samples_of(start)
    check_plan(changed, scenario)
    (before,), (after,) = start.pipelines, changed.pipelines
    assert after.microbatches == before.microbatches
    assert changed.devices == start.devices
    replicas = tuple(replace(replica, share=1.0) for replica in after.stages[0].replicas)
    same = replace(after, stages=(replace(after.stages[0], replicas=replicas),))
    assert replace(changed, pipelines=(same,)) == start


def test_a_plan_that_is_as_good_as_the_best_stays() -> None:
    scenario = equal_devices()
    policy, plan = CannikinPolicy(scenario), adaptdl(scenario)
    assert all(policy.decide(observed(scenario, plan), plan) is None for _ in range(5))


@pytest.mark.parametrize(("factor", "changes"), [(1.04, False), (1.5, True)])
def test_a_change_must_promise_enough(factor: float, changes: bool) -> None:
    # With one of two devices this much slower, balance saves (factor - 1) / (factor + 1) of the step.
    assert ((factor - 1) / (factor + 1) >= LEAST_GAIN) is changes
    scenario = equal_devices(2, stragglers={1: factor}, batch=200)
    start = adaptdl(scenario)
    assert (settled(scenario, start) != start) is changes


def test_a_device_that_recovers_gets_its_share_back() -> None:
    slow, fast = equal_devices(stragglers={2: 3.0}), equal_devices()
    policy = CannikinPolicy(fast)
    plan = settled(slow, adaptdl(fast), policy)
    assert samples_of(plan)[2] < 12
    again = settled(fast, plan, policy)
    assert min(samples_of(again)) >= 19


def test_every_device_keeps_a_sample() -> None:
    scenario = equal_devices(stragglers={2: 1000.0})
    plan = settled(scenario, adaptdl(scenario))
    assert samples_of(plan)[2] == 1


def test_a_balanced_step_needs_fewer_microbatches() -> None:
    # Even shares do not fit the small device at once; what it can do while the other does the rest fits.
    scenario = equal_devices(2, batch=20, stragglers={0: 3.0})
    states = 3 * 2 * 30_000_000
    small, large = scenario.cluster.devices
    cluster = replace(scenario.cluster, devices=(replace(small, memory_bytes=states + 3_000 * 6), large))
    scenario = replace(scenario, cluster=cluster)
    start = adaptdl(scenario)
    assert len(start.pipelines[0].microbatches) == 2
    plan = settled(scenario, start)
    assert (plan.pipelines[0].microbatches, samples_of(plan)) == ((20,), [5, 15])


def test_memory_bounds_what_a_microbatch_gives_to_a_device() -> None:
    # At once a fast device could not have its share: in two microbatches it can.
    scenario = equal_devices(2, batch=20)
    states = 3 * 2 * 30_000_000
    small, large = scenario.cluster.devices
    cluster = replace(scenario.cluster, devices=(replace(small, memory_bytes=states + 3_000 * 6), large))
    scenario = replace(scenario, cluster=cluster)
    start = adaptdl(scenario)
    assert settled(scenario, start) == start


def test_those_who_are_left_cut_the_batch_into_more_microbatches() -> None:
    scenario = equal_devices(2, batch=20)
    states = 3 * 2 * 30_000_000
    devices = tuple(replace(device, memory_bytes=states + 3_000 * 12) for device in scenario.cluster.devices)
    scenario = replace(scenario, cluster=replace(scenario.cluster, devices=devices))
    plan = adaptdl(scenario)
    left = CannikinPolicy(scenario).decide(Observation(0, plan, (), (), gone=("device-1",)), plan)
    assert left is not None
    check_plan(left, scenario)
    assert left.pipelines[0].microbatches == (10, 10)


def test_the_others_go_on_without_a_device_that_has_gone() -> None:
    scenario = equal_devices(stragglers={1: 2.0})
    policy = CannikinPolicy(scenario)
    plan = settled(scenario, adaptdl(scenario), policy)
    seen = replace(observed(scenario, plan), gone=("device-0",))
    left = policy.decide(seen, plan)
    assert left is not None
    check_plan(left, scenario)
    assert left.devices == ("device-1", "device-2")
    assert samples_of(left) == [20, 40]


def test_before_anything_is_known_a_departure_is_answered_by_the_profile() -> None:
    scenario = equal_devices()
    plan = adaptdl(scenario)
    left = CannikinPolicy(scenario).decide(Observation(0, plan, (), (), gone=("device-2",)), plan)
    assert left is not None
    assert samples_of(left) == [30, 30]


def test_nobody_is_left() -> None:
    scenario = equal_devices(1)
    plan = adaptdl(scenario)
    assert CannikinPolicy(scenario).decide(Observation(0, plan, (), (), gone=("device-0",)), plan) is None


def test_plans_of_several_stages_are_left_alone() -> None:
    scenario = chain_scenario([1.0, 1.0], [1.0, 1.0])
    plan = chain_plan(scenario)
    assert CannikinPolicy(scenario).decide(observed(scenario, plan), plan) is None


def test_fewer_samples_than_devices_are_left_alone() -> None:
    scenario = equal_devices(3, batch=2, stragglers={0: 9.0})
    plan = make_plan("ddp", scenario)
    assert CannikinPolicy(scenario).decide(observed(scenario, plan), plan) is None


@settings(max_examples=15)
@given(st.lists(st.floats(0.3, 4), min_size=2, max_size=4), st.integers(16, 120))
def test_what_it_settles_on_is_never_slower(factors: list[float], batch: int) -> None:
    scenario = equal_devices(len(factors), batch=batch, stragglers=dict(enumerate(factors)))
    start = adaptdl(scenario)
    plan = settled(scenario, start, steps=4)
    check_plan(plan, scenario)
    ends_s = [step_ends_s(Simulator().run(scenario, each, None, 1).events)[0] for each in (start, plan)]
    assert ends_s[1] <= ends_s[0] * (1 + 1e-9)


def test_it_is_one_of_the_policies() -> None:
    assert isinstance(make_policy("cannikin", equal_devices()), CannikinPolicy)


# --- In the loop of the simulator ------------------------------------------------------------------------------


def test_in_a_run_the_step_gets_shorter_when_a_device_slows_down() -> None:
    scenario = equal_devices(batch=90)
    step_s = 30 * 9e-3
    slowdown = Slowdown("device-2", (0.0, 5 * step_s), (1.0, 1 / 3))
    scenario = replace(scenario, effects=Effects(compute=ComputeEffects(slowdowns=(slowdown,))))
    plan = adaptdl(scenario)
    alone = step_ends_s(Simulator().run(scenario, plan, None, 14).events)
    record = Simulator().run(scenario, plan, CannikinPolicy(scenario), 14)
    adapted = step_ends_s(record.events)
    assert record.decisions
    assert all(decision.plan.devices == plan.devices for decision in record.decisions)
    last_s = adapted[-1] - adapted[-2]
    # 90 samples on devices of speeds 1, 1 and 1/3: 38.6 of them on a fast one, instead of 30 on the slow one.
    assert last_s == pytest.approx(39 * 9e-3, rel=0.05)
    assert alone[-1] - alone[-2] == pytest.approx(90 * 9e-3, rel=0.02)


def test_a_run_can_be_replayed() -> None:
    scenario = equal_devices(stragglers={2: 3.0})
    plan = adaptdl(scenario)
    record = Simulator().run(scenario, plan, CannikinPolicy(scenario), 8)
    replay = Adaptation(CannikinPolicy(scenario), plan, scenario)
    for step in range(8):
        replay.finish_step(step, record.events)
    assert [each.plan for each in replay.decisions] == [each.plan for each in record.decisions]
