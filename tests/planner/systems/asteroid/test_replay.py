from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planner.adapt.migration import backup_holders, migration_between, migration_time_s
from planner.adapt.observation import Observation
from planner.check import check_plan
from planner.plan.plan import Plan
from planner.runs.event_totals import step_ends_s
from planner.runs.metrics import measure
from planner.scenario.faults import DETECTION_S, Absence
from planner.scenario.scenario import Scenario
from planner.step.orders import plan_orders, with_orders, with_schedule
from planner.systems.asteroid.policy import full_redistribution, in_proportion, replan, replay, where_they_were
from planner.systems.registry import make_plan, make_policy
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import layered_plan, mesh_scenario
from tests.helpers.scenarios.hybrid_scenarios import roomy, unlike_scenarios
from traces.common.errors import InputError


def bounds(plan: Plan) -> list[int]:
    return [stage.end_layer for stage in plan.pipelines[0].stages]


def chain(layers: int, ends: Sequence[int], link_bps: float = 1e9) -> tuple[Scenario, Plan]:
    """Equal layers on as many equal devices as there are ends."""
    scenario = mesh_scenario(
        len(ends), [1.0] * layers, [2.0] * layers, link=lambda a, b: (link_bps, 0.0), global_batch=16, microbatch=1
    )
    stages = [(end, 1, 2 * (len(ends) - index) - 1) for index, end in enumerate(ends)]
    return scenario, layered_plan(scenario, [(stages, (1,) * 16)])


def seen(plan: Plan, gone: tuple[str, ...]) -> Observation:
    return Observation(3, plan, (), (), gone)


def test_a_lost_stages_layers_go_to_its_neighbours_and_boundaries_shift() -> None:
    scenario, plan = chain(12, [3, 6, 9, 12])
    after = replay(plan, scenario, ["device-1"])
    assert after.devices == ("device-0", "device-2", "device-3")
    assert bounds(after) == [4, 8, 12]
    # Two rounds of communication fewer.
    assert [stage.in_flight for stage in after.pipelines[0].stages] == [5, 3, 1]


def test_layers_move_no_further_than_to_a_neighbour() -> None:
    # In proportion the first two stages would end at 4 and at 8; but stage 0 can hand on only what its neighbour gets.
    scenario, plan = chain(12, [9, 10, 11, 12])
    after = replay(plan, scenario, ["device-3"], rules=(in_proportion,))
    assert bounds(after) == [4, 10, 12]


def test_a_stage_of_several_replicas_loses_one_and_nothing_comes_from_a_backup() -> None:
    scenario = mesh_scenario(3, [1.0] * 6, [2.0] * 6, global_batch=16)
    plan = layered_plan(scenario, [([(4, 2, 3), (6, 1, 1)], (2,) * 8)])
    assert set(backup_holders(plan)) == {4, 5}
    after = replay(plan, scenario, ["device-0"])
    assert after.devices == ("device-1", "device-2")
    assert bounds(after) == [3, 6]
    (move,) = migration_between(plan, after, scenario, ["device-0"]).moves
    assert (move.source, move.target, move.first_layer, move.end_layer) == ("device-1", "device-2", 3, 4)


def test_boundaries_stay_where_shifting_would_cut_at_a_large_activation() -> None:
    # Layers of 3 s; the output of layer 3 is thin, all others take 100 s to send.
    _, plan = chain(6, [2, 4, 6])
    outputs = [10**6, 10**6, 10**6, 1, 10**6, 0]
    slow = mesh_scenario(3, [1.0] * 6, [2.0] * 6, output_bytes=outputs, link=lambda a, b: (8e4, 0.0), global_batch=16)
    assert bounds(replay(plan, slow, ["device-0"])) == [4, 6]
    assert bounds(replay(plan, slow, ["device-0"], rules=(in_proportion,))) == [3, 6]


def test_a_pipeline_without_devices_is_refused() -> None:
    scenario, plan = chain(2, [2])
    with pytest.raises(InputError, match="lost all of its devices"):
        replay(plan, scenario, ["device-0"])


@settings(max_examples=50)
@given(unlike_scenarios(), st.data())
def test_what_is_left_holds_everything_or_it_is_refused(scenario: Scenario, data: st.DataObject) -> None:
    try:
        plan = make_plan("asteroid", scenario)
    except InputError:
        assume(False)
    assume(len(plan.devices) > 1)
    gone = data.draw(st.sampled_from(plan.devices))
    try:
        after = replay(plan, scenario, [gone])
    except InputError:
        # With a GiB everywhere it does fit.
        replay(plan, roomy(scenario), [gone])
        return
    check_plan(after, scenario)
    assert gone not in after.devices
    assert (after.global_batch, after.pipelines[0].microbatches) == (plan.global_batch, plan.pipelines[0].microbatches)


@settings(max_examples=25)
@given(unlike_scenarios(), st.data())
def test_backups_hold_what_replay_needs(scenario: Scenario, data: st.DataObject) -> None:
    scenario = roomy(scenario)
    plan = make_plan("asteroid", scenario)
    assume(len(plan.devices) > 1)
    gone = data.draw(st.sampled_from(plan.devices))
    after = replay(plan, scenario, [gone])
    moves = migration_between(plan, after, scenario, [gone], backup_holders(plan)).moves
    assert all(gone not in (move.source, move.target) for move in moves)


def test_the_policies_decide_only_when_a_device_of_the_plan_is_gone() -> None:
    scenario, plan = chain(12, [3, 6, 9, 12])
    for name in ("asteroid-replay", "heavy-rescheduling"):
        policy = make_policy(name, scenario)
        assert policy is not None
        assert policy.decide(seen(plan, ()), plan) is None
        after = policy.decide(seen(plan, ("device-2",)), plan)
        assert after is not None
        assert "device-2" not in after.devices
        check_plan(after, scenario)


def test_heavy_rescheduling_gathers_and_redistributes_everything() -> None:
    scenario, plan = chain(12, [3, 6, 9, 12])
    after = replan(plan, scenario, ["device-1"])
    assert after.pipelines[0].microbatches == plan.pipelines[0].microbatches
    gather, spread = full_redistribution(plan, after, scenario, ["device-1"], backup_holders(plan))
    state_bytes = 4000
    # The first device lacks six layers: it is the last stage's backup. Then the two others get their own anew.
    assert gather.size_bytes == 6 * state_bytes
    assert {move.target for move in gather.moves} == {"device-0"}
    assert spread.size_bytes == 8 * state_bytes
    assert {move.source for move in spread.moves} == {"device-0"}


def test_only_lost_layers_move_where_boundaries_stay() -> None:
    scenario, plan = chain(12, [3, 6, 9, 12])
    after = replay(plan, scenario, ["device-1"], rules=(where_they_were,))
    assert bounds(after) in ([4, 9, 12], [5, 9, 12])


def test_throughput_after_replay_is_near_that_of_a_full_replan() -> None:
    scenario, plan = chain(12, [3, 6, 9, 12])
    plans = [replay(plan, scenario, ["device-1"]), replan(plan, scenario, ["device-1"])]
    kept, anew = (measure(Simulator().run(scenario, each, None, 3)).samples_per_s for each in plans)
    assert kept >= 0.9 * anew


def test_in_the_simulator_a_departure_costs_detection_migration_and_the_round_again() -> None:
    # Layers of 4000 bytes take 4 s each; a step lasts longer than the one second until a departure is known.
    scenario, plan = chain(12, [3, 6, 9, 12], link_bps=8e3)
    left_s = measure(Simulator().run(scenario, plan, None, 1)).step_s + 1.0
    faulty = replace(scenario, faults=(Absence("device-1", left_s),))
    record = Simulator().run(faulty, plan, make_policy("asteroid-replay", faulty), 3)
    after = replay(plan, scenario, ["device-1"])
    (decision,) = record.decisions
    assert decision.plan == after
    moves = migration_between(plan, after, scenario, ["device-1"], backup_holders(plan))
    round_s = measure(Simulator().run(scenario, after, None, 1)).step_s
    expected_s = left_s + DETECTION_S + migration_time_s(moves, scenario) + round_s
    assert step_ends_s(record.events)[1] == pytest.approx(expected_s)


@pytest.mark.parametrize("name", ["asteroid-replay", "heavy-rescheduling"])
def test_without_any_device_all_wait_for_one(name: str) -> None:
    scenario = mesh_scenario(2, [0.1] * 2, [0.2] * 2, link=lambda a, b: (1e9, 0.001), global_batch=4)
    plan = make_plan("asteroid", scenario)
    faults = tuple(Absence(device, 1.0 + number, 5.0) for number, device in enumerate(plan.devices))
    scenario = replace(scenario, faults=faults)
    record = Simulator().run(scenario, plan, make_policy(name, scenario), 20)
    assert measure(record).steps == 20


@pytest.mark.parametrize("schedule", ["gpipe", "explicit"])
@pytest.mark.parametrize("policy", ["asteroid-replay", "cloudless", "heavy-rescheduling"])
def test_plans_of_other_schedules_are_answered_with_plans_that_can_run(schedule: str, policy: str) -> None:
    """An explicit order is that of the old stages; gpipe holds all microbatches, for which memory is too small then."""
    scenario = mesh_scenario(3, [0.1] * 6, [0.2] * 6, global_batch=8, link=lambda a, b: (1e9, 1e-3))
    plan = layered_plan(
        scenario, [([(6, 3, 1)] if policy == "cloudless" else [(2, 1, 3), (4, 1, 2), (6, 1, 1)], [1] * 8)]
    )
    if schedule == "explicit":
        rows = plan_orders(plan, scenario)[0]
        plan = with_orders(plan, [rows.actions(worker) for worker in range(rows.worker_count)])
    else:
        plan = with_schedule(plan, scenario, schedule)
    check_plan(plan, scenario)
    scenario = replace(scenario, faults=(Absence("device-1", 0.5, 30.0),))
    record = Simulator().run(scenario, plan, make_policy(policy, scenario), 6)
    assert measure(record).steps == 6
    assert record.decisions
