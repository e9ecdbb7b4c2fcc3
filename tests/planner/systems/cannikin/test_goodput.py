import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.systems.cannikin.goodput import (
    LEAST_GAIN,
    candidate_batches,
    choose_batch,
    goodput_per_s,
    statistical_efficiency,
)

BATCHES = st.floats(1, 1e5)
NOISE = st.floats(0, 1e6)


def gain(batch: float, first: float, noise: float) -> float:
    """Steps of the first batch that one of another batch is worth."""
    return batch / first * statistical_efficiency(batch, first, noise)


@given(BATCHES, BATCHES, st.floats(1e-3, 1e6), st.floats(1e-3, 1e3))
def test_the_gain_is_adascales(batch: float, first: float, noise: float, squared_gradient: float) -> None:
    # As AdaScale writes it: the variance of the mean gradient of a batch of B_0, and the squared gradient.
    variance, scale = noise * squared_gradient / first, batch / first
    expected = (variance + squared_gradient) / (variance / scale + squared_gradient)
    assert gain(batch, first, noise) == pytest.approx(expected, rel=1e-9)
    assert statistical_efficiency(batch, first, noise) == pytest.approx(expected / scale, rel=1e-9)


@given(st.floats(1, 1e3), st.floats(1, 100), NOISE)
def test_a_larger_batch_is_worth_more_but_never_more_than_its_samples(first: float, scale: float, noise: float) -> None:
    assert 1 - 1e-9 <= gain(scale * first, first, noise) <= scale * (1 + 1e-9)


def test_all_noise_makes_every_sample_worth_the_same() -> None:
    assert statistical_efficiency(4096, 64, math.inf) == 1.0
    assert gain(4096, 64, math.inf) == 64
    assert gain(4096, 64, 0.0) == pytest.approx(1.0)


@given(st.integers(1, 100), st.integers(0, 10_000), st.integers(2, 60))
def test_candidates_go_from_the_first_to_the_largest(first: int, more: int, count: int) -> None:
    found = candidate_batches(first, first + more, count)
    assert (found[0], found[-1]) == (first, first + more)
    assert list(found) == sorted(set(found))
    assert len(found) <= count


def test_candidates_have_equal_ratios() -> None:
    assert candidate_batches(10, 160, 5) == (10, 20, 40, 80, 160)
    assert len(candidate_batches(64, 16_384)) == 50


@given(NOISE, st.floats(1e-3, 1), st.floats(1e-5, 1e-2))
def test_the_batch_changes_only_for_a_clear_gain(noise: float, fixed_s: float, each_s: float) -> None:
    candidates = candidate_batches(32, 4096, 12)

    def time_s(batch: int) -> float:
        return fixed_s + each_s * batch

    def goodput(batch: int) -> float:
        return goodput_per_s(batch, time_s(batch), 32, noise)

    for current in candidates:
        chosen = choose_batch(current, candidates, time_s, 32, noise)
        best = max(map(goodput, candidates))
        if chosen == current:
            assert best < LEAST_GAIN * goodput(current) or best == goodput(current)
        else:
            assert goodput(chosen) == best >= LEAST_GAIN * goodput(current)


def test_noise_makes_batches_large() -> None:
    candidates = candidate_batches(32, 4096)

    def time_s(batch: int) -> float:
        return 0.1 + 1e-3 * batch

    chosen = [choose_batch(32, candidates, time_s, 32, noise) for noise in (10, 1000, 100_000)]
    assert chosen == sorted(chosen)
    assert chosen[0] < chosen[-1]
