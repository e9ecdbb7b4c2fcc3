"""The learning rate of each step, and what no schedule can be."""

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.scenario.training import SHAPES, LearningRateSchedule
from traces.common.errors import InputError


def test_factors_by_hand() -> None:
    assert LearningRateSchedule().factor(0) == LearningRateSchedule().factor(10**6) == 1.0
    linear = LearningRateSchedule("linear", warmup_steps=3, decay_steps=4, final_share=0.2)
    factors = [linear.factor(step) for step in range(9)]
    assert factors == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])
    cosine = LearningRateSchedule("cosine", decay_steps=4)
    half = math.sqrt(0.5)
    assert [cosine.factor(step) for step in range(6)] == pytest.approx([1.0, (1 + half) / 2, 0.5, (1 - half) / 2, 0, 0])


@given(st.sampled_from(SHAPES), st.integers(0, 20), st.integers(1, 50), st.floats(0, 1))
def test_it_rises_to_one_and_falls_to_its_final_share(
    shape: str, warmup_steps: int, decay_steps: int, final_share: float
) -> None:
    schedule = LearningRateSchedule(shape, warmup_steps, decay_steps, final_share)
    factors = [schedule.factor(step) for step in range(warmup_steps + decay_steps + 3)]
    assert factors[warmup_steps] == 1.0
    assert factors[: warmup_steps + 1] == sorted(factors[: warmup_steps + 1])
    falling = factors[warmup_steps:]
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(falling))
    assert factors[-1] == pytest.approx(1.0 if shape == "constant" else final_share)


@pytest.mark.parametrize(
    ("values", "where", "expected"),
    [
        ({"shape": "cosin"}, "shape", "unknown shape 'cosin'"),
        ({"warmup_steps": -1}, "warmup_steps", "-1 steps of warm-up"),
        ({"shape": "linear"}, "decay_steps", "0 steps of decay"),
        ({"decay_steps": -3}, "decay_steps", "-3 steps of decay"),
        ({"final_share": 1.5}, "final_share", "a final share of 1.5"),
        ({"final_share": math.nan}, "final_share", "a final share of nan"),
    ],
)
def test_what_no_schedule_can_be(values: dict[str, Any], where: str, expected: str) -> None:
    with pytest.raises(InputError) as caught:
        LearningRateSchedule(**values)
    assert caught.value.where == where
    assert caught.value.problem.startswith(expected)
