from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cost.layers import range_memory
from planner.cost.memory import most_in_flight, needed_bytes, state_bytes
from planner.plan.actions import parse_action
from planner.plan.plan import EXPLICIT, Pipeline, Replica, Stage
from planner.scenario.effects import MemoryEffects
from planner.scenario.profile import LayerProfile, ModelProfile, PassMemory, SplitMemory, TimeTable, Workspace
from planner.scenario.training import Optimizer
from planner.step.memory import peak_bytes
from tests.helpers.scenarios.builders import chain_plan, chain_scenario, layered_plan, mesh_scenario

NOTHING = MemoryEffects()


@given(st.integers(0, 2**40), st.integers(1, 64), st.integers(1, 8), st.booleans())
def test_what_a_plan_needs_is_linear_in_the_bytes_per_parameter(
    parameters: int, each: int, factor: int, recompute: bool
) -> None:
    base = chain_scenario([1.0], [1.0], parameter_bytes=4 * parameters, activation_bytes=7)
    stage = Stage(0, 1, (Replica("device-0"),), 1, recompute)

    def needed(bytes_per_parameter: int) -> int:
        training = replace(base.training, bytes_per_parameter=bytes_per_parameter)
        return needed_bytes(replace(base, training=training), stage, 3, 2)

    assert needed(factor * each) - needed(each) == (factor - 1) * each * parameters
    # Plain SGD holds the parameter and its gradient.
    assert needed(8) == needed_bytes(base, stage, 3, 2)


@pytest.mark.parametrize(
    ("framework", "precision", "expected"),
    [
        ("torch", "fp32", 16),
        ("torch", "bf16", 18),
        ("megatron-lm", "fp32", 16),
        ("megatron-lm", "bf16", 18),
        ("megatron-lm", "fp16", 20),
        ("deepspeed", "fp16", 16),
        ("sailor", "fp32", 24),
    ],
)
def test_frameworks_hold_what_their_sources_say(framework: str, precision: str, expected: int) -> None:
    base = chain_scenario([1.0], [1.0], parameter_bytes=400)
    training = replace(base.training, optimizer=Optimizer("adamw"), precision=precision, framework=framework)
    assert state_bytes(replace(base, training=training), 0, 1) == 100 * expected


def test_states_are_parameter_gradient_and_what_the_optimizer_keeps() -> None:
    scenario = chain_scenario([1.0], [1.0], parameter_bytes=100)
    adam = replace(scenario, training=replace(scenario.training, optimizer=Optimizer("adamw")))
    assert (state_bytes(scenario, 0, 1), state_bytes(adam, 0, 1)) == (200, 400)


def test_a_stage_keeps_the_activations_of_what_is_in_flight() -> None:
    scenario = chain_scenario([1.0], [1.0], parameter_bytes=100, activation_bytes=7)
    stage = chain_plan(scenario).pipelines[0].stages[0]
    assert needed_bytes(scenario, stage, samples=3, in_flight=2) == 200 + 2 * 3 * 7


def test_a_stage_needs_memory_for_its_largest_output() -> None:
    scenario = mesh_scenario(1, [1.0, 1.0], [1.0, 1.0], parameter_bytes=[100, 100], activation_bytes=7)
    large, small = scenario.model.layers
    layers = (replace(large, output_bytes=1000), replace(small, output_bytes=10))
    scenario = replace(scenario, model=replace(scenario.model, layers=layers))
    (stage,) = layered_plan(scenario, [([(2, 1, 1)], [3])]).pipelines[0].stages
    assert most_in_flight(scenario, stage, samples=3, memory_bytes=2999) == 0
    assert most_in_flight(scenario, stage, samples=3, memory_bytes=3000) == (3000 - 400) // (3 * 14)


def test_earlier_stages_keep_more_microbatches() -> None:
    scenario = chain_scenario([1.0, 1.0], [1.0, 1.0], parameter_bytes=100, activation_bytes=7)
    plan = chain_plan(scenario)
    assert peak_bytes(plan, scenario, NOTHING) == {"device-0": 200 + 14, "device-1": 200 + 7}


def test_no_more_are_in_flight_than_there_are() -> None:
    scenario = chain_scenario([1.0, 1.0], [1.0, 1.0], parameter_bytes=100, activation_bytes=7, global_batch=1)
    plan = chain_plan(scenario, depths=(4, 1))
    assert peak_bytes(plan, scenario, NOTHING)["device-0"] == 207


def test_gpipe_keeps_all_of_them() -> None:
    scenario = chain_scenario([1.0, 1.0], [1.0, 1.0], parameter_bytes=100, activation_bytes=7, global_batch=5)
    plan = chain_plan(scenario, schedule="gpipe")
    assert peak_bytes(plan, scenario, NOTHING)["device-1"] == 200 + 5 * 7


def test_a_framework_takes_its_part_once_and_a_workspace_for_the_largest_layer() -> None:
    scenario = mesh_scenario(1, [1.0, 1.0], [1.0, 1.0], parameter_bytes=[100, 100], activation_bytes=10, global_batch=4)
    plan = layered_plan(scenario, [([(2, 1, 1)], [4])])
    peak = peak_bytes(plan, scenario, MemoryEffects(framework_bytes=1000, workspace_share=1.5))
    assert peak == {"device-0": 1000 + 400 + 4 * 20 + 1.5 * 4 * 10}


def test_a_device_of_several_stages_works_on_one_layer_at_a_time() -> None:
    scenario = mesh_scenario(1, [1.0, 1.0], [1.0, 1.0], parameter_bytes=[100, 100], activation_bytes=10, global_batch=4)
    plan = layered_plan(scenario, [([(2, 1, 1)], [4])])
    (pipeline,) = plan.pipelines
    stage = pipeline.stages[0]
    halves = (replace(stage, end_layer=1), replace(stage, first_layer=1))
    order = tuple(parse_action(text) for text in ("0F0", "1F0", "1B0", "0B0"))
    split = replace(plan, schedule=EXPLICIT, pipelines=(replace(pipeline, stages=halves, orders=(order,)),))
    effects = MemoryEffects(framework_bytes=1000, workspace_share=1.5)
    assert peak_bytes(split, scenario, effects) == peak_bytes(plan, scenario, effects)


def test_devices_that_share_layers_hold_their_shard() -> None:
    scenario = mesh_scenario(2, [1.0], [1.0], parameter_bytes=[100], activation_bytes=8, global_batch=1)
    times = {"kind": TimeTable((1,), (0.5,), (0.25,), (0.25,))}
    shard = ModelProfile("mesh", (LayerProfile("half", 50, 1000, 5, times),))
    scenario = replace(scenario, model=replace(scenario.model, sharded={2: shard}))
    plan = layered_plan(scenario, [([(1, 1, 1)], [1])])
    (pipeline,) = plan.pipelines
    group = replace(pipeline.stages[0], replicas=(Replica("device-0", partners=("device-1",)),))
    shared = replace(plan, pipelines=(replace(pipeline, stages=(group,)),))
    assert peak_bytes(plan, scenario, NOTHING) == {"device-0": 200 + 8}
    assert peak_bytes(shared, scenario, NOTHING) == {"device-0": 100 + 5}
    assert needed_bytes(scenario, group, samples=1, in_flight=1, degree=2) == 105


@pytest.mark.parametrize("share", [0.0, 2.25])
def test_the_largest_layer_makes_the_workspace(share: float) -> None:
    scenario = chain_scenario([1.0], [1.0], parameter_bytes=0, activation_bytes=10, global_batch=1)
    large = replace(scenario.model.layers[0], activation_bytes=40)
    scenario = replace(scenario, model=ModelProfile("chain", (*scenario.model.layers, large)))
    plan = chain_plan(scenario, bounds=(0, 2))
    assert peak_bytes(plan, scenario, MemoryEffects(0, share)) == {"device-0": 50 + share * 40}


LAYER_BYTES = st.tuples(*[st.integers(0, 50)] * 4)


@given(st.lists(LAYER_BYTES, min_size=1, max_size=6), st.integers(1, 5), st.integers(1, 3))
def test_the_peak_is_that_of_layers_that_free_their_activations_one_by_one(
    sizes: list[tuple[int, int, int, int]], samples: int, in_flight: int
) -> None:
    base = chain_scenario([1.0], [1.0], parameter_bytes=0)
    layers = tuple(
        replace(base.model.layers[0], activation_bytes=saved, memory=PassMemory(output, Workspace(fixed, sample)))
        for saved, output, fixed, sample in sizes
    )
    scenario = replace(base, model=ModelProfile("chain", layers))
    resident, saved_bytes = range_memory(scenario, samples)
    for first, end in combinations(range(len(layers) + 1), 2):
        stage, own = Stage(first, end, (Replica("device-0"),), in_flight), sizes[first:end]
        # All of the microbatches in flight, and then one layer of the last one after the other.
        microbatch = samples * (sum(each[0] for each in own) + own[-1][1])
        live = [in_flight * microbatch]
        for count in range(1, len(own) + 1):
            fixed, sample = own[count - 1][2:]
            kept = samples * sum(each[0] for each in own[:count])
            live.append((in_flight - 1) * microbatch + kept + fixed + samples * sample)
        assert needed_bytes(scenario, stage, samples, in_flight) == max(live)
        assert resident[first, end] + in_flight * saved_bytes[first, end] == max(live)


SPACES = st.builds(Workspace, st.integers(0, 50), st.integers(0, 20))
SPLITS = st.builds(SplitMemory, st.integers(0, 80), SPACES, SPACES, SPACES)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), SPLITS), min_size=1, max_size=5), st.integers(1, 5))
def test_the_peak_of_a_split_backward_is_that_of_layers_one_by_one(
    sizes: list[tuple[int, int, SplitMemory]], samples: int
) -> None:
    base = chain_scenario([1.0], [1.0], parameter_bytes=0, global_batch=2 * samples)
    layers = tuple(
        replace(base.model.layers[0], activation_bytes=saved, memory=PassMemory(output, split=split))
        for saved, output, split in sizes
    )
    scenario = replace(base, model=ModelProfile("chain", layers))
    order = tuple(parse_action(f"0{text}") for text in ("F0", "F1", "I0", "I1", "W0", "W1"))
    stage = Stage(0, len(layers), (Replica("device-0"),), 2)
    plan = chain_plan(scenario, bounds=(0, len(layers)))
    plan = replace(plan, schedule=EXPLICIT, pipelines=(Pipeline((stage,), (samples,) * 2, (order,)),))
    saved = [samples * each[0] for each in sizes]
    deferred = [samples * each[2].deferred_bytes for each in sizes]
    whole, stays = sum(saved) + samples * sizes[-1][1], sum(deferred)
    # Both forwards are over; then the other microbatch has all that its forward saved, and then what it has deferred.
    live = [2 * whole]
    for other in (whole, stays):
        for count, (_, _, split) in enumerate(sizes, 1):
            own = other + sum(saved[:count])
            live += [own + split.forward.at(samples), own + sum(deferred[count:]) + split.input.at(samples)]
        live.append(other + stays)
    live += [stays + sum(deferred[:count]) + each[2].weight.at(samples) for count, each in enumerate(sizes, 1)]
    assert peak_bytes(plan, scenario, NOTHING)["device-0"] == max(live)
