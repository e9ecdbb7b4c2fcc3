"""The pieces of the search: what alike pipelines share, what moves keep, how far the quick judge is off."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.check import check_plan
from planner.plan.plan import (
    Plan,
    equivalent_pipelines,
    replace_pipelines,
    representatives,
)
from planner.scenario.cluster import Cluster, Device, Link
from planner.scenario.profile import LayerProfile, ModelProfile, TimeTable
from planner.scenario.scenario import Scenario
from planner.scenario.training import Training
from planner.step.evaluate import step_time_s
from planner.step.orders import with_schedule
from planner.systems.auto.candidates.device_classes import device_classes_of
from planner.systems.auto.local_search.improve import improve, neighbours
from planner.systems.auto.objective import (
    MOST_EVALUATED,
    Objective,
    approximate_step_time_s,
    contended_step_time_s,
)
from planner.systems.auto.search import search
from tests.helpers.scenarios.builders import layered_plan, mesh_scenario

TWO = [(2, 1, 2), (4, 1, 1)]


def eight_devices(batch: int = 16, parameters: int = 4000) -> Scenario:
    return mesh_scenario(8, [0.01] * 4, [0.02] * 4, global_batch=batch, parameter_bytes=[parameters] * 4)


def side_by_side(scenario: Scenario, *microbatches: tuple[int, ...]) -> Plan:
    return layered_plan(scenario, [(TWO, sizes) for sizes in microbatches])


def test_pipelines_are_alike_with_equal_stages_microbatches_and_kinds() -> None:
    plan = side_by_side(eight_devices(), (2, 2), (2, 2), (4,), (2, 2))
    assert equivalent_pipelines(plan, eight_devices()) == [[0, 1, 3], [2]]


def test_one_of_each_group_stands_for_it_and_sums_nothing() -> None:
    plan = side_by_side(eight_devices(), (2, 2), (2, 2), (4,), (2, 2))
    first = representatives(plan, eight_devices())
    assert first.pipelines == (plan.pipelines[0], plan.pipelines[2])
    assert first.synchronisation.method == "asgd"


def test_a_change_of_a_group_leaves_the_others() -> None:
    plan = side_by_side(eight_devices(), (2, 2), (2, 2), (4,), (2, 2))
    changed = replace_pipelines(plan, [0, 2], [plan.pipelines[2], plan.pipelines[0]])
    assert changed.pipelines == tuple(plan.pipelines[at] for at in (2, 1, 0, 3))


@settings(max_examples=30)
@given(st.integers(1, 4), st.lists(st.integers(1, 4), min_size=2, max_size=2), st.booleans())
def test_moves_keep_layers_samples_and_devices(count: int, width: list[int], alike: bool) -> None:
    stages = [(2, width[0], 1), (4, width[1], 1)]
    pipelines = [(stages, (4,) * count), (TWO, (4,) * count if alike else (5, 3))]
    scenario = mesh_scenario(
        sum(width) + 2, [0.01] * 4, [0.02] * 4, global_batch=sum(sum(sizes) for _, sizes in pipelines)
    )
    plan = layered_plan(scenario, pipelines)
    found = list(neighbours(plan, scenario))
    assert found
    for other in found:
        check_plan(other, scenario)
        assert other.global_batch == plan.global_batch
        assert set(other.devices) <= set(plan.devices)
        assert other != plan


@settings(max_examples=10)
@given(st.lists(st.floats(1e-3, 1e-1), min_size=4, max_size=4), st.integers(1, 9), st.integers(1, 30))
def test_the_local_search_is_never_worse_and_asks_no_more_than_it_may(
    times_s: list[float], batch: int, evaluations: int
) -> None:
    scenario = mesh_scenario(4, times_s, times_s, global_batch=batch)
    plan, asked = layered_plan(scenario, [([(2, 2, 1), (4, 2, 1)], (batch,))]), []

    def judge(tried: Plan) -> float:
        asked.append(tried)
        return step_time_s(tried, scenario)

    best, score = improve(plan, scenario, judge, evaluations)
    assert score == step_time_s(best, scenario) <= step_time_s(plan, scenario)
    assert len(asked) <= max(1, evaluations)


@settings(max_examples=10)
@given(st.integers(1, 6), st.sampled_from([400, 4_000_000]))
def test_the_quick_judge_is_exact_with_few_devices(microbatches: int, parameters: int) -> None:
    scenario = eight_devices(parameters=parameters)
    plan = side_by_side(scenario, (2,) * microbatches, (3, 1))
    assert approximate_step_time_s(plan, scenario) == step_time_s(plan, scenario)


@pytest.mark.parametrize("parameters", [400, 400_000, 40_000_000])
@pytest.mark.parametrize("pipelines", [13, 16])
def test_the_quick_judge_is_close_with_many_alike_pipelines(pipelines: int, parameters: int) -> None:
    scenario = mesh_scenario(
        2 * pipelines,
        [0.01] * 4,
        [0.02] * 4,
        global_batch=4 * pipelines,
        parameter_bytes=[parameters] * 4,
        link=lambda a, b: (1e9, 1e-4),
    )
    plan = layered_plan(scenario, [(TWO, (1,) * 4)] * pipelines)
    assert len(plan.devices) > MOST_EVALUATED
    # Devices of the last stages begin their sums sooner than those of the first.
    assert approximate_step_time_s(plan, scenario) == pytest.approx(step_time_s(plan, scenario), rel=0.02)


def test_sums_of_pipelines_that_divide_the_layers_otherwise_wait_for_each_other() -> None:
    # Devices of the first stage sum layer 0, then layer 1 with those of the second stage, which sum layer 2 last.
    scenario = mesh_scenario(
        28, [1e-6] * 3, [1e-6] * 3, output_bytes=[1] * 3, global_batch=14, parameter_bytes=[10**8] * 3
    )
    alike = [([(1, 1, 1), (3, 1, 1)], (1,)), ([(2, 1, 1), (3, 1, 1)], (1,))]
    plan = layered_plan(scenario, [*alike[:1] * 8, *alike[1:] * 6])
    assert len(plan.devices) > MOST_EVALUATED
    assert approximate_step_time_s(plan, scenario) == pytest.approx(step_time_s(plan, scenario), rel=0.01)


def test_a_boundary_moves_in_all_pipelines_that_divide_the_layers_alike() -> None:
    scenario = mesh_scenario(6, [0.01] * 4, [0.02] * 4, global_batch=8)
    plan = layered_plan(scenario, [(TWO, (4,)), (TWO, (2, 2))])
    moved = [[each.stages[0].end_layer for each in other.pipelines] for other in neighbours(plan, scenario)]
    assert {(1, 1), (3, 3), (1, 2), (2, 3)} <= {tuple(each) for each in moved}


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 8))
def test_groups_of_a_pool_stay_within_hosts(sizes: list[int], degree: int) -> None:
    devices = tuple(
        Device(f"device-{host}-{index}", "kind", "region", 2**30, host=f"host-{host}")
        for host, size in enumerate(sizes)
        for index in range(size)
    )
    (device_class,) = device_classes_of(Cluster(devices, ()))
    groups = device_class.groups(degree)
    by_name = {device.name: device for device in devices}
    assert len(groups) == device_class.group_count(degree) == sum(size // degree for size in sizes)
    assert all(len(group) == degree and len({by_name[name].host for name in group}) == 1 for group in groups)
    assert len({name for group in groups for name in group}) == degree * len(groups)
    assert device_class.size == sum(sizes)


@pytest.mark.parametrize(("gain", "microbatches"), [(1.005, (4, 4)), (1.02, (8,))])
def test_extrapolated_times_must_gain_a_percent(gain: float, microbatches: tuple[int, ...]) -> None:
    # One and four samples were measured; by the line through both, eight at once are so much quicker than twice four.
    four_s = 0.04 * gain / (7 * gain - 6)
    measured = TimeTable((1, 4), *((0.01, four_s),) * 3)
    scenario = mesh_scenario(1, [0.01], [0.02], global_batch=8)
    layer = replace(scenario.model.layers[0], times={"kind": measured})
    scenario = replace(scenario, model=replace(scenario.model, layers=(layer,)))
    assert 2 * measured.at(4).total_s == pytest.approx(gain * measured.at(8).total_s)
    assert search(scenario, Objective()).pipelines[0].microbatches == microbatches


def test_plans_on_interchangeable_devices_do_not_take_the_places_of_others() -> None:
    # Many of the best candidates are the same plan on the other fast or slow device. The best plan has a pipeline of a
    # slow and a fast device, with more microbatches in flight than the search gives it at first.
    def times(seconds: float) -> TimeTable:
        return TimeTable((1,), (seconds,), (seconds,), (seconds,))

    kinds = {"fast": times(0.001), "slow": times(0.003)}
    model = ModelProfile("m", tuple(LayerProfile(f"layer-{at}", 1000, 100_000, 10, kinds) for at in range(5)))
    devices = tuple(Device(f"{kind}-{at}", kind, "lan", 10**12) for kind in kinds for at in range(2))
    cluster = Cluster(devices, (Link("lan", "lan", 1e9, 1e-3),))
    scenario = Scenario("twins", cluster, model, Training(5))
    assert contended_step_time_s(search(scenario, Objective()), scenario) <= 0.0387


def test_given_plans_lose_buckets_in_an_order_that_does_not_fit_them() -> None:
    scenario = eight_devices()
    plan = with_schedule(side_by_side(scenario, *[(2, 2)] * 4), scenario, "1f1b")
    given_plan = replace(plan, synchronisation=replace(plan.synchronisation, bucket_bytes=1000))
    check_plan(search(scenario, Objective(), seeds=[given_plan]), scenario)
