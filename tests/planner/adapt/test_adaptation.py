"""What a policy may change of a plan that runs, and what it may not."""

from dataclasses import replace

import pytest

from planner.adapt.adaptation import Adaptation
from planner.adapt.migration import LayerTransfer, Migration
from planner.adapt.observation import Observation
from planner.adapt.policy import describe_change
from planner.plan.actions import Action, Kind
from planner.plan.plan import Plan, Replica, Synchronisation
from planner.scenario.scenario import Scenario
from planner.step.orders import with_orders
from tests.helpers.scenarios.builders import chain_plan, chain_scenario, layered_plan, mesh_scenario
from tests.helpers.strategies.scripted_policy import Scripted
from traces.common.errors import RunError


def running() -> tuple[Scenario, Plan]:
    scenario = mesh_scenario(2, [1.0], [1.0], global_batch=4, regions=["north", "south"])
    return scenario, layered_plan(scenario, [([(1, 1, 1)], [1, 1])] * 2)


@pytest.mark.parametrize(
    ("field", "value"),
    [("synchronisation", Synchronisation("asgd", staleness_bound=3)), ("connections", 2)],
)
def test_what_is_set_up_once_stays_where_nobody_waits(field: str, value: object) -> None:
    scenario, synchronous = running()
    plan = replace(synchronous, synchronisation=Synchronisation("asgd"))
    adaptation = Adaptation(Scripted({0: replace(plan, **{field: value})}), plan, scenario)
    with pytest.raises(RunError, match=r"after step 0 policy Scripted moves layers .*, or changes what is set up once"):
        adaptation.finish_step(0, [])
    assert adaptation.plan_for(2) == plan


def test_replicas_come_and_go_where_nobody_waits_but_the_first_one_stays() -> None:
    scenario = mesh_scenario(4, [1.0], [1.0], global_batch=4, regions=["north", "north", "south", "south"])
    plan = layered_plan(scenario, [([(1, 1, 1)], [1, 1])] * 2)
    stage = plan.pipelines[0].stages[0]

    def with_replicas(*names: str) -> Plan:
        """The second pipeline is on other devices."""
        pipelines = [
            replace(plan.pipelines[0], stages=(replace(stage, replicas=tuple(map(Replica, own))),))
            for own in (("device-0",), names)
        ]
        return replace(plan, pipelines=tuple(pipelines), synchronisation=Synchronisation("asgd"))

    running, more = with_replicas("device-2"), with_replicas("device-2", "device-1", "device-3")
    adaptation = Adaptation(Scripted({0: more, 2: with_replicas("device-3")}), running, scenario)
    decision = adaptation.finish_step(0, [])
    assert decision is not None
    assert adaptation.is_start(decision)
    # The state is that of the own pipeline, though a device of the other one is as near.
    assert [(move.source, move.target) for move in decision.migration.moves] == [
        ("device-2", "device-1"),
        ("device-2", "device-3"),
    ]
    adaptation.finish_step(1, [])
    with pytest.raises(RunError, match="moves layers or the first replica of a stage"):
        adaptation.finish_step(2, [])


@pytest.mark.parametrize(
    ("field", "value"),
    [("synchronisation", Synchronisation(bucket_bytes=1000)), ("connections", 2)],
)
def test_what_is_set_up_anew_though_nothing_moves(field: str, value: object) -> None:
    scenario, plan = running()
    adaptation = Adaptation(Scripted({0: replace(plan, **{field: value})}), plan, scenario)
    decision = adaptation.finish_step(0, [])
    assert decision is not None
    assert adaptation.is_start(decision)
    assert not decision.migration.moves


def test_what_each_step_may_have_for_itself() -> None:
    scenario, plan = running()
    changed = [
        replace(
            pipeline,
            stages=tuple(replace(stage, in_flight=2, recompute=True) for stage in pipeline.stages),
            microbatches=(pipeline.samples,),
        )
        for pipeline in plan.pipelines
    ]
    other = replace(
        plan,
        strategy="another",
        schedule="gpipe" if plan.schedule != "gpipe" else "1f1b",
        order="dynamic",
        pipelines=tuple(changed),
        compression="int8",
    )
    adaptation = Adaptation(Scripted({0: other}), plan, scenario)
    assert adaptation.finish_step(0, []) is not None
    assert adaptation.plan_for(2) == other


def test_what_travels_is_worked_out() -> None:
    scenario = chain_scenario([1.0, 1.0], [1.0, 1.0])
    plan = chain_plan(scenario)
    first, second = plan.pipelines[0].stages
    swapped = (replace(first, replicas=second.replicas), replace(second, replicas=first.replicas))
    moved = replace(plan, pipelines=(replace(plan.pipelines[0], stages=swapped),))
    decision = Adaptation(Scripted({0: moved}), plan, scenario).finish_step(0, [])
    assert decision is not None
    assert decision.migration.size_bytes == 8000


@pytest.mark.parametrize("field", ["scenario", "model", "version"])
def test_what_no_backend_changes(field: str) -> None:
    scenario, plan = running()
    proposed = replace(plan, **{field: 7 if field == "version" else "another"})
    with pytest.raises(RunError, match=f"changes '{field}'|for model 'another'"):
        Adaptation(Scripted({0: proposed}), plan, scenario).finish_step(0, [])


def test_the_way_of_bringing_copies_together_stays() -> None:
    scenario, plan = running()
    proposed = replace(plan, synchronisation=Synchronisation("asgd"))
    with pytest.raises(RunError, match=r"changes 'synchronisation\.method' from 'allreduce' to 'asgd'"):
        Adaptation(Scripted({0: proposed}), plan, scenario).finish_step(0, [])


def test_what_a_change_is_called() -> None:
    scenario, plan = running()
    whole = layered_plan(scenario, [([(1, 1, 2)], [4])])
    assert describe_change(plan, whole) == (
        "without device-1; pipelines 2 -> 1; microbatches 2 -> 1; in flight [1] -> [2]; samples 2 -> 4"
    )
    migration = Migration(
        (LayerTransfer("left", "right", 3, 6, 12 * 10**6), LayerTransfer("right", "left", 1, 2, 10**5))
    )
    assert describe_change(plan, plan, migration) == (
        "layers 3 to 5 from left to right, 12.0 MB; layer 1 from right to left, 0.1 MB"
    )
    assert describe_change(plan, replace(plan, strategy="another")) == "another plan"
    dynamic = replace(plan, schedule="zb-h1", order="dynamic")
    assert describe_change(plan, dynamic) == f"schedule {plan.schedule} -> zb-h1; order scheduled -> dynamic"
    rows = [[Action(0, Kind.FORWARD, 0), Action(0, Kind.BACKWARD, 0)], [Action(0, Kind.FORWARD, 0)]]
    one, other = (with_orders(plan, [row]) for row in rows)
    assert describe_change(plan, one) == f"schedule {plan.schedule} -> explicit"
    assert describe_change(one, other) == "another order of actions"


def test_a_policy_sees_the_samples_before_a_step_that_devices_have_left() -> None:
    scenario, plan = running()
    seen = []

    class Watching:
        def decide(self, observation: Observation, plan: Plan) -> None:
            seen.append((observation.gone, observation.samples_before))

    Adaptation(Watching(), plan, scenario).lose_devices(5, (), ("device-1",), ("device-1",))
    assert seen == [(("device-1",), 5 * 4)]
