"""Training to a target by Cannikin and its rivals: when the target is met, what is said of ratios, and small runs."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.reproductions.cannikin.executed import (
    LARGEST_BATCH,
    TARGET_LOSS,
    WINDOW_SAMPLES,
    Setting,
    first_step_at,
    noise_error,
    ratio_interval,
    train,
)


@given(st.lists(st.tuples(st.integers(1, 900), st.floats(0.0, 3 * TARGET_LOSS)), max_size=40))
def test_the_target_is_met_by_the_mean_of_the_last_samples(steps: list[tuple[int, float]]) -> None:
    losses, samples = [loss for _, loss in steps], [count for count, _ in steps]

    def is_met(end: int) -> bool:
        begin = end
        while begin > 0 and sum(samples[begin:end]) < WINDOW_SAMPLES:
            begin -= 1
        enough = sum(samples[begin:end]) >= WINDOW_SAMPLES
        return enough and np.average(losses[begin:end], weights=samples[begin:end]) <= TARGET_LOSS + 1e-12

    expected = next((end - 1 for end in range(1, len(steps) + 1) if is_met(end)), None)
    assert first_step_at(losses, samples) == expected


@given(st.lists(st.tuples(st.floats(1.0, 9.0), st.floats(1.0, 9.0)), min_size=3, max_size=9))
def test_the_interval_is_that_of_a_paired_t_test(times: list[tuple[float, float]]) -> None:
    # Loaded here: every worker of the tests reads this file, and one of them needs it.
    from scipy import stats

    own, rival = zip(*times, strict=True)
    logs = np.log(np.divide(own, rival))
    mean, low, high = ratio_interval(own, rival)
    assert mean == pytest.approx(math.exp(logs.mean()))
    if logs.std() > 1e-6:
        expected = stats.ttest_1samp(logs, 0.0).confidence_interval(0.95)
        assert (math.log(low), math.log(high)) == pytest.approx((expected.low, expected.high))


@pytest.mark.slow
def test_a_run_of_cannikin_changes_batch_and_shares_within_limits() -> None:
    run = train(Setting(16, 0.01, 40, 40), "cannikin", 0)
    assert 16 < run.largest_batch <= LARGEST_BATCH
    assert run.time_s == math.inf
    assert 0.1 < run.accuracy < 1


@pytest.mark.slow
def test_the_noise_scale_of_unequal_shares_is_that_of_all_samples() -> None:
    assert abs(noise_error()) < 0.15
