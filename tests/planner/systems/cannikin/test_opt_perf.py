"""OptPerf against the paper's own method, against all divisions, and against the simulator."""

from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planner.systems.cannikin.opt_perf import batch_time_s, device_time_s, opt_perf, real_division
from planner.systems.cannikin.step_model import NO_SUMS, NodeSpeed, SumTimes, fit_line, fit_speed
from traces.common.errors import InputError

SLOPES_S = st.floats(1e-4, 5e-3)
FIXED_S = st.floats(0, 5e-3)
SPEEDS = st.builds(NodeSpeed, SLOPES_S, FIXED_S, SLOPES_S, FIXED_S)
SUMS = st.builds(SumTimes, st.floats(0.02, 0.6), st.floats(0, 0.15), st.floats(0, 0.02))


def classify_and_solve(batch: float, speeds: list[NodeSpeed], sums: SumTimes) -> tuple[float, list[float]]:
    """The paper's method: guess which devices wait for sums, solve for T, guess again until the guess holds."""
    share = sums.first_bucket_share
    waiting = [False] * len(speeds)
    for _ in range(100):
        slopes = [
            each.forward_per_sample_s + (share if waits else 1) * each.backward_per_sample_s
            for each, waits in zip(speeds, waiting, strict=True)
        ]
        fixed = [
            each.forward_fixed_s
            + (share * each.backward_fixed_s + sums.overlapped_s if waits else each.backward_fixed_s)
            for each, waits in zip(speeds, waiting, strict=True)
        ]
        inverse = [1 / slope for slope in slopes]
        end_s = (batch + sum(f * i for f, i in zip(fixed, inverse, strict=True))) / sum(inverse)
        samples = [(end_s - f) * i for f, i in zip(fixed, inverse, strict=True)]
        guess = [
            (1 - share) * each.backward_s(own) < sums.overlapped_s for each, own in zip(speeds, samples, strict=True)
        ]
        if guess == waiting:
            return end_s + sums.last_s, samples
        waiting = guess
    pytest.fail("the guesses do not settle")


@settings(max_examples=300)
@given(st.lists(SPEEDS, min_size=2, max_size=16), SUMS, st.floats(8, 64))
def test_bisection_finds_what_the_iterative_method_finds(
    speeds: list[NodeSpeed], sums: SumTimes, samples_each: float
) -> None:
    batch = samples_each * len(speeds)
    expected_s, expected = classify_and_solve(batch, speeds, sums)
    # The iterative method knows no lower bound.
    assume(min(expected) > 0)
    samples, time_s = real_division(batch, speeds, sums, [10**6] * len(speeds))
    assert time_s == pytest.approx(expected_s, rel=1e-9)
    assert samples == pytest.approx(expected, rel=1e-6)


@settings(max_examples=150)
@given(st.data(), SUMS, st.integers(0, 1))
def test_no_division_into_whole_samples_is_faster(data: st.DataObject, sums: SumTimes, least: int) -> None:
    devices = data.draw(st.integers(1, 4))
    speeds = data.draw(st.lists(SPEEDS, min_size=devices, max_size=devices))
    most = data.draw(st.lists(st.integers(1, 7), min_size=devices, max_size=devices))
    batch = data.draw(st.integers(max(1, least * devices), sum(most)))
    division = opt_perf(batch, speeds, sums, most, least)
    assert sum(division.samples) == batch
    assert all(least <= own <= limit for own, limit in zip(division.samples, most, strict=True))
    every = product(*(range(least, limit + 1) for limit in most))
    best_s = min(batch_time_s(samples, speeds, sums) for samples in every if sum(samples) == batch)
    assert division.time_s == pytest.approx(best_s, rel=1e-9)


@given(st.lists(SPEEDS, min_size=1, max_size=8), SUMS, st.integers(1, 500))
def test_a_larger_batch_never_takes_less_time(speeds: list[NodeSpeed], sums: SumTimes, batch: int) -> None:
    most = [1000] * len(speeds)
    assert opt_perf(batch + 1, speeds, sums, most).time_s >= opt_perf(batch, speeds, sums, most).time_s - 1e-12


def test_without_sums_compute_is_balanced() -> None:
    speeds = [NodeSpeed(1e-3, 0.0, 2e-3, 0.0), NodeSpeed(2e-3, 0.0, 4e-3, 0.0)]
    assert opt_perf(30, speeds, NO_SUMS, [30, 30]).samples == (20, 10)


def test_long_sums_give_more_to_a_device_with_a_short_forward() -> None:
    # Both compute equally long for a sample; the first one spends less of it before its first bucket is ready.
    speeds = [NodeSpeed(1e-3, 0.0, 3e-3, 0.0), NodeSpeed(3e-3, 0.0, 1e-3, 0.0)]
    first, second = opt_perf(100, speeds, SumTimes(0.1, 10.0, 0.0), [100, 100]).samples
    assert first > second
    assert opt_perf(100, speeds, NO_SUMS, [100, 100]).samples == (50, 50)


def test_a_device_on_which_no_sample_pays_gets_none() -> None:
    speeds = [NodeSpeed(1e-3, 0.0, 1e-3, 0.0), NodeSpeed(1e-3, 5.0, 1e-3, 0.0)]
    assert opt_perf(10, speeds, NO_SUMS, [10, 10]).samples == (10, 0)
    assert opt_perf(10, speeds, NO_SUMS, [10, 10], least=1).samples == (9, 1)


def test_memory_bounds_what_a_fast_device_gets() -> None:
    speeds = [NodeSpeed(1e-4, 0.0, 1e-4, 0.0), NodeSpeed(1e-2, 0.0, 1e-2, 0.0)]
    assert opt_perf(10, speeds, NO_SUMS, [4, 10]).samples == (4, 6)


@pytest.mark.parametrize(
    ("batch", "most", "least", "message"),
    [
        (9, [4, 4], 0, "give 1 to 8 samples: the devices' memory holds 4, 4"),
        (0, [4, 4], 0, "1 to 8 samples"),
        (1, [4, 4], 1, "2 samples or more"),
        (3, [4, 0], 1, "devices whose memory holds 1 or more"),
    ],
)
def test_a_batch_that_cannot_be_is_refused(batch: int, most: list[int], least: int, message: str) -> None:
    speeds = [NodeSpeed(1e-3, 0.0, 1e-3, 0.0)] * 2
    with pytest.raises(InputError, match=message):
        opt_perf(batch, speeds, NO_SUMS, most, least)


def test_microbatches_overlap_only_in_the_last_backward() -> None:
    speed, sums = NodeSpeed(1e-3, 2e-3, 3e-3, 4e-3), SumTimes(0.25, 0.5, 0.125)
    forward_s, backward_s = speed.forward_s(8), speed.backward_s(8)
    before_s = 2 * (forward_s + backward_s) + forward_s + 0.01
    expected_s = max(before_s + backward_s, before_s + 0.25 * backward_s + 0.5) + 0.125
    assert device_time_s(8, speed.over_step(3, 0.01), sums) == pytest.approx(expected_s)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=9), st.floats(1e-5, 1e-2), st.floats(0, 1e-1))
def test_a_line_is_found_again(samples: list[int], slope: float, intercept: float) -> None:
    found = fit_line(samples, [slope * each + intercept for each in samples])
    if len(set(samples)) > 1:
        assert found == pytest.approx((slope, intercept), rel=1e-5, abs=1e-6)
    assert [found[0] * each + found[1] for each in samples] == pytest.approx(
        [slope * each + intercept for each in samples], rel=1e-4
    )


@given(st.lists(st.tuples(st.integers(1, 50), st.floats(1e-3, 1)), min_size=1, max_size=9))
def test_no_line_of_the_same_kind_has_smaller_relative_errors(points: list[tuple[int, float]]) -> None:
    samples, times_s = np.array(points, np.float64).T
    slope, intercept = fit_line(list(samples), list(times_s))
    assert slope >= 0
    assert intercept >= 0

    def error(a: float, b: float) -> float:
        return float((((a * samples + b) / times_s - 1) ** 2).sum())

    step_s = 1e-4
    for a, b in [(step_s, 0), (-step_s, 0), (0, step_s), (0, -step_s), (step_s, -step_s), (-step_s, step_s)]:
        if slope + a >= 0 and intercept + b >= 0 and (len(set(samples)) > 1 or intercept + b == 0):
            assert error(slope, intercept) <= error(slope + a, intercept + b) + 1e-9


def test_points_without_samples_or_times_are_refused() -> None:
    for samples, times_s in ([], []), ([0], [1.0]), ([1], [0.0]):
        with pytest.raises(InputError):
            fit_speed(samples, times_s, times_s)
