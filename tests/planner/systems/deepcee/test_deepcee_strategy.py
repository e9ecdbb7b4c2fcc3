from dataclasses import replace
from itertools import permutations, product

import pytest

from planner.check import check_plan
from planner.cost.in_flight import plain_depths
from planner.plan.plan import Plan
from planner.runs.metrics import measure
from planner.scenario.cluster import Cluster, Device, Link
from planner.scenario.profile import LayerProfile, ModelProfile, TimeTable
from planner.scenario.scenario import Scenario
from planner.scenario.training import Optimizer, Training
from planner.systems.deepcee import layer_split
from planner.systems.deepcee.strategy import Mechanisms, deepcee, dynamic_step_time_s
from planner.systems.registry import make_plan
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import chain_scenario, mesh_scenario
from traces.common.errors import InputError

GIB = 2**30


def three_regions(between_bps: float = 1e9, latency_s: float = 0.02, *, mixed: bool = False) -> Scenario:
    """Two fast devices, two slow ones and a middling one, each kind in a region; twelve equal layers."""
    kinds = {"fast": 0.01, "slow": 0.03, "middling": 0.02}
    rows = [("a", "fast"), ("a", "fast"), ("b", "slow"), ("b", "slow"), ("c", "middling")]
    if mixed:
        rows = [rows[0], rows[2], rows[4], rows[1], rows[3]]
    devices = tuple(Device(f"{region}-{index}", kind, region, GIB) for index, (region, kind) in enumerate(rows))
    links = [Link(region, region, 25e9, 1e-4) for region in "abc"]
    links += [Link(one, other, between_bps, latency_s) for one, other in permutations("abc", 2)]
    times = {kind: TimeTable((1,), (each,), (each,), (each,)) for kind, each in kinds.items()}
    layers = (LayerProfile("layer", 10**6, 10**5, 10**6, times),) * 12
    training = Training(32, microbatch=1, optimizer=Optimizer("adamw"))
    return Scenario("three", Cluster(devices, tuple(links)), ModelProfile("layers", layers), training)


def rate(plan: Plan, scenario: Scenario) -> float:
    return measure(Simulator().run(scenario, plan, None, 2)).samples_per_s


def regions(plan: Plan, scenario: Scenario) -> list[str]:
    """Of the stages, neighbours of one region once."""
    stages = [scenario.cluster.by_name[stage.replicas[0].device].region for stage in plan.pipelines[0].stages]
    return [each for index, each in enumerate(stages) if index == 0 or stages[index - 1] != each]


@pytest.mark.parametrize("mixed", [False, True])
def test_each_region_is_entered_once_and_replicas_share_a_region(mixed: bool) -> None:
    scenario = three_regions(mixed=mixed)
    plan = make_plan("deepcee", scenario)
    assert sorted(regions(plan, scenario)) == ["a", "b", "c"]
    for stage in plan.pipelines[0].stages:
        assert len({scenario.cluster.by_name[replica.device].kind for replica in stage.replicas}) == 1
    assert plan.schedule == "compact-zb"


def test_many_layers_are_divided_between_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = three_regions()
    exact_s = dynamic_step_time_s(make_plan("deepcee", scenario), scenario)
    monkeypatch.setattr(layer_split, "MOST_PARTS", 6)
    plan = make_plan("deepcee", scenario)
    check_plan(plan, scenario)
    assert all(stage.first_layer % 2 == 0 for stage in plan.stages)
    assert len(plan.stages) > 1
    assert exact_s <= dynamic_step_time_s(plan, scenario) < 1.5 * exact_s


def test_regions_behind_a_slow_link_are_left_out() -> None:
    scenario = three_regions(between_bps=1e6)
    assert regions(make_plan("deepcee", scenario), scenario) == ["a"]


def test_it_is_faster_than_equal_splits() -> None:
    scenario = three_regions()
    own = rate(make_plan("deepcee", scenario), scenario)
    assert own > 1.3 * rate(make_plan("megatron", scenario), scenario)
    assert own > 1.3 * rate(make_plan("zb-h1-equal", scenario), scenario)


@pytest.mark.parametrize("switches", list(product([False, True], repeat=3)))
def test_every_choice_of_mechanisms_makes_a_plan_that_can_be(switches: tuple[bool, bool, bool]) -> None:
    scenario, mechanisms = three_regions(latency_s=0.2, mixed=True), Mechanisms(*switches)
    plan = deepcee(scenario, mechanisms)
    check_plan(plan, scenario)
    depths = tuple(stage.in_flight for stage in plan.pipelines[0].stages)
    assert plan.schedule == ("compact-zb" if mechanisms.zero_bubble else "1f1b")
    if not mechanisms.latency_aware_depth:
        assert depths <= plain_depths(len(depths))
    if not mechanisms.grouping:
        assert plan.devices == tuple(device.name for device in scenario.cluster.devices)


def test_the_whole_is_not_slower_than_without_a_mechanism() -> None:
    scenario = three_regions(latency_s=0.2, mixed=True)
    whole = rate(deepcee(scenario), scenario)
    for name in ("grouping", "zero_bubble", "latency_aware_depth"):
        assert whole >= 0.99 * rate(deepcee(scenario, Mechanisms(**{name: False})), scenario), name


def test_depths_keep_within_memory() -> None:
    # 48,000 bytes of states in all; each sample in flight takes 1,000 bytes a layer.
    scenario = mesh_scenario(2, [0.1] * 4, [0.2] * 4, memory_bytes=40_000, parameter_bytes=[4000] * 4, global_batch=32)
    scenario = replace(scenario, training=Training(32, optimizer=Optimizer("adamw")))
    check_plan(make_plan("deepcee", scenario), scenario)


def test_what_fits_nowhere_is_refused() -> None:
    scenario = mesh_scenario(2, [0.1] * 4, [0.2] * 4, memory_bytes=5_000)
    with pytest.raises(InputError, match="no split fits into memory"):
        make_plan("deepcee", scenario)


def test_unlike_replicas_share_in_proportion_to_speed() -> None:
    scenario = three_regions()
    close = {"fast": 0.010, "slow": 0.011, "middling": 0.02}
    times = {kind: TimeTable((1,), (each,), (each,), (each,)) for kind, each in close.items()}
    # One layer, whose gradients are nothing: only replicas can share it.
    model = ModelProfile("layer", (LayerProfile("layer", 4, 10**5, 10**6, times),))
    devices = (Device("a-0", "fast", "a", GIB), Device("a-1", "slow", "a", GIB))
    alone = replace(scenario, cluster=Cluster(devices, (Link("a", "a", 25e9, 1e-6),)), model=model)
    (stage,) = make_plan("deepcee", alone).pipelines[0].stages
    shares = {replica.device: replica.share for replica in stage.replicas}
    assert shares["a-0"] / shares["a-1"] == pytest.approx(1.1)


def test_flows_that_share_a_link_are_counted_together() -> None:
    scenario = chain_scenario([0.1, 0.1], [0.2, 0.2], output_bytes=[5000, 0], bandwidth_bps=1e6)
    plan = make_plan("deepcee", scenario)
    assert dynamic_step_time_s(plan, scenario) > 0


def test_equal_split_with_zb_h1() -> None:
    scenario = three_regions()
    plan = make_plan("zb-h1-equal", scenario)
    (pipeline,) = plan.pipelines
    assert plan.schedule == "zb-h1"
    assert [stage.end_layer - stage.first_layer for stage in pipeline.stages] == [2, 2, 3, 2, 3]
    assert [stage.in_flight for stage in pipeline.stages] == [5, 4, 3, 2, 1]
