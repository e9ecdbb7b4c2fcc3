from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.core.step_program import Transfer, compile_plan
from planner.cost.synchronisation import GradientSync
from planner.plan.actions import Action, Kind
from planner.plan.plan import Plan, Replica, Stage
from planner.scenario.scenario import Scenario
from tests.helpers.scenarios.builders import chain_plan, chain_scenario, layered_plan, mesh_scenario


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=8), st.integers(1, 200))
def test_the_intervals_of_a_stage_partition_the_samples(shares: list[float], samples: int) -> None:
    replicas = tuple(Replica(f"device-{i}", share) for i, share in enumerate(shares))
    intervals = Stage(0, 1, replicas, 1).intervals(samples)
    taken = [sample for first, end in intervals for sample in range(first, end)]
    assert taken == list(range(samples))
    total = sum(shares)
    for (first, end), share in zip(intervals, shares, strict=True):
        assert end - first == pytest.approx(samples * share / total, abs=1 + 1e-9)


@st.composite
def replicated(draw: st.DrawFn) -> tuple[Scenario, Plan]:
    """One pipeline of up to four stages of up to four replicas of unequal shares."""
    widths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    microbatches = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    layers, devices = len(widths), sum(widths)
    scenario = mesh_scenario(
        devices,
        [1.0] * layers,
        [2.0] * layers,
        output_bytes=draw(st.lists(st.integers(0, 5000), min_size=layers, max_size=layers)),
        global_batch=sum(microbatches),
    )
    stages = [(index + 1, width, layers - index) for index, width in enumerate(widths)]
    shares = draw(st.lists(st.floats(0.05, 5), min_size=devices, max_size=devices))
    return scenario, layered_plan(scenario, [(stages, microbatches)], shares=shares)


@given(replicated())
def test_what_one_device_sends_another_receives_and_nothing_else(case: tuple[Scenario, Plan]) -> None:
    scenario, plan = case
    sent: list[Transfer] = []
    received: list[Transfer] = []
    for device, program in compile_plan(plan, scenario).items():
        for work in program.work:
            assert all(transfer.source == device for transfer in work.sends)
            assert all(transfer.target == device for transfer in work.receives)
            sent += work.sends
            received += work.receives
    assert len(set(sent)) == len(sent) == len(received)
    assert set(sent) == set(received)


@given(replicated())
def test_each_work_receives_each_of_its_samples_once(case: tuple[Scenario, Plan]) -> None:
    scenario, plan = case
    last = len(plan.pipelines[0].stages) - 1
    for program in compile_plan(plan, scenario).values():
        for work in program.work:
            end_stage = 0 if work.action.kind is Kind.FORWARD else last
            if work.action.stage == end_stage:
                assert work.receives == ()
                continue
            arriving = [sample for each in work.receives for sample in range(each.first, each.end)]
            assert sorted(arriving) == list(range(work.first, work.end))
            boundary = work.action.stage - (work.action.kind is Kind.FORWARD)
            sample_bytes = scenario.model.layers[boundary].output_bytes
            assert all(each.size_bytes == (each.end - each.first) * sample_bytes for each in work.receives)


@given(replicated())
def test_the_replicas_of_a_stage_do_each_sample_once(case: tuple[Scenario, Plan]) -> None:
    scenario, plan = case
    done: defaultdict[Action, list[int]] = defaultdict(list)
    for program in compile_plan(plan, scenario).values():
        for work in program.work:
            done[work.action] += range(work.first, work.end)
    (pipeline,) = plan.pipelines
    assert len(done) == 2 * len(pipeline.stages) * len(pipeline.microbatches)
    for action, samples in done.items():
        assert sorted(samples) == list(range(pipeline.microbatches[action.microbatch]))


def test_a_microbatch_smaller_than_the_replicas_leaves_some_without_work() -> None:
    scenario = mesh_scenario(4, [1.0, 1.0], [1.0, 1.0], global_batch=2)
    programs = compile_plan(layered_plan(scenario, [([(1, 3, 2), (2, 1, 1)], [1, 1])]), scenario)
    assert [len(programs[f"device-{i}"].work) for i in range(4)] == [0, 4, 0, 4]
    (transfer,) = programs["device-3"].work[0].receives
    assert (transfer.source, transfer.first, transfer.end) == ("device-1", 0, 1)
    # Those without work still take part in the sum of gradients.
    assert all(len(programs[f"device-{i}"].synchronisations) == 1 for i in range(3))


def test_durations_and_boundaries_are_those_of_the_layers() -> None:
    scenario = chain_scenario([1.0, 2.0, 4.0], [3.0, 5.0, 7.0], output_bytes=[10, 20, 30], global_batch=3)
    plan = chain_plan(scenario, bounds=[0, 1, 1 + 1, 3], microbatches=[2, 1])
    programs = compile_plan(plan, scenario)
    assert [work.duration_s for work in programs["device-1"].work] == [4.0, 2.0, 10.0, 5.0]
    assert [str(work.action) for work in programs["device-1"].work] == ["1F0", "1F1", "1B0", "1B1"]
    first = programs["device-1"].work[0]
    assert first.receives == (Transfer("device-0", "device-1", Kind.FORWARD, 0, 1, 0, 0, 2, 20),)
    assert first.sends == (Transfer("device-1", "device-2", Kind.FORWARD, 0, 2, 0, 0, 2, 40),)
    backward = programs["device-1"].work[2]
    assert backward.receives == (Transfer("device-2", "device-1", Kind.BACKWARD, 0, 1, 0, 0, 2, 40),)
    assert backward.sends == (Transfer("device-1", "device-0", Kind.BACKWARD, 0, 0, 0, 0, 2, 20),)


def test_gradients_are_summed_over_runs_of_layers_with_the_same_holders() -> None:
    scenario = mesh_scenario(4, [1.0] * 4, [1.0] * 4, parameter_bytes=[4, 8, 0, 16], global_batch=4)
    # Pipeline 0 cuts after layer 1, pipeline 1 after layer 3.
    plan = layered_plan(scenario, [([(1, 1, 2), (4, 1, 1)], [1, 1]), ([(3, 1, 2), (4, 1, 1)], [1, 1])])
    programs = compile_plan(plan, scenario)
    first = GradientSync(0, 1, ("device-0", "device-2"), 1, "ring", ("region",) * 2)
    middle = GradientSync(1, 3, ("device-1", "device-2"), 2, "ring", ("region",) * 2)
    last = GradientSync(3, 4, ("device-1", "device-3"), 4, "ring", ("region",) * 2)
    assert {device: program.synchronisations for device, program in programs.items()} == {
        "device-0": (first,),
        "device-1": (middle, last),
        "device-2": (first, middle),
        "device-3": (last,),
    }


def test_layers_without_parameters_and_devices_alone_sum_nothing() -> None:
    scenario = mesh_scenario(3, [1.0, 1.0], [1.0, 1.0], parameter_bytes=[4, 0], global_batch=2)
    programs = compile_plan(layered_plan(scenario, [([(1, 1, 2), (2, 2, 1)], [2])]), scenario)
    assert all(program.synchronisations == () for program in programs.values())


def test_programs_come_in_rank_order() -> None:
    scenario = mesh_scenario(5, [1.0, 1.0], [1.0, 1.0], global_batch=4)
    plan = layered_plan(scenario, [([(1, 2, 2), (2, 1, 1)], [2]), ([(1, 1, 2), (2, 1, 1)], [2])])
    programs = compile_plan(plan, scenario)
    assert tuple(programs) == plan.devices
    assert [(p.pipeline, p.stage) for p in programs.values()] == [(0, 0), (0, 0), (0, 1), (1, 0), (1, 1)]
