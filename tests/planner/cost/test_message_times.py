"""The jitter and the size curves of links count wherever planners predict how long a message takes."""

from dataclasses import replace

import pytest

from planner.adapt.migration import LayerTransfer, Migration, migration_time_s
from planner.cost.network import jitter_delay_s, nominal_path
from planner.cost.synchronisation import ring_s
from planner.plan.plan import Plan, Replica
from planner.scenario.cluster import Cluster
from planner.scenario.scenario import Scenario
from planner.scenario.size_curve import SizeCurve
from planner.step.evaluate import step_time_s
from planner.systems.auto.candidates.build import plan_of
from planner.systems.auto.candidates.device_classes import device_classes_of
from planner.systems.auto.candidates.small_cluster import all_pipelines
from planner.systems.auto.candidates.subset_dp import subset_costs, timed_pipelines
from planner.systems.auto.candidates.uniform import find_templates
from planner.systems.auto.forecasting.forecast import forecast_paths
from planner.systems.deepcee.depth_choice import DepthChoice
from planner.systems.deepcee.layer_split import split_problem
from planner.systems.deepcee.observed_paths import ObservedPaths
from tests.helpers.scenarios.builders import chain_plan, chain_scenario, mesh_scenario

JITTER_S = 0.5


def with_links(scenario: Scenario, **changed: object) -> Scenario:
    """The scenario with something changed of every link."""
    links = tuple(replace(link, **changed) for link in scenario.cluster.links)  # type: ignore[arg-type]
    return replace(scenario, cluster=Cluster(scenario.cluster.devices, links))


@pytest.fixture
def jittery() -> Scenario:
    """Two devices with little memory, so that only two stages fit, and a link of 8 Mbit/s between them."""
    memory = {"parameter_bytes": 40_000, "memory_bytes": 200_000}
    scenario = chain_scenario(
        [1.0, 1.0], [2.0, 2.0], output_bytes=[100_000, 1], bandwidth_bps=8e6, latency_s=0.1, global_batch=1, **memory
    )
    return with_links(scenario, jitter_s=JITTER_S)


def test_searches_add_the_jitter_that_the_evaluator_adds(jittery: Scenario) -> None:
    plan = chain_plan(jittery, microbatches=[1], depths=[1, 1])
    step_s = step_time_s(plan, jittery)
    delay_s = jitter_delay_s(JITTER_S, 100_000)
    assert step_s == pytest.approx(6.0 + 2 * (0.1 + 0.1 + delay_s))
    pipelines = timed_pipelines(subset_costs(jittery.cluster.devices, jittery, 1), 1, *all_pipelines(2, 2))
    in_order = (pipelines.devices[:, :2] == [1, 2]).all(axis=1)
    assert pipelines.round_trip_s[in_order] == pytest.approx([step_s])
    problem = split_problem(jittery, [stage.replicas for stage in plan.pipelines[0].stages], (1,))
    assert problem.latency_s.tolist() == pytest.approx([0.1 + delay_s])


def test_templates_add_the_jitter_that_the_evaluator_adds(jittery: Scenario) -> None:
    for template in find_templates(device_classes_of(jittery.cluster), jittery, 1):
        plan = plan_of([template], jittery, "")
        assert isinstance(plan, Plan)
        assert template.pipeline_s == pytest.approx(step_time_s(plan, jittery))


def test_rings_and_migrations_wait_for_jitter() -> None:
    scenario = with_links(mesh_scenario(3, [1.0], [2.0], link=lambda a, b: (8e6, 0.1)), jitter_s=JITTER_S)
    names = [device.name for device in scenario.cluster.devices]
    paths = [nominal_path(scenario, *pair) for pair in zip(names, [*names[1:], names[0]], strict=True)]
    part_s = 0.3 + 0.1 + jitter_delay_s(JITTER_S, 300_000)
    assert ring_s(paths, 900_000, 3) == pytest.approx(4 * part_s)
    move = LayerTransfer(names[0], names[1], 0, 1, 300_000)
    assert migration_time_s(Migration((move,)), scenario) == pytest.approx(part_s)


def test_a_forecast_of_links_that_nobody_saw_has_their_jitter(jittery: Scenario) -> None:
    plan = chain_plan(jittery, microbatches=[1], depths=[1, 1])
    source, target = (device.name for device in jittery.cluster.devices)
    assert forecast_paths(plan, jittery, {})(source, target).jitter_s == JITTER_S


CURVE = SizeCurve(0.0, 1e-4, 5e-4, 8e6)


def test_deepcee_takes_a_curve_s_time_for_transfers_and_sums() -> None:
    slow = with_links(mesh_scenario(2, [1.0] * 2, [2.0] * 2, output_bytes=[100_000] * 2), size_curve=CURVE)
    first, second = slow.cluster.devices
    path = nominal_path(slow, first.name, second.name)
    assert path.transmission_s(100_000) > 2 * 8 * 100_000 / path.rate_bps
    apart = split_problem(slow, [(Replica(first.name),), (Replica(second.name),)], (1,))
    assert apart.transfer_s[0, 1] == pytest.approx(path.transmission_s(100_000))
    together = split_problem(slow, [(Replica(first.name), Replica(second.name))], (2,))
    size_bytes = slow.model.parameter_bytes(0, 2)
    assert together.sync_s[0, 0, 2] == pytest.approx(ring_s([path], size_bytes, 2))


def test_depths_hide_what_a_curve_makes_of_transfers() -> None:
    slow = with_links(
        mesh_scenario(2, [1e-3] * 2, [2e-3] * 2, output_bytes=[100_000] * 2, global_batch=8), size_curve=CURVE
    )
    plan = chain_plan(slow, microbatches=[1] * 8, depths=[2, 1])
    path = nominal_path(slow, *plan.devices)
    choice = DepthChoice(slow, ObservedPaths(slow))
    # At its bandwidth alone the link takes 0.8 ms, less than a stage's 3 ms; by its curve it takes far more.
    assert 8 * 100_000 / path.rate_bps < 3e-3 < path.transmission_s(100_000)
    assert choice.is_bound_by_links(plan)
