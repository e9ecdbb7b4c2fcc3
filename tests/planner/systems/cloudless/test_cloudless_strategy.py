from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.plan.microbatches import proportional_parts
from planner.plan.plan import Plan
from planner.runs.metrics import measure
from planner.scenario.scenario import Scenario
from planner.systems.cloudless.strategy import EXCHANGE_STEPS, longest_exchange_s, with_exchanges
from planner.systems.registry import make_plan
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import mesh_scenario
from traces.common.errors import InputError

# Of a link between regions; inside them links are a thousand times as fast.
WAN_BPS = 1e6


def regional_scenario(
    widths: list[int], data: list[int] | None = None, *, batch: int = 96, memory_bytes: int = 2**30, **changes: float
) -> Scenario:
    """Regions of so many equal devices, a dollar an hour each; a sample takes 0.03 s."""
    regions = [f"region-{index}" for index, width in enumerate(widths) for _ in range(width)]
    wan_bps = changes.get("wan_bps", WAN_BPS)
    scenario = mesh_scenario(
        len(regions),
        [0.01],
        [0.02],
        link=lambda a, b: (1e9, 1e-5) if regions[a] == regions[b] else (wan_bps, 0.01),
        regions=regions,
        global_batch=batch,
        memory_bytes=memory_bytes,
        parameter_bytes=[40_000],
    )
    devices = tuple(replace(device, price_per_hour=1.0) for device in scenario.cluster.devices)
    placed = {f"region-{index}": samples for index, samples in enumerate(data)} if data else {}
    return replace(scenario, cluster=replace(scenario.cluster, devices=devices), data=placed)


def rented(plan: Plan) -> list[int]:
    return [len(pipeline.stages[0].replicas) for pipeline in plan.pipelines]


def test_a_region_with_half_of_the_data_rents_half_of_the_devices() -> None:
    scenario = regional_scenario([4, 4], [2000, 1000])
    elastic, greedy = make_plan("cloudless", scenario), make_plan("greedy", scenario)
    assert [pipeline.samples for pipeline in elastic.pipelines] == [64, 32]
    assert (rented(elastic), rented(greedy)) == ([4, 2], [4, 4])
    assert elastic.synchronisation == greedy.synchronisation


@settings(max_examples=25)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=3), st.data())
def test_what_is_saved_in_the_simulator_is_what_the_formula_says(widths: list[int], data: st.DataObject) -> None:
    """Sums inside regions are short here, and samples many: what is left is the compute."""
    stored = [data.draw(st.sampled_from([100, 200, 300])) for _ in widths]
    scenario = regional_scenario(widths, stored, batch=1200, wan_bps=1e9)
    runs = {name: measure(Simulator().run(scenario, make_plan(name, scenario), None, 6)) for name in RENTING}
    slowest = max(own / width for own, width in zip(stored, widths, strict=True))
    needed = [ceil(own / slowest - 1e-9) for own in stored]
    expected = 1 - sum(needed) / sum(widths)
    assert 1 - runs["cloudless"].cost_usd / runs["greedy"].cost_usd == pytest.approx(expected, abs=0.02)
    assert runs["cloudless"].step_s == pytest.approx(runs["greedy"].step_s, rel=0.02)


RENTING = ("cloudless", "greedy")


def test_without_a_placement_everybody_works_as_fast_as_it_can() -> None:
    plan = make_plan("cloudless", regional_scenario([1, 3]))
    assert (rented(plan), [pipeline.samples for pipeline in plan.pipelines]) == ([1, 3], [24, 72])


def test_regions_without_data_and_those_for_whom_no_sample_is_left_stay_out() -> None:
    stored = replace(regional_scenario([1, 1, 1]), data={"region-0": 10, "region-2": 20})
    assert make_plan("cloudless", stored).devices == ("device-0", "device-2")
    few = regional_scenario([1, 1, 1], [10, 30, 20], batch=2)
    assert make_plan("cloudless", few).devices == ("device-1", "device-2")


def test_a_single_region_sums_its_gradients() -> None:
    plan = make_plan("cloudless", regional_scenario([3]))
    assert (rented(plan), plan.synchronisation.method) == ([3], "allreduce")


@pytest.mark.parametrize(("wan_bps", "every"), [(1e9, 1), (4e5, 2), (1.5e5, 4), (1e4, EXCHANGE_STEPS[-1])])
def test_exchanges_are_as_frequent_as_the_wan_keeps_up_with(wan_bps: float, every: int) -> None:
    # A step takes 96 / 2 * 0.03 s = 1.44 s / 2 devices; an update is 320,000 bits.
    scenario = regional_scenario([2, 2], [1, 1], wan_bps=wan_bps)
    plan = make_plan("cloudless", scenario)
    assert (plan.synchronisation.method, plan.synchronisation.interval_steps) == ("asgd-ga", every)
    assert plan.synchronisation.staleness_bound == every
    exchange_s = longest_exchange_s(plan, scenario)
    assert exchange_s == pytest.approx(320_000 / wan_bps + 0.01, rel=0.06)
    assert exchange_s <= 0.72 * every or every == EXCHANGE_STEPS[-1]
    assert every == 1 or exchange_s > 0.72 * every / 2


def test_the_fewest_microbatches_that_fit() -> None:
    # 80,000 bytes of states and 1,000 for each sample; 48 samples in a region of two.
    plan = make_plan("cloudless", regional_scenario([2, 2], [1, 1], memory_bytes=89_000))
    assert plan.pipelines[0].microbatches == (16, 16, 16)


def test_devices_that_do_not_hold_the_model_are_no_units() -> None:
    scenario = regional_scenario([2, 1], [1, 1])
    small, *others = scenario.cluster.devices
    mixed = replace(scenario, cluster=replace(scenario.cluster, devices=(replace(small, memory_bytes=1000), *others)))
    assert make_plan("greedy", mixed).devices == ("device-1", "device-2")
    with pytest.raises(InputError, match=r"strategy 'cloudless': no split fits into memory: layer 0"):
        make_plan("cloudless", regional_scenario([2, 1], [1, 1], memory_bytes=1000))


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6), st.integers(0, 100))
def test_parts_are_whole_and_close_to_their_proportions(weights: list[float], more: int) -> None:
    total = len(weights) + more
    parts = proportional_parts(total, weights)
    assert sum(parts) == total
    assert min(parts) >= 1
    exact = [total * weight / sum(weights) for weight in weights]
    if min(exact) >= 1:
        assert all(abs(part - each) < 1 for part, each in zip(parts, exact, strict=True))


def test_a_method_keeps_the_plan_and_bounds_its_staleness() -> None:
    plan = make_plan("cloudless", regional_scenario([1, 1]))
    changed = with_exchanges(plan, "ma", 8)
    assert changed.pipelines == plan.pipelines
    assert (changed.synchronisation.interval_steps, changed.synchronisation.staleness_bound) == (8, 8)
