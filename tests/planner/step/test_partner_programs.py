"""What the partners of a tensor-parallel group do follows from what its first device does."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from executor.core.step_program import compile_plan, device_program
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.scenario.scenario import Scenario
from tests.helpers.scenarios.builders import mesh_scenario


@st.composite
def grouped(draw: st.DrawFn) -> tuple[Scenario, Plan]:
    """One pipeline of up to three stages of one to three replicas each, of the stage's degree of 1 to 3."""
    widths = draw(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=3))
    devices = sum(replicas * degree for replicas, degree in widths)
    layers = len(widths)
    scenario = mesh_scenario(devices, [1.0] * layers, [2.0] * layers, global_batch=8)
    model = replace(scenario.model, sharded={2: scenario.model, 3: scenario.model})
    names = iter(device.name for device in scenario.cluster.devices)
    stages = []
    for index, (replicas, degree) in enumerate(widths):
        groups = [[next(names) for _ in range(degree)] for _ in range(replicas)]
        made = tuple(Replica(group[0], draw(st.sampled_from([1.0, 2.0])), tuple(group[1:])) for group in groups)
        stages.append(Stage(index, index + 1, made, layers - index))
    plan = Plan(scenario.name, scenario.model.name, "hand", "1f1b", (Pipeline(tuple(stages), (3, 3, 2)),))
    return replace(scenario, model=model), plan


@settings(max_examples=30)
@given(grouped())
def test_partners_do_the_same_and_send_nothing_but_gradients_to_their_like(case: tuple[Scenario, Plan]) -> None:
    scenario, plan = case
    programs = compile_plan(plan, scenario)
    for replica in (replica for stage in plan.pipelines[0].stages for replica in stage.replicas):
        leader = device_program(plan, scenario, replica.device)
        assert leader is programs[replica.device]
        assert leader.partners == replica.partners
        for place, name in enumerate(replica.partners, start=1):
            partner = device_program(plan, scenario, name)
            assert (partner.device, partner.stage, partner.partners) == (name, leader.stage, ())
            assert partner.update_s == leader.update_s
            assert [replace(work, receives=(), sends=()) for work in leader.work] == list(partner.work)
            for own, sync in zip(partner.synchronisations, leader.synchronisations, strict=True):
                groups = {each.device: each.devices for stage in plan.pipelines[0].stages for each in stage.replicas}
                assert own.devices == tuple(groups[device][place] for device in sync.devices)
                assert own.exchanges(name) == sync.exchanges(replica.device)
