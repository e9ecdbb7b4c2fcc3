from dataclasses import replace

import pytest

from planner.check import check_plan
from planner.cost.synchronisation import GradientSync, all_reduce, gradient_syncs
from planner.plan.plan import Plan, Synchronisation
from planner.scenario.cluster import Cluster
from planner.scenario.scenario import Scenario
from tests.helpers.scenarios.builders import layered_plan, mesh_scenario
from traces.common.errors import InputError


def two_pipelines() -> tuple[Scenario, Plan]:
    """Pipeline 0: two replicas, then one device; pipeline 1: one device, then two replicas; a region for each."""
    scenario = mesh_scenario(6, [1.0] * 2, [1.0] * 2, parameter_bytes=[40, 80], global_batch=4, regions="aaabbb")
    return scenario, layered_plan(scenario, [([(1, 2, 2), (2, 1, 1)], [1, 1]), ([(1, 1, 2), (2, 2, 1)], [1, 1])])


def names(*numbers: int) -> tuple[str, ...]:
    return tuple(f"device-{number}" for number in numbers)


def test_all_pipelines_sum_together() -> None:
    scenario, plan = two_pipelines()
    plan = replace(plan, synchronisation=Synchronisation(algorithm="tree"))
    assert gradient_syncs(plan, scenario) == (
        GradientSync(0, 1, names(0, 1, 3), 10, "tree", ("a", "a", "b")),
        GradientSync(1, 2, names(2, 4, 5), 20, "tree", ("a", "b", "b")),
    )


@pytest.mark.parametrize("method", ["asgd", "asgd-ga", "ma"])
def test_without_waiting_each_pipeline_sums_by_itself(method: str) -> None:
    scenario, plan = two_pipelines()
    plan = replace(plan, synchronisation=Synchronisation(method, "hierarchical", interval_steps=4))
    assert gradient_syncs(plan, scenario) == (
        GradientSync(0, 1, names(0, 1), 10, "hierarchical", ("a", "a")),
        GradientSync(1, 2, names(4, 5), 20, "hierarchical", ("b", "b")),
    )


def test_the_exchanges_of_a_device_are_those_of_its_position() -> None:
    scenario, plan = two_pipelines()
    first, _ = gradient_syncs(plan, scenario)
    for position, device in enumerate(first.devices):
        assert first.exchanges(device) == all_reduce("ring", 10, ("a", "a", "b"), position)


@pytest.mark.parametrize(("algorithm", "needed"), [("ring", False), ("tree", True), ("hierarchical", True)])
def test_a_plan_needs_the_links_of_its_algorithm(algorithm: str, needed: bool) -> None:
    regions = ["a", "b", "a", "b"]
    scenario = mesh_scenario(4, [1.0], [1.0], global_batch=4, regions=regions)
    plan = replace(layered_plan(scenario, [([(1, 4, 1)], [4])]), synchronisation=Synchronisation(algorithm=algorithm))
    check_plan(plan, scenario)
    # The ring goes from one to the next; the others also inside the region.
    links = tuple(link for link in scenario.cluster.links if link.name != "device-0->device-2")
    broken = replace(scenario, cluster=Cluster(scenario.cluster.devices, links))
    if needed:
        with pytest.raises(InputError, match="device-0"):
            check_plan(plan, broken)
    else:
        check_plan(plan, broken)
