import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.systems.auto.forecasting.prediction_error import LEAST_WEIGHT, STEPS_OF_KIND, PredictionBias
from tests.helpers.scenarios.builders import chain_plan, chain_scenario

SCENARIO = chain_scenario([1.0, 1.0], [1.0, 1.0])
PLAN = replace(chain_plan(SCENARIO), order="scheduled")
DYNAMIC = replace(PLAN, order="dynamic")


def test_nothing_known_changes_nothing() -> None:
    assert PredictionBias().factor(PLAN) == 1


@given(st.floats(0.5, 4), st.floats(0.1, 100), st.integers(1, 200))
def test_a_steady_ratio_is_the_factor_of_the_plan_and_of_its_kind_alone(
    ratio: float, predicted_s: float, steps: int
) -> None:
    experience = PredictionBias()
    for _ in range(steps):
        experience.learn(PLAN, ratio * predicted_s, predicted_s)
    assert experience.factor(PLAN) == pytest.approx(ratio)
    assert experience.factor(replace(PLAN, strategy="another")) == pytest.approx(ratio)
    assert experience.factor(DYNAMIC) == 1


def test_old_steps_fade() -> None:
    experience = PredictionBias()
    for _ in range(1000):
        experience.learn(PLAN, 2.0, 1.0)
    for _ in range(round(4 / LEAST_WEIGHT)):
        experience.learn(PLAN, 1.0, 1.0)
    assert 1 <= experience.factor(PLAN) < 1.05


def test_a_plan_s_own_steps_outweigh_its_kind() -> None:
    experience = PredictionBias()
    other = replace(PLAN, strategy="another")
    for _ in range(50):
        experience.learn(PLAN, 2.0, 1.0)
        experience.learn(other, 1.0, 1.0)
    assert experience.factor(PLAN) > 1.8
    assert experience.factor(other) < 1.1


def test_the_spread_is_that_of_what_the_factor_of_a_plan_leaves() -> None:
    experience, random = PredictionBias(), np.random.default_rng(7)
    assert experience.spread(PLAN) is None
    for value in random.normal(0.5, 0.2, 400):
        experience.learn(PLAN, math.exp(value), 1.0)
    assert experience.spread(PLAN) == pytest.approx(0.2, rel=0.2)
    # Plans whose errors differ, but do not vary.
    experience, other = PredictionBias(), replace(PLAN, strategy="another")
    for _ in range(500):
        experience.learn(PLAN, 1.5, 1.0)
        experience.learn(other, 1.0, 1.0)
    assert experience.spread(PLAN) == experience.spread(other) < 0.01


@given(st.lists(st.lists(st.floats(0.5, 2), min_size=STEPS_OF_KIND, max_size=12), max_size=8), st.floats(0.5, 2))
def test_the_error_of_new_plans_is_by_how_much_their_first_steps_were_slower_than_other_plans_told(
    surprises: list[list[float]], ratio: float
) -> None:
    experience = PredictionBias()
    for _ in range(100):
        experience.learn(PLAN, ratio, 1.0)
    squares = [0.0]
    for number, steps in enumerate(surprises):
        new = replace(PLAN, strategy=f"new {number}")
        predicted_s = 1 / experience.factor(new)
        for step, surprise in enumerate(steps):
            experience.learn(new, surprise, predicted_s)
            if step < STEPS_OF_KIND - 1:
                assert experience.error_of_new == pytest.approx(1 - math.exp(-math.sqrt(np.mean(squares))), abs=1e-9)
        logs = np.log(steps[:STEPS_OF_KIND])
        squares = [*(squares if number else []), max(0.0, float(logs.mean())) ** 2]
    assert experience.error_of_new == pytest.approx(1 - math.exp(-math.sqrt(np.mean(squares))), abs=1e-9)
