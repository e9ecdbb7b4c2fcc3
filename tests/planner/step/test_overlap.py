"""Sums of gradients that overlap with backward."""

from dataclasses import replace

import pytest
from hypothesis import given, settings

from executor.core.step_program import Completed, compile_plan
from planner.cost.synchronisation import gradient_syncs
from planner.events.event import EventKind
from planner.plan.plan import Plan, Synchronisation
from planner.scenario.scenario import Scenario
from planner.step.evaluate import step_time_s
from planner.step.memory import peak_bytes
from planner.step.orders import with_schedule
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import layered_plan, makespan_s, mesh_scenario
from tests.helpers.strategies.run_strategies import replicated

MB = 10**6
# On a link of a gigabit per second a device sends half of a layer's bytes twice: so many seconds for ten megabytes.
SECONDS = 0.08


def overlapping(plan: Plan, bucket_bytes: int) -> Plan:
    return replace(plan, synchronisation=replace(plan.synchronisation, bucket_bytes=bucket_bytes))


def two_devices(backward_s: list[float], megabytes: list[int]) -> tuple[Scenario, Plan]:
    """Two pipelines of one device each."""
    scenario = mesh_scenario(
        2, [1.0] * len(megabytes), backward_s, parameter_bytes=[each * MB for each in megabytes], global_batch=4
    )
    return scenario, layered_plan(scenario, [([(len(megabytes), 1, 2)], [1, 1])] * 2)


@pytest.mark.parametrize(
    ("bucket_mb", "expected"),
    [(1, [(3, 4), (2, 3), (1, 2), (0, 1)]), (40, [(3, 4), (2, 3), (0, 2)]), (80, [(2, 4), (0, 2)]), (999, [(0, 4)])],
)
def test_buckets_are_whole_layers_from_the_last_one_on(bucket_mb: int, expected: list[tuple[int, int]]) -> None:
    scenario, plan = two_devices([1.0] * 4, [20, 30, 50, 40])
    syncs = gradient_syncs(overlapping(plan, bucket_mb * MB), scenario)
    assert [(sync.first_layer, sync.end_layer) for sync in syncs] == expected


def test_a_layer_without_parameters_is_no_sum() -> None:
    scenario, plan = two_devices([1.0] * 3, [10, 0, 10])
    syncs = gradient_syncs(overlapping(plan, 1), scenario)
    assert [(sync.first_layer, sync.elements) for sync in syncs] == [(2, 2_500_000), (0, 2_500_000)]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_sum_begins_when_backward_has_come_down_to_its_layers(schedule: str) -> None:
    scenario, plan = two_devices([2.0, 4.0, 6.0], [20, 30, 50])
    made = overlapping(with_schedule(plan, scenario, schedule), MB)
    *others, last = compile_plan(made, scenario)["device-0"].work
    # Half of each backward is the weight gradient.
    lasts_s = 12.0 if schedule == "1f1b" else 6.0
    assert last.completes == (
        Completed(0, lasts_s * 6 / 12),
        Completed(1, lasts_s * 10 / 12),
        Completed(2, pytest.approx(lasts_s)),
    )
    assert not any(work.completes for work in others)
    record = Simulator().run(scenario, made, None, 1)
    starts_s = [event.start_s for event in record.events if event.kind is EventKind.SYNC and event.device == "device-0"]
    end_s = max(event.end_s for event in record.events if event.kind is EventKind.COMPUTE)
    assert starts_s == pytest.approx([end_s - lasts_s / 2, end_s - lasts_s / 6, end_s])
    # Only the last layer's sum is not hidden.
    assert makespan_s(record) == pytest.approx(end_s + 2 * SECONDS)


def test_what_is_recomputed_comes_before_all_of_backward() -> None:
    scenario, plan = two_devices([2.0, 4.0], [10, 10])
    stages = [tuple(replace(stage, recompute=True) for stage in pipeline.stages) for pipeline in plan.pipelines]
    pipelines = tuple(replace(one, stages=each) for one, each in zip(plan.pipelines, stages, strict=True))
    last = compile_plan(overlapping(replace(plan, pipelines=pipelines), 1), scenario)["device-0"].work[-1]
    assert [each.after_s for each in last.completes] == pytest.approx([2.0 + 4.0, 2.0 + 4.0 + 2.0])


def test_a_link_too_slow_to_hide_anything_carries_sums_one_after_the_other() -> None:
    scenario, plan = two_devices([0.01] * 3, [100, 100, 100])
    whole, parts = (makespan_s(Simulator().run(scenario, overlapping(plan, each), None, 1)) for each in (0, 1))
    # The first sum begins two layers earlier.
    assert parts == pytest.approx(whole - 0.02)


@settings(max_examples=60)
@given(replicated())
def test_the_evaluator_says_what_the_simulator_does(case: tuple[Scenario, Plan]) -> None:
    scenario, plan = case
    assert step_time_s(plan, scenario) == pytest.approx(makespan_s(Simulator().run(scenario, plan, None, 1)), rel=1e-9)


@settings(max_examples=60)
@given(replicated())
def test_overlap_changes_neither_memory_nor_compute_nor_what_is_summed(case: tuple[Scenario, Plan]) -> None:
    scenario, plan = case
    after = plan.without_overlap
    assert peak_bytes(plan, scenario) == peak_bytes(after, scenario)
    lengths_s: list[dict[tuple[str, str, int, int], float]] = []
    elements = []
    for each in (plan, after):
        events = Simulator().run(scenario, each, None, 1).events
        lengths_s.append(
            {
                (event.device, event.action, event.stage, event.microbatch): event.end_s - event.start_s
                for event in events
                if event.kind is EventKind.COMPUTE
            }
        )
        elements.append(sum(sync.elements * len(sync.devices) for sync in gradient_syncs(each, scenario)))
    # What is left are roundings of times since the start of the run.
    assert lengths_s[0] == pytest.approx(lengths_s[1], rel=1e-9, abs=1e-9)
    # Layers here may have parts of a number, which each sum leaves out.
    assert 0 <= elements[1] - elements[0] <= len(scenario.model.layers) * len(plan.devices)


def test_a_device_without_samples_begins_its_sums_at_once() -> None:
    scenario = mesh_scenario(2, [1.0], [1.0], parameter_bytes=[10 * MB], global_batch=1)
    plan = layered_plan(scenario, [([(1, 2, 1)], [1])], shares=[1.0, 0.001])
    made = overlapping(plan, 1)
    assert compile_plan(made, scenario)["device-1"].work == ()
    assert makespan_s(Simulator().run(scenario, made, None, 1)) == pytest.approx(2.0 + SECONDS)


def test_one_bucket_of_everything_is_no_overlap() -> None:
    scenario, plan = two_devices([1.0, 2.0], [30, 20])
    assert step_time_s(overlapping(plan, 10**12), scenario) == pytest.approx(step_time_s(plan, scenario))
    assert plan.synchronisation == Synchronisation()
