"""The search over few devices: the dynamic programme against all pipelines, and the moves between pipelines."""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.plan.plan import Plan
from planner.systems.auto.candidates.small_cluster import all_pipelines, count_pipelines
from planner.systems.auto.candidates.subset_dp import (
    SubsetPipelines,
    best_pipelines,
    bounds_grid,
    subset_costs,
    timed_pipelines,
)
from planner.systems.auto.local_search.device_moves import stage_moves
from tests.helpers.scenarios.builders import layered_plan, mesh_scenario
from tests.helpers.scenarios.unlike_scenarios import unlike_scenario


@given(st.integers(1, 4), st.integers(1, 6))
def test_every_pipeline_is_there_once(devices: int, layers: int) -> None:
    subset, first_layer = all_pipelines(devices, layers)
    stages = {tuple(row) for row in np.concatenate((subset, first_layer), axis=1).tolist()}
    assert len(stages) == len(subset) == count_pipelines(devices, layers)
    for subsets, firsts in zip(subset.tolist(), first_layer.tolist(), strict=True):
        used = [each for each in subsets if each]
        assert sum(used) == np.bitwise_or.reduce(used) < 1 << devices
        cuts = [*firsts[: len(used)], layers]
        assert cuts[0] == 0
        assert all(one < other for one, other in pairwise(cuts))


def test_pipelines_of_one_and_two_devices_by_hand() -> None:
    # Either device, both as replicas, and with a cut two orders.
    assert [count_pipelines(1, 5), count_pipelines(2, 1), count_pipelines(2, 3)] == [1, 3, 3 + 2 * 2]


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 6))
def test_the_dynamic_programme_finds_the_best_of_all_pipelines(seed: int, microbatch: int) -> None:
    scenario = unlike_scenario(seed, (1, 3), (1, 5), 12)
    devices, layers = scenario.cluster.devices, len(scenario.model.layers)
    costs, count = subset_costs(devices, scenario, microbatch), -(-scenario.training.global_batch // microbatch)
    bounds_s = bounds_grid(costs)
    best = best_pipelines(costs, count, bounds_s)
    every = timed_pipelines(costs, count, *all_pipelines(len(devices), layers))
    for bound_s in bounds_s:
        for used in range(1, 1 << len(devices)):

            def least_s(pipelines: SubsetPipelines, limit_s: float, used: int = used) -> float:
                allowed = (pipelines.used == used) & (pipelines.bound_s <= limit_s)
                return float(pipelines.round_trip_s[allowed].min(initial=np.inf))

            # Bounds that differ by a rounding are equal.
            sooner_s, later_s = bound_s * (1 - 1e-9), bound_s * (1 + 1e-9)
            found_s = least_s(best, later_s)
            assert least_s(every, later_s) * (1 - 1e-12) <= found_s <= least_s(every, sooner_s) * (1 + 1e-12)


def places(plan: Plan) -> set[tuple[tuple[int, int, tuple[str, ...]], ...]]:
    return {
        tuple((s.first_layer, s.end_layer, tuple(r.device for r in s.replicas)) for s in p.stages)
        for p in plan.pipelines
    }


def test_stages_are_split_and_merged_and_idle_devices_join() -> None:
    scenario = mesh_scenario(3, [0.01] * 2, [0.02] * 2, global_batch=4)
    one = layered_plan(scenario, [([(2, 2, 1)], (4,))])
    found = set().union(*(places(each) for each in stage_moves(one, scenario.cluster.devices)))
    first, second, third = (device.name for device in scenario.cluster.devices)
    assert found == {
        ((0, 1, (first,)), (1, 2, (second,))),
        ((0, 1, (second,)), (1, 2, (first,))),
        ((0, 1, (third,)), (1, 2, (first, second))),
        ((0, 1, (first, second)), (1, 2, (third,))),
        ((0, 2, (first, second, third)),),
        ((0, 2, (second, third)),),
    }
    split = layered_plan(scenario, [([(1, 1, 1), (2, 1, 1)], (2, 2))])
    merged = [each for each in stage_moves(split, scenario.cluster.devices) if len(each.pipelines[0].stages) == 1]
    assert {each.pipelines[0].microbatches for each in merged} == {(2, 2), (4,), (1, 1, 1, 1)}
    assert all(places(each) == {((0, 2, (first, second)),)} for each in merged)
