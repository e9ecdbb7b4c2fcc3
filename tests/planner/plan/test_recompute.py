"""Stages that keep only their input and compute the forward again: what that costs in time and saves in memory."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.core.step_program import compile_plan
from planner.check import check_plan
from planner.cost.in_flight import fitting_depths
from planner.plan.plan import Plan
from planner.runs.memory_timeline import memory_timelines, peak_memory_bytes
from planner.scenario.cluster import Cluster
from planner.scenario.effects import ComputeEffects, Effects, MemoryEffects
from planner.scenario.scenario import Scenario
from planner.step.compile import compile_step
from planner.step.evaluate import step_time_s
from planner.step.memory import peak_bytes
from planner.step.orders import with_schedule
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import chain_plan, chain_scenario, layered_plan, makespan_s, mesh_scenario
from traces.common.errors import InputError

EXACT = 1e-9
SECONDS = st.floats(0.01, 10)


def recomputing(plan: Plan, chosen: Sequence[bool]) -> Plan:
    """The plan of one pipeline with the chosen stages recomputed."""
    (pipeline,) = plan.pipelines
    stages = tuple(replace(stage, recompute=each) for stage, each in zip(pipeline.stages, chosen, strict=True))
    return replace(plan, pipelines=(replace(pipeline, stages=stages),))


def with_memory(scenario: Scenario, memory_bytes: int) -> Scenario:
    devices = tuple(replace(device, memory_bytes=memory_bytes) for device in scenario.cluster.devices)
    return replace(scenario, cluster=Cluster(devices, scenario.cluster.links))


# --- time -----------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    times_s=st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    schedule=st.sampled_from(["1f1b", "gpipe", "zb-h1"]),
    launch_s=st.sampled_from([0.0, 0.25]),
)
def test_one_stage_takes_longer_by_one_more_forward_of_every_microbatch(
    times_s: list[tuple[float, float]], sizes: list[int], schedule: str, launch_s: float
) -> None:
    forwards_s, backwards_s = ([each[way] for each in times_s] for way in range(2))
    scenario = mesh_scenario(1, forwards_s, backwards_s, global_batch=sum(sizes))
    scenario = replace(scenario, effects=Effects(compute=ComputeEffects(launch_overhead_s=launch_s)))
    plan = layered_plan(scenario, [([(len(times_s), 1, 2)], sizes)], schedule=schedule)
    longer_s = step_time_s(recomputing(plan, [True]), scenario) - step_time_s(plan, scenario)
    assert longer_s == pytest.approx(sum(sizes) * sum(forwards_s), rel=1e-6)


def test_the_backward_and_the_input_gradient_take_the_forward_again_and_the_weight_gradient_does_not() -> None:
    scenario = chain_scenario([3.0], [8.0], global_batch=2)
    for schedule, expected in (("1f1b", {"F": 3.0, "B": 11.0}), ("zb-h1", {"F": 3.0, "I": 7.0, "W": 4.0})):
        plan = recomputing(chain_plan(scenario, schedule=schedule), [True])
        work = compile_plan(plan, scenario)["device-0"].work
        assert {str(each.action.kind): each.duration_s for each in work} == expected


@settings(max_examples=60)
@given(
    stages=st.integers(2, 5),
    microbatches=st.integers(1, 8),
    forward_s=SECONDS,
    backward_s=SECONDS,
    schedule=st.sampled_from(["1f1b", "gpipe"]),
)
def test_equal_stages_take_the_textbook_makespan_of_longer_backwards(
    stages: int, microbatches: int, forward_s: float, backward_s: float, schedule: str
) -> None:
    scenario = chain_scenario(
        [forward_s] * stages, [backward_s] * stages, output_bytes=[0] * stages, global_batch=microbatches
    )
    plan = recomputing(chain_plan(scenario, schedule=schedule), [True] * stages)
    expected_s = (microbatches + stages - 1) * (2 * forward_s + backward_s)
    record = Simulator().run(scenario, plan, None, 1)
    assert makespan_s(record) == pytest.approx(expected_s, rel=EXACT)
    assert step_time_s(plan, scenario) == pytest.approx(expected_s, rel=EXACT)


# --- memory ---------------------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(
    depth=st.integers(1, 6),
    samples=st.integers(1, 5),
    input_bytes=st.integers(0, 3000),
    activation_bytes=st.integers(0, 2000),
    layers=st.integers(1, 3),
    framework_bytes=st.integers(0, 1000),
    schedule=st.sampled_from(["1f1b", "gpipe"]),
)
def test_the_peak_is_what_waits_and_one_microbatch_at_work(
    depth: int,
    samples: int,
    input_bytes: int,
    activation_bytes: int,
    layers: int,
    framework_bytes: int,
    schedule: str,
) -> None:
    microbatches = 6
    scenario = mesh_scenario(
        2,
        [1.0] * (layers + 1),
        [1.0] * (layers + 1),
        output_bytes=[input_bytes] + [7] * layers,
        activation_bytes=activation_bytes,
        global_batch=microbatches * samples,
    )
    scenario = replace(scenario, effects=Effects(memory=MemoryEffects(framework_bytes, 0.5)))
    stages = [(1, 1, microbatches), (layers + 1, 1, depth)]
    plan = layered_plan(scenario, [(stages, [samples] * microbatches)], schedule=schedule)
    held = microbatches if schedule == "gpipe" else depth
    whole = layers * activation_bytes
    standing = framework_bytes + layers * 8000 + 0.5 * samples * activation_bytes
    assert peak_bytes(plan, scenario)["device-1"] == pytest.approx(standing + held * samples * whole, abs=1)
    lighter = recomputing(plan, [True, True])
    at_work = samples * max(whole - input_bytes, 0)
    expected = {
        # The first stage's input is the model's own, of which profiles know nothing.
        "device-0": framework_bytes + 8000 + 1.5 * samples * activation_bytes,
        "device-1": standing + held * samples * input_bytes + at_work,
    }
    assert peak_bytes(lighter, scenario) == pytest.approx(expected, abs=1)
    assert peak_memory_bytes(Simulator().run(scenario, lighter, None, 1)) == pytest.approx(expected, abs=1)
    # The check before anything is scheduled counts the same.
    enough = max(peak_bytes(lighter, scenario).values())
    check_plan(lighter, with_memory(scenario, enough + 1))
    with pytest.raises(InputError, match="need"):
        check_plan(lighter, with_memory(scenario, enough - 2))


def test_a_split_backward_holds_what_it_recomputed_until_its_weight_gradient() -> None:
    # The second of two layers, with 3 bytes of input and 8 of activations; F 1 s, I 2 s with the forward in it, W 1 s.
    scenario = mesh_scenario(
        2,
        [1.0, 1.0],
        [2.0, 2.0],
        output_bytes=[3, 0],
        parameter_bytes=[0, 0],
        activation_bytes=8,
        link=lambda a, b: (24.0, 0.0),
        global_batch=1,
    )
    plan = recomputing(layered_plan(scenario, [([(1, 1, 2), (2, 1, 1)], [1])], schedule="zb-h1"), [False, True])
    line = memory_timelines(Simulator().run(scenario, plan, None, 1))["device-1"]
    assert list(zip(line.times_s.tolist(), line.held_bytes.tolist(), strict=True)) == [
        (0, 0),
        (2, 3),
        (3, 3),
        (3, 8),
        (5, 8),
        (5, 8),
        (6, 0),
    ]


@settings(max_examples=60)
@given(
    memory_bytes=st.integers(8000, 40_000),
    samples=st.integers(1, 4),
    input_bytes=st.integers(1, 800),
    share=st.sampled_from([0.0, 0.5]),
)
def test_fitting_depths_use_what_recomputation_leaves(
    memory_bytes: int, samples: int, input_bytes: int, share: float
) -> None:
    scenario = mesh_scenario(
        2, [1.0] * 2, [1.0] * 2, output_bytes=[input_bytes, 0], memory_bytes=memory_bytes, global_batch=50 * samples
    )
    scenario = replace(scenario, effects=Effects(memory=MemoryEffects(0, share)))
    plan = recomputing(layered_plan(scenario, [([(1, 1, 50), (2, 1, 50)], [samples] * 50)]), [True, True])
    (pipeline,) = plan.pipelines
    fitted = fitting_depths((50, 50), pipeline.stages, scenario, pipeline.microbatches)
    if fitted is None:
        with pytest.raises(InputError, match="need"):
            check_plan(plan.with_microbatches(0, pipeline.microbatches, (1, 1)), scenario)
        return
    check_plan(plan.with_microbatches(0, pipeline.microbatches, fitted), scenario)
    if fitted[1] < 50:
        with pytest.raises(InputError, match="need"):
            check_plan(plan.with_microbatches(0, pipeline.microbatches, (fitted[0], fitted[1] + 1)), scenario)


@settings(max_examples=30)
@given(
    schedule=st.sampled_from(["compact-zb", "zb-h1", "zb-h2", "zb-v", "interleaved-1f1b", "portfolio"]),
    room=st.integers(0, 5),
    input_bytes=st.sampled_from([0, 100, 250, 1000]),
)
def test_schedules_that_heed_memory_heed_what_is_recomputed(schedule: str, room: int, input_bytes: int) -> None:
    # Every stage has one layer of 1000 bytes of activations; room for so many inputs beside one backward on each.
    scenario = mesh_scenario(
        2,
        [1.0, 1.5, 1.0, 2.0],
        [2.0, 3.0, 2.0, 3.0],
        output_bytes=[input_bytes] * 4,
        parameter_bytes=[0] * 4,
        link=lambda a, b: (1e6, 3.0),
        memory_bytes=2000 + room * 500,
        global_batch=6,
    )
    plan = recomputing(layered_plan(scenario, [([(2, 1, 1), (4, 1, 1)], [1] * 6)]), [True, True])
    made = with_schedule(plan, scenario, schedule)
    assert all(stage.recompute for stage in made.pipelines[0].stages)
    check_plan(made, scenario)
    record = Simulator().run(scenario, made, None, 2)
    assert max(peak_memory_bytes(record).values()) <= 2000 + room * 500


def test_recomputation_makes_room_for_the_depth_that_hides_a_slow_link() -> None:
    # Room for two microbatches of activations; a round trip of 20 s against 3 s of compute a microbatch and stage.
    scenario = mesh_scenario(
        2,
        [1.0, 1.0],
        [2.0, 2.0],
        output_bytes=[100, 0],
        parameter_bytes=[0, 0],
        link=lambda a, b: (1e9, 10.0),
        memory_bytes=2000,
        global_batch=12,
    )
    plan = layered_plan(scenario, [([(1, 1, 1), (2, 1, 1)], [1] * 12)])
    kept, again = (with_schedule(recomputing(plan, [each, False]), scenario, "compact-zb") for each in (False, True))
    assert (kept.pipelines[0].stages[0].in_flight, again.pipelines[0].stages[0].in_flight) == (2, 7)
    assert step_time_s(again, scenario) < 0.5 * step_time_s(kept, scenario)


def test_what_crosses_links_is_not_recomputed_away() -> None:
    scenario = chain_scenario([1.0, 1.0], [1.0, 1.0])
    plan = chain_plan(scenario)
    messages = [
        compile_step(each, scenario).messages.size_bytes.tolist() for each in (plan, recomputing(plan, [True] * 2))
    ]
    assert messages[0] == messages[1]
