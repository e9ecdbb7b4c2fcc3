"""Tests for the layers at which candidate pipelines may be divided, on models with few and with many layers."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from planner.check import check_plan
from planner.cost.layers import range_memory
from planner.scenario.profile import ModelProfile
from planner.systems.auto.candidates.cut_points import MOST_PARTS, cut_points, part_memory
from planner.systems.registry import make_plan
from tests.helpers.scenarios.builders import chain_scenario


@given(st.lists(st.integers(0, 3), min_size=1, max_size=3 * MOST_PARTS))
def test_models_with_few_layers_are_divided_anywhere_and_others_where_little_is_sent(outputs: list[int]) -> None:
    scenario = chain_scenario([1.0, 1.0], [2.0, 2.0])
    layer = scenario.model.layers[0]
    layers = tuple(replace(layer, name=f"layer-{n}", output_bytes=size) for n, size in enumerate(outputs))
    scenario = replace(scenario, model=ModelProfile("model", layers))
    cuts = cut_points(scenario).tolist()
    assert (cuts[0], cuts[-1]) == (0, len(layers))
    assert len(cuts) == min(len(layers), MOST_PARTS) + 1
    assert cuts == sorted(set(cuts))
    if len(layers) <= MOST_PARTS:
        assert cuts == list(range(len(layers) + 1))
    else:
        # The last of a part sends no more than the layers right before the same group's other ends.
        for group, cut in zip(np.array_split(np.arange(1, len(layers)), MOST_PARTS - 1), cuts[1:], strict=False):
            assert outputs[cut - 1] == min(outputs[end - 1] for end in group)
    whole, parts = range_memory(scenario, 1), part_memory(scenario, 1)
    for all_ranges, some in zip(whole, parts, strict=True):
        assert some[0, -1] == all_ranges[0, len(layers)]


def test_auto_plans_a_model_of_a_hundred_layers_on_unlike_devices() -> None:
    scenario = chain_scenario([1.0, 1.0], [2.0, 2.0], global_batch=4)
    layers = tuple(replace(scenario.model.layers[n % 2], name=f"layer-{n}") for n in range(100))
    scenario = replace(scenario, model=ModelProfile("model", layers))
    check_plan(make_plan("auto", scenario), scenario)
