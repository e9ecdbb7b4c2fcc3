from itertools import pairwise

import pytest
from hypothesis import given, settings

from planner.check import check_plan
from planner.scenario.scenario import Scenario
from planner.systems.asteroid.stage_costs import levelled
from planner.systems.registry import make_plan
from tests.helpers.scenarios.builders import mesh_scenario
from tests.helpers.scenarios.hybrid_scenarios import roomy, unlike_scenarios


@settings(max_examples=60)
@given(unlike_scenarios())
def test_the_mean_planner_sees_equal_devices(scenario: Scenario) -> None:
    kinds = [device.kind for device in scenario.cluster.devices]
    mean = levelled(scenario)
    for samples in (1, 2, 3, 7):
        for index in range(len(scenario.model.layers)):
            expected_s = sum(scenario.model.times(index, index + 1, kind, samples).total_s for kind in kinds)
            for kind in kinds:
                seen_s = mean.model.times(index, index + 1, kind, samples).total_s
                assert seen_s == pytest.approx(expected_s / len(kinds))


@settings(max_examples=60)
@given(unlike_scenarios())
def test_dapple_shares_out_evenly(scenario: Scenario) -> None:
    (pipeline,) = make_plan("dapple", roomy(scenario)).pipelines
    for stage in pipeline.stages:
        shares = [replica.share for replica in stage.replicas]
        assert max(shares) - min(shares) <= 1
    depths = [stage.in_flight for stage in pipeline.stages]
    count = len(pipeline.microbatches)
    assert depths == [min(len(depths) - index, count) for index in range(len(depths))]


def test_gpipe_is_uniform_and_recomputes_where_memory_is_short() -> None:
    # 16 microbatches of one sample of 2 layers keep 32,000 bytes; of inputs only, 16,000.
    for memory_bytes, recompute in ((2**30, False), (60_000, False), (45_000, True)):
        scenario = mesh_scenario(2, [1.0] * 4, [1.0] * 4, global_batch=16, microbatch=1, memory_bytes=memory_bytes)
        plan = make_plan("gpipe", scenario)
        assert plan.schedule == "gpipe"
        (pipeline,) = plan.pipelines
        assert [(stage.first_layer, stage.end_layer) for stage in pipeline.stages] == [(0, 2), (2, 4)]
        assert [stage.recompute for stage in pipeline.stages] == [recompute] * 2


def test_gpipe_leaves_out_devices_that_no_layer_is_left_for() -> None:
    (pipeline,) = make_plan("gpipe", mesh_scenario(4, [1.0] * 2, [1.0] * 2)).pipelines
    assert [stage.replicas[0].device for stage in pipeline.stages] == ["device-0", "device-1"]


@settings(max_examples=60)
@given(unlike_scenarios())
def test_hetpipes_workers_share_the_batch_and_no_device(scenario: Scenario) -> None:
    scenario = roomy(scenario)
    plan = make_plan("hetpipe", scenario)
    check_plan(plan, scenario)
    samples = [pipeline.samples for pipeline in plan.pipelines]
    assert max(samples) - min(samples) <= 1
    assert all(len(stage.replicas) == 1 for pipeline in plan.pipelines for stage in pipeline.stages)
    assert len(set(plan.devices)) == sum(len(pipeline.stages) for pipeline in plan.pipelines)
    assert all(a.in_flight >= b.in_flight for pipeline in plan.pipelines for a, b in pairwise(pipeline.stages))
