"""The search over device classes."""

from dataclasses import replace

import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from planner.check import check_plan
from planner.scenario.scenario import Scenario
from planner.step.shared_links.step_time import steady_step_time_s
from planner.systems.auto.candidates.build import plan_of
from planner.systems.auto.candidates.device_classes import device_classes_of, stage_options
from planner.systems.auto.candidates.mixed import _divided, find_mixes
from planner.systems.auto.candidates.option_costs import lower_bounds_s
from planner.systems.auto.candidates.templates import retimed
from planner.systems.auto.candidates.uniform import find_templates
from planner.systems.registry import STRATEGIES, make_plan
from tests.helpers.scenarios.pool_scenarios import pool_scenarios
from traces.common.errors import InputError

# Shrinking would plan hundreds of times, for minutes.
GENERATE = [Phase.explicit, Phase.reuse, Phase.generate]


@settings(max_examples=40)
@given(pool_scenarios())
def test_device_classes_hold_every_device_once_and_groups_stay_within_hosts(scenario: Scenario) -> None:
    device_classes = device_classes_of(scenario.cluster)
    devices = [device for device_class in device_classes for host in device_class.hosts for device in host]
    assert sorted(devices) == sorted(scenario.cluster.by_name)
    for device_class in device_classes:
        for group in device_class.groups(2):
            assert len({scenario.cluster.by_name[device].machine for device in group}) == 1
        assert len(device_class.groups(2)) == device_class.group_count(2)
    left_out = frozenset(devices[:2])
    assert not left_out & {
        device
        for device_class in device_classes_of(scenario.cluster, left_out)
        for host in device_class.hosts
        for device in host
    }


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=12), st.integers(0, 20))
def test_many_parts_share_few_samples(speeds: list[float], more: int) -> None:
    samples = len(speeds) + more
    shares = _divided(samples, speeds)
    assert sum(shares) == samples
    assert min(shares) >= 1


@settings(max_examples=30, phases=GENERATE)
@given(pool_scenarios())
def test_mixes_take_every_sample_and_no_device_two_times(scenario: Scenario) -> None:
    for mix in find_mixes(device_classes_of(scenario.cluster), scenario):
        assert sum(template.samples for template in mix.templates) == scenario.training.global_batch
        plan = plan_of(mix.templates, scenario, "auto")
        if plan is None:
            continue
        devices = [
            device
            for pipeline in plan.pipelines
            for stage in pipeline.stages
            for replica in stage.replicas
            for device in replica.devices
        ]
        assert len(devices) == len(set(devices))
        assert plan.global_batch == scenario.training.global_batch


@settings(max_examples=30)
@given(pool_scenarios(), st.integers(1, 96))
def test_another_number_of_microbatches_is_taken_only_if_it_helps(scenario: Scenario, samples: int) -> None:
    for template in find_templates(device_classes_of(scenario.cluster), scenario, scenario.training.global_batch):
        best = retimed(template, scenario, samples)
        assert best.samples == samples
        # Taken from there the search begins at its own size, so that it cannot end with a longer step.
        assert retimed(best, scenario, samples).pipeline_s <= best.pipeline_s * (1 + 1e-9)


@settings(max_examples=40)
@given(pool_scenarios(), st.integers(1, 4), st.integers(1, 16))
def test_no_template_is_below_the_bounds(scenario: Scenario, pipelines: int, microbatch: int) -> None:
    device_classes = device_classes_of(scenario.cluster)
    options = stage_options(device_classes, scenario, pipelines, microbatch, recompute=False)
    assume(options)
    bottleneck_s, alone_s = lower_bounds_s(options, scenario, pipelines, microbatch)
    for template in find_templates(device_classes, scenario, scenario.training.global_batch):
        recomputes = template.stages[0].option.recompute
        if (template.pipelines, template.microbatch) == (pipelines, microbatch) and not recomputes:
            assert template.bottleneck_s >= bottleneck_s * (1 - 1e-9)
            assert template.round_trip_s >= alone_s * (1 - 1e-9)


@pytest.mark.slow
@settings(max_examples=3, phases=GENERATE)
@given(pool_scenarios(most=12))
def test_the_plan_is_possible_and_better_than_those_of_the_baselines(scenario: Scenario) -> None:
    try:
        plan = make_plan("auto", scenario)
    except InputError:
        # Tight memory: then the simplest plan does not fit either.
        with pytest.raises(InputError):
            make_plan("megatron", scenario)
        return
    own_s = steady_step_time_s(plan, scenario)
    for name in ("ddp", "lb-bsp", "megatron", "deepcee"):
        try:
            other = STRATEGIES[name](scenario)
            check_plan(other, scenario)
        except InputError:
            continue
        assert own_s <= steady_step_time_s(other, scenario) * 1.001, name


@settings(max_examples=3)
@given(pool_scenarios())
def test_a_kind_without_times_is_refused(scenario: Scenario) -> None:
    unknown = replace(scenario.cluster.devices[0], kind="unheard-of")
    cluster = replace(scenario.cluster, devices=(unknown, *scenario.cluster.devices[1:]))
    with pytest.raises(InputError, match="no times for layer"):
        make_plan("auto", replace(scenario, cluster=cluster))
