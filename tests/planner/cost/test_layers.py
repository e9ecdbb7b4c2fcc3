"""Sums over layers, and the launch overhead of a microbatch on a stage, wherever planners count them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.check import check_plan
from planner.cost.in_flight import plain_depths
from planner.cost.layers import launches_s, layer_table, mean_compute_s, range_memory
from planner.cost.memory import needed_bytes
from planner.plan.plan import Plan, Replica, Stage
from planner.scenario.cluster import Cluster
from planner.scenario.effects import ComputeEffects, Effects, MemoryEffects
from planner.scenario.profile import ModelProfile
from planner.scenario.scenario import Scenario
from planner.step.evaluate import step_time_s
from planner.systems.auto.candidates.build import plan_of
from planner.systems.auto.candidates.device_classes import device_classes_of
from planner.systems.auto.candidates.small_cluster import all_pipelines
from planner.systems.auto.candidates.subset_dp import subset_costs, timed_pipelines
from planner.systems.auto.candidates.uniform import find_templates
from planner.systems.deepcee.layer_split import split_problem
from tests.helpers.scenarios.builders import chain_plan, chain_scenario
from tests.helpers.scenarios.unlike_scenarios import unlike_scenario

LAUNCH_S = 0.5


def launched(scenario: Scenario) -> Scenario:
    """The scenario with a launch overhead that no search can miss."""
    return replace(scenario, effects=replace(scenario.effects, compute=ComputeEffects(launch_overhead_s=LAUNCH_S)))


@given(st.integers(0, 10**6), st.integers(1, 8), st.booleans())
def test_a_range_of_layers_costs_the_difference_of_two_entries(seed: int, samples: int, recompute: bool) -> None:
    scenario = unlike_scenario(seed, (1, 3), (1, 5), 12)
    model, kind = scenario.model, scenario.cluster.devices[0].kind
    table = layer_table(scenario, kind, samples, recompute=recompute)
    for start in range(len(model.layers)):
        for stop in range(start + 1, len(model.layers) + 1):
            times = model.times(start, stop, kind, samples)
            forward_s, backward_s = (column[stop] - column[start] for column in (table.forward_s, table.backward_s))
            assert (forward_s, backward_s) == pytest.approx((times.forward_s, times.backward_s))
            whole_s = times.total_s + times.forward_s * recompute
            assert table.compute_s[stop] - table.compute_s[start] == pytest.approx(whole_s)
            assert table.parameter_bytes[stop] - table.parameter_bytes[start] == model.parameter_bytes(start, stop)
            assert table.activation_bytes[stop] - table.activation_bytes[start] == model.activation_bytes(start, stop)


@given(st.integers(0, 10**6), st.integers(0, 8), st.integers(0, 3), st.booleans())
def test_the_memory_of_ranges_is_that_of_stages(seed: int, samples: int, depth: int, recompute: bool) -> None:
    scenario = with_workspace(unlike_scenario(seed, (1, 3), (1, 5), 12))
    layers = len(scenario.model.layers)
    resident, saved = range_memory(scenario, samples, recompute=recompute)
    for first in range(layers):
        for end in range(first + 1, layers + 1):
            needed = needed_bytes(scenario, Stage(first, end, (), 1, recompute), samples, depth)
            assert resident[first, end] + depth * saved[first, end] == needed


def with_workspace(scenario: Scenario) -> Scenario:
    """The scenario with memory that a framework takes."""
    return replace(scenario, effects=replace(scenario.effects, memory=MemoryEffects(1000, 2.3)))


def test_all_searches_count_the_workspace_of_a_stage_s_own_largest_layer_and_samples() -> None:
    # Layers of 1000 and 8 bytes of activations for a sample, and as large a workspace: the second stage is small.
    scenario = chain_scenario([1.0, 1.0], [2.0, 2.0], global_batch=4, parameter_bytes=0)
    small = replace(scenario.model.layers[1], activation_bytes=8, output_bytes=8)
    model = ModelProfile("model", (scenario.model.layers[0], small))
    first, second = scenario.cluster.devices
    devices = (replace(first, memory_bytes=8000), replace(second, memory_bytes=100))
    effects = Effects(memory=MemoryEffects(0, 1.0))
    scenario = replace(scenario, model=model, effects=effects, cluster=Cluster(devices, scenario.cluster.links))
    # What fits by the rule of the check: 4 * 1000 + 4 * 1000 on one device, 4 * 8 + 4 * 8 on the other.
    check_plan(chain_plan(scenario, microbatches=[4], depths=[1, 1]), scenario)
    pipelines = timed_pipelines(subset_costs(devices, scenario, 4), 1, *all_pipelines(2, 2))
    assert (pipelines.devices[:, :2] == [1, 2]).all(axis=1).any()
    templates = find_templates(device_classes_of(scenario.cluster), scenario, 4)
    assert max(len(template.stages) for template in templates) == 2
    assert split_problem(scenario, [(Replica(each.name),) for each in devices], (4,)).room[1, 1, 2] == 1


def test_the_mean_over_devices_counts_each_device() -> None:
    scenario = chain_scenario([1.0, 3.0], [2.0, 6.0])
    kinds = [device.kind for device in scenario.cluster.devices]
    each = [layer_table(scenario, kind, 1).compute_s for kind in kinds]
    assert mean_compute_s(scenario, 1) == pytest.approx(np.mean(each, axis=0))


def test_a_step_and_all_searches_count_two_launches_for_a_microbatch_on_a_stage() -> None:
    scenario = launched(chain_scenario([1.0, 1.0], [2.0, 2.0], global_batch=1))
    assert launches_s(scenario) == 2 * LAUNCH_S
    alone = chain_plan(scenario, microbatches=[1], depths=plain_depths(2))
    plain_s = step_time_s(alone, replace(scenario, effects=Effects()))
    step_s = step_time_s(alone, scenario)
    # One microbatch passes two stages.
    assert step_s == pytest.approx(plain_s + 2 * 2 * LAUNCH_S)
    devices = scenario.cluster.devices
    pipelines = timed_pipelines(subset_costs(devices, scenario, 1), 1, *all_pipelines(len(devices), 2))
    in_order = (pipelines.devices[:, :2] == [1, 2]).all(axis=1)
    assert pipelines.round_trip_s[in_order] == pytest.approx([step_s])
    problem = split_problem(scenario, [stage.replicas for stage in alone.pipelines[0].stages], (1,))
    assert problem.compute_s[0, 0, 1] == pytest.approx(1.0 + 2.0 + 2 * LAUNCH_S)


def test_templates_are_as_long_as_their_plans_with_launches() -> None:
    scenario = launched(chain_scenario([1.0, 1.0], [2.0, 2.0], global_batch=1))
    found = find_templates(device_classes_of(scenario.cluster), scenario, 1)
    assert found
    for template in found:
        plan = plan_of([template], scenario, "")
        assert isinstance(plan, Plan)
        assert template.pipeline_s == pytest.approx(step_time_s(plan, scenario))
