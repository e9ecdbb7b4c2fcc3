from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planner.check import check_plan
from planner.scenario.scenario import Scenario
from planner.systems.registry import STRATEGIES, make_plan
from tests.helpers.scenarios.builders import chain_scenario, mesh_scenario
from traces.common.errors import InputError

NAMES = sorted(STRATEGIES)

# These divide samples by the speeds of devices before anything else.
BY_SPEED = {"auto", "cloudless", "greedy"}

# The others may leave out what would not help.
TAKES_ALL_DEVICES = {"ddp", "megatron", "pipedream"}


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Up to six devices and layers, any batch, a microbatch that need not divide it."""
    layers = draw(st.integers(1, 6))
    times_s = st.lists(st.floats(1e-3, 10), min_size=layers, max_size=layers)
    return mesh_scenario(
        draw(st.integers(1, 6)),
        draw(times_s),
        draw(times_s),
        global_batch=draw(st.integers(1, 64)),
        microbatch=draw(st.integers(0, 9)),
        link=lambda a, b: (1e6, 0.01),
    )


@given(scenarios(), st.sampled_from(NAMES))
def test_plans_hold_every_layer_and_keep_the_global_batch(scenario: Scenario, name: str) -> None:
    devices = len(scenario.cluster.devices)
    # Fewer samples than pipelines is a case of its own, below.
    assume(name != "megatron" or scenario.training.global_batch >= devices)
    plan = make_plan(name, scenario)
    check_plan(plan, scenario)
    assert plan.global_batch == scenario.training.global_batch
    assert plan.strategy == name
    assert (plan.scenario, plan.model) == (scenario.name, scenario.model.name)
    for pipeline in plan.pipelines:
        held = [layer for stage in pipeline.stages for layer in range(stage.first_layer, stage.end_layer)]
        assert held == list(range(len(scenario.model.layers)))
    if name in TAKES_ALL_DEVICES:
        assert sorted(plan.devices) == sorted(device.name for device in scenario.cluster.devices)


@given(scenarios())
def test_megatron_gives_every_pipeline_a_sample_or_says_what_batch_it_needs(scenario: Scenario) -> None:
    devices, layers = len(scenario.cluster.devices), len(scenario.model.layers)
    pipelines = devices // max(n for n in range(1, layers + 1) if devices % n == 0)
    if scenario.training.global_batch < pipelines:
        with pytest.raises(InputError, match=f"a global batch of at least {pipelines}"):
            make_plan("megatron", scenario)
        return
    plan = make_plan("megatron", scenario)
    assert plan.global_batch == scenario.training.global_batch
    assert all(pipeline.samples > 0 for pipeline in plan.pipelines)


def test_megatron_cuts_into_equal_numbers_of_layers() -> None:
    scenario = mesh_scenario(6, [1.0, 9.0, 1.0, 1.0], [1.0] * 4, global_batch=10)
    plan = make_plan("megatron", scenario)
    # 3 is the largest divisor of 6 devices that 4 layers allow.
    bounds = [[(stage.first_layer, stage.end_layer) for stage in pipeline.stages] for pipeline in plan.pipelines]
    assert bounds == [[(0, 1), (1, 2), (2, 4)]] * 2
    assert plan.devices == tuple(f"device-{i}" for i in range(6))
    assert [pipeline.samples for pipeline in plan.pipelines] == [5, 5]
    assert [stage.in_flight for stage in plan.pipelines[0].stages] == [3, 2, 1]


@pytest.mark.parametrize("name", ["megatron", "pipedream"])
def test_the_scenarios_microbatch_is_used_and_the_last_one_is_smaller(name: str) -> None:
    scenario = mesh_scenario(2, [1.0, 1.0], [1.0, 1.0], global_batch=11, microbatch=4)
    assert make_plan(name, scenario).pipelines[0].microbatches == (4, 4, 3)


def test_ddp_takes_the_whole_batch_at_once_where_it_fits() -> None:
    scenario = mesh_scenario(3, [1.0, 1.0], [1.0, 1.0], global_batch=10)
    (pipeline,) = make_plan("ddp", scenario).pipelines
    assert (len(pipeline.stages), pipeline.microbatches) == (1, (10,))
    assert [replica.share for replica in pipeline.stages[0].replicas] == [1.0] * 3


def test_ddp_accumulates_over_the_fewest_microbatches_that_fit() -> None:
    # 16,000 bytes of states; 2,000 bytes per sample: five samples of a microbatch fit on a device, not six.
    scenario = mesh_scenario(2, [1.0, 1.0], [1.0, 1.0], global_batch=25, memory_bytes=26_000)
    assert make_plan("ddp", scenario).pipelines[0].microbatches == (9, 8, 8)


@given(st.integers(1, 6), st.integers(1, 30))
def test_ddp_fits_wherever_one_sample_on_a_device_does(devices: int, batch: int) -> None:
    scenario = mesh_scenario(devices, [1.0], [1.0], global_batch=batch, memory_bytes=9_000)
    (pipeline,) = make_plan("ddp", scenario).pipelines
    assert max(pipeline.microbatches) <= devices


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("idle", [1, 3])
def test_a_model_without_any_time_gets_a_plan_or_one_clear_line(name: str, idle: int) -> None:
    """On one kind of device, or on all."""
    made = chain_scenario([1e-3] * 3, [1e-3] * 3)
    kinds = [device.kind for device in made.cluster.devices[:idle]]
    nothing = dict.fromkeys(kinds, next(iter(chain_scenario([0.0], [0.0]).model.layers[0].times.values())))
    layers = tuple(
        replace(layer, times=dict.fromkeys(layer.times, next(iter(layer.times.values()))) | nothing)
        for layer in made.model.layers
    )
    scenario = replace(made, model=replace(made.model, layers=layers))
    if name in BY_SPEED:
        with pytest.raises(InputError, match="devices of kind 'kind-0' compute all layers in no time"):
            make_plan(name, scenario)
    else:
        check_plan(make_plan(name, scenario), scenario)


def test_an_unknown_strategy_is_answered_with_the_closest() -> None:
    with pytest.raises(InputError) as caught:
        make_plan("pipedraem", chain_scenario([1.0], [1.0]))
    expected = f"unknown strategy 'pipedraem'; did you mean 'pipedream'? valid: {', '.join(NAMES)}"
    assert str(caught.value) == expected


# --- PipeDream against all splits ---------------------------------------------------------------------------


def slowest_s(scenario: Scenario, stages: Sequence[tuple[int, int, int]], samples: int, bps: float) -> float:
    """The slowest stage or crossing of a split, as PipeDream's recurrence counts it, in seconds."""
    layers = scenario.model.layers
    worst_s = 0.0
    for first, end, width in stages:
        compute_s = sum(scenario.model.times(j, j + 1, "kind", samples).total_s for j in range(first, end))
        weight_bits = 8 * sum(layer.parameter_bytes for layer in layers[first:end])
        worst_s = max(worst_s, (compute_s + 4 * (width - 1) * weight_bits / (bps * width)) / width)
        if first > 0:
            worst_s = max(worst_s, 2 * 8 * samples * layers[first - 1].output_bytes / (bps * width))
    return worst_s


def all_splits(layers: int, devices: int) -> list[list[tuple[int, int, int]]]:
    """Every way to cut layers and devices into the same number of runs, none of them empty."""
    splits = []
    for count in range(1, min(layers, devices) + 1):
        for cuts in combinations(range(1, layers), count - 1):
            for borders in combinations(range(1, devices), count - 1):
                bounds, ranks = [0, *cuts, layers], [0, *borders, devices]
                widths = [b - a for a, b in pairwise(ranks)]
                splits.append(list(zip(bounds, bounds[1:], widths, strict=False)))
    return splits


@settings(max_examples=150)
@given(scenarios(), st.data())
def test_pipedreams_split_is_as_good_as_the_best_of_all(scenario: Scenario, data: st.DataObject) -> None:
    count, devices = len(scenario.model.layers), len(scenario.cluster.devices)
    assume(count <= 5 and devices <= 5)
    amounts = st.lists(st.integers(0, 10**6), min_size=count, max_size=count)
    scenario = mesh_scenario(
        devices,
        [layer.times["kind"].forward_s[0] for layer in scenario.model.layers],
        [2 * layer.times["kind"].backward_input_s[0] for layer in scenario.model.layers],
        output_bytes=data.draw(amounts),
        parameter_bytes=data.draw(amounts),
        link=lambda a, b: (1e6, 0.0),
        global_batch=scenario.training.global_batch,
        microbatch=scenario.training.microbatch,
    )
    (pipeline,) = STRATEGIES["pipedream"](scenario).pipelines
    made = [(stage.first_layer, stage.end_layer, len(stage.replicas)) for stage in pipeline.stages]
    samples = max(pipeline.microbatches)
    best_s = min(slowest_s(scenario, split, samples, 1e6) for split in all_splits(count, devices))
    assert slowest_s(scenario, made, samples, 1e6) == pytest.approx(best_s, rel=1e-9)


def test_pipedream_replicates_the_slow_layer() -> None:
    scenario = mesh_scenario(4, [1.0, 3.0], [2.0, 6.0], output_bytes=[1, 1], parameter_bytes=[1, 1], global_batch=16)
    (pipeline,) = make_plan("pipedream", scenario).pipelines
    assert [(stage.first_layer, stage.end_layer, len(stage.replicas)) for stage in pipeline.stages] == [
        (0, 1, 1),
        (1, 2, 3),
    ]
    assert [stage.in_flight for stage in pipeline.stages] == [4, 1]


def test_strategies_leave_the_scenario_as_it_is() -> None:
    scenario = mesh_scenario(3, [1.0] * 3, [1.0] * 3, global_batch=9)
    plans = [make_plan(name, scenario) for name in NAMES]
    assert plans == [make_plan(name, replace(scenario)) for name in NAMES]
