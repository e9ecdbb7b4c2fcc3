"""Tests that layers are measured on two ranks at once, with the messages of their stages or without any."""

from dataclasses import replace

import pytest

from experiments.benches.simulation.predicted import PREDICTED, measured_profile
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.scenario.profile import ModelProfile

DIGITS = replace(next(case for case in PREDICTED if case.name == "digits"), samples=8, microbatches=4)


def check(model: ModelProfile) -> None:
    for layer in model.layers:
        (times,) = layer.times.values()
        # The scenario's placeholder is a second for each action.
        assert 0 < times.forward_s[0] < 1
        assert 0 < times.backward_input_s[0] + times.backward_weight_s[0] < 1


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_ranks_with_one_stage_measure_all_layers(schedule: str) -> None:
    scenario = DIGITS.scenario
    check(measured_profile(scenario, DIGITS.plan(scenario, schedule)))


@pytest.mark.slow
def test_ranks_with_two_stages_measure_all_layers() -> None:
    scenario = DIGITS.scenario
    bounds = (0, 2, 4, 6, len(scenario.model.layers))
    devices = ("west", "east", "east", "west")
    stages = tuple(
        Stage(first, end, (Replica(device),), 2)
        for first, end, device in zip(bounds, bounds[1:], devices, strict=False)
    )
    pipeline = Pipeline(stages, (DIGITS.samples,) * DIGITS.microbatches)
    check(measured_profile(scenario, Plan(scenario.name, scenario.model.name, "by hand", "zb-v", (pipeline,))))
