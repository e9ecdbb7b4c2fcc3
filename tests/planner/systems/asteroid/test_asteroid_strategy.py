from dataclasses import replace

import pytest
from hypothesis import given, settings

from planner.check import check_plan
from planner.cost.in_flight import fitting_depths
from planner.plan.plan import Replica, Stage
from planner.scenario.cluster import Cluster
from planner.scenario.scenario import Scenario
from planner.step.evaluate import step_time_s
from planner.systems.asteroid.round_latency import round_latency_s, round_steps
from planner.systems.registry import make_plan
from tests.helpers.scenarios.builders import GIB, chain_scenario, mesh_scenario
from tests.helpers.scenarios.hybrid_scenarios import roomy, unlike_scenarios
from traces.common.errors import InputError


@settings(max_examples=100)
@given(unlike_scenarios())
def test_plans_fit_or_nothing_does(scenario: Scenario) -> None:
    try:
        plan = make_plan("asteroid", scenario)
    except InputError:
        # No device holds the model by itself even one sample at a time, or others, which do not, must be used too.
        if len(scenario.cluster.devices) == 1:
            alone = Stage(0, len(scenario.model.layers), (Replica("device-0"),), 1)
            assert fitting_depths((1,), (alone,), scenario, (1,)) is None
        return
    check_plan(plan, scenario)
    (pipeline,) = plan.pipelines
    # Shares are samples: they add up to a microbatch.
    for stage in pipeline.stages:
        assert sum(replica.share for replica in stage.replicas) == max(pipeline.microbatches)


@settings(max_examples=60)
@given(unlike_scenarios())
def test_the_round_of_the_plan_is_no_longer_than_that_of_the_other_form(scenario: Scenario) -> None:
    scenario = roomy(scenario)
    rounds_s = {}
    for name in ("asteroid", "asteroid-duplex"):
        (pipeline,) = make_plan(name, scenario).pipelines
        steps, count = round_steps(pipeline, scenario), len(pipeline.microbatches)
        rounds_s[name] = [round_latency_s(steps, count, duplex) for duplex in (False, True)]
    assert rounds_s["asteroid"][0] <= rounds_s["asteroid-duplex"][0] + 1e-9
    assert rounds_s["asteroid-duplex"][1] <= rounds_s["asteroid"][1] + 1e-9


def test_depths_are_twice_the_stages_to_come_less_one() -> None:
    plan = make_plan("asteroid", mesh_scenario(3, [1.0] * 3, [2.0] * 3, global_batch=32, microbatch=1))
    assert [(stage.end_layer, stage.in_flight) for stage in plan.pipelines[0].stages] == [(1, 5), (2, 3), (3, 1)]


def test_the_largest_memory_comes_first() -> None:
    scenario = mesh_scenario(2, [1.0, 1.0], [2.0, 2.0], parameter_bytes=[100_000, 100_000], global_batch=16)
    first, second = scenario.cluster.devices
    devices = (replace(first, memory_bytes=GIB // 2), second)
    plan = make_plan("asteroid", replace(scenario, cluster=Cluster(devices, scenario.cluster.links)))
    assert plan.devices[0] == "device-1"


def test_smaller_microbatches_where_none_of_the_size_fits() -> None:
    # 8,000 bytes of states, 1,000 for each sample: 8 of a microbatch do not fit, 4 do.
    scenario = mesh_scenario(1, [1.0], [1.0], global_batch=16, microbatch=8, memory_bytes=14_500)
    assert make_plan("asteroid", scenario).pipelines[0].microbatches == (4,) * 4


def test_no_split_is_a_refusal_that_says_what_lacks() -> None:
    scenario = chain_scenario([1.0, 1.0], [1.0, 1.0], memory_bytes=5_000)
    for name in ("asteroid", "asteroid-duplex", "dapple", "gpipe", "hetpipe"):
        with pytest.raises(InputError, match="no split fits into memory"):
            make_plan(name, scenario)


def test_the_closed_form_is_near_the_evaluator_where_computing_dominates() -> None:
    scenario = mesh_scenario(4, [1.0, 2.0, 1.5, 1.0], [2.0, 4.0, 3.0, 2.0], global_batch=32, microbatch=2)
    plan = make_plan("asteroid", scenario)
    (pipeline,) = plan.pipelines
    predicted_s = round_latency_s(round_steps(pipeline, scenario), len(pipeline.microbatches))
    assert predicted_s == pytest.approx(step_time_s(plan, scenario), rel=0.1)


def test_the_correction_finds_a_faster_plan_where_transfers_dominate() -> None:
    # A thin link both ways: counted in turn it seems to cost more than doing without a second device.
    scenario = mesh_scenario(
        2,
        [1.0, 1.0],
        [1.0, 1.0],
        output_bytes=[2_100_000, 0],
        parameter_bytes=[10**7, 10**7],
        link=lambda a, b: (8e6, 0.0),
        global_batch=16,
        microbatch=1,
    )
    plain, corrected = (make_plan(name, scenario) for name in ("asteroid", "asteroid-duplex"))
    assert step_time_s(corrected, scenario) < step_time_s(plain, scenario)
