import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from planner.adapt.gradient_noise import ESTIMATORS, GradientNorms, NoiseEstimate, NormWeights, SmoothedNoise
from traces.common.errors import InputError

Array = NDArray[np.float64]

BATCHES = [(8, 24), (4, 8, 20), (2, 6, 8, 16), (1, 1, 1), (5, 5, 5, 5)]
estimators = pytest.mark.parametrize("name", ESTIMATORS)
batch_sizes = st.lists(st.integers(1, 500), min_size=2, max_size=9).map(tuple)


def squared_norms(samples: Array, batches: tuple[int, ...]) -> tuple[Array, Array]:
    """|g_i|² and |g|² of steps whose per-sample gradients are steps x samples x parameters."""
    parts = np.split(samples, np.cumsum(batches)[:-1], axis=1)
    local = np.stack([part.mean(axis=1) for part in parts], axis=1)
    return (local**2).sum(axis=-1), (samples.mean(axis=1) ** 2).sum(axis=-1)


def truth(population: Array) -> tuple[float, float]:
    """S and |G|² of equally likely per-sample gradients."""
    mean = population.mean(axis=0)
    return float(((population - mean) ** 2).sum(axis=1).mean()), float((mean**2).sum())


@estimators
@given(data=st.data())
def test_the_mean_over_every_possible_step_is_the_truth(name: str, data: st.DataObject) -> None:
    # Samples drawn with replacement from a few: every step that can happen, each equally likely.
    number = st.integers(-5, 5)
    population = np.array(data.draw(st.lists(st.tuples(number, number), min_size=2, max_size=3)), dtype=np.float64)
    batches = data.draw(st.lists(st.integers(1, 3), min_size=2, max_size=3).filter(lambda sizes: sum(sizes) <= 6))
    steps = population[np.array(list(product(range(len(population)), repeat=sum(batches))))]
    norms = squared_norms(steps, tuple(batches))
    weights = ESTIMATORS[name](batches)
    variance, squared_gradient = truth(population)
    assert weights.variance(*norms).mean() == pytest.approx(variance, abs=1e-9)
    assert weights.squared_gradient(*norms).mean() == pytest.approx(squared_gradient, abs=1e-9)


@estimators
@given(batches=batch_sizes, variance=st.floats(0, 1e3), squared_gradient=st.floats(0, 1e3))
def test_expected_norms_give_the_truth(
    name: str, batches: tuple[int, ...], variance: float, squared_gradient: float
) -> None:
    local = [squared_gradient + variance / size for size in batches]
    found = GradientNorms(0, batches, tuple(local), squared_gradient + variance / sum(batches)).estimate(name)
    rounding = 1e-9 * max(1.0, variance, squared_gradient) * sum(batches)
    assert found.variance == pytest.approx(variance, rel=1e-6, abs=rounding)
    assert found.squared_gradient == pytest.approx(squared_gradient, rel=1e-6, abs=rounding)


@estimators
@pytest.mark.parametrize("batches", BATCHES)
def test_the_mean_over_random_steps_is_the_truth(name: str, batches: tuple[int, ...]) -> None:
    # Skewed per-sample gradients: nothing here is normal.
    steps, parameters = 8000, 12
    scales = np.linspace(0.2, 1.5, parameters)
    samples = np.random.default_rng(1).exponential(1.0, (steps, sum(batches), parameters)) * scales
    weights, norms = ESTIMATORS[name](batches), squared_norms(samples, batches)
    # An exponential variable's variance is the square of its mean.
    for found in (weights.variance(*norms), weights.squared_gradient(*norms)):
        standard_error = found.std(ddof=1) / math.sqrt(steps)
        assert abs(found.mean() - (scales**2).sum()) < 4 * standard_error


def normal_covariance(batches: tuple[int, ...], parameters: int, signal: float) -> Array:
    """Of |g_1|², ..., |g_n|², |g|², for per-sample gradients that are normal, of variance 1 in each parameter.

    For jointly normal vectors of mean m whose parameters covary by c: cov(|u|², |v|²) = 2·D·c² + 4·c·|m|².
    """
    total = sum(batches)
    shared = np.full((len(batches) + 1,) * 2, 1 / total)
    shared[:-1, :-1] = np.diag(1 / np.array(batches))
    covariance: Array = 2 * parameters * shared**2 + 4 * shared * signal
    return covariance


def spreads(weights: NormWeights, covariance: Array) -> tuple[float, float]:
    """Variances of the estimates of S and of |G|²."""
    variance = np.append(weights.variance_local, weights.variance_global)
    gradient = np.append(weights.gradient_local, weights.gradient_global)
    return float(variance @ covariance @ variance), float(gradient @ covariance @ gradient)


@given(batches=batch_sizes, parameters=st.integers(1, 10**6), signal=st.floats(0, 100))
def test_no_estimator_varies_less_than_the_minimum(batches: tuple[int, ...], parameters: int, signal: float) -> None:
    covariance = normal_covariance(batches, parameters, signal)
    least = spreads(ESTIMATORS["minimum-variance"](batches), covariance)
    for name in ESTIMATORS:
        for found, bound in zip(spreads(ESTIMATORS[name](batches), covariance), least, strict=True):
            assert found >= bound * (1 - 1e-6)


def test_spreads_are_those_of_drawn_gradients() -> None:
    batches, parameters, steps = (2, 6, 8), 10, 20000
    mean = np.full(parameters, 0.3)
    samples = np.random.default_rng(2).standard_normal((steps, sum(batches), parameters)) + mean
    norms = squared_norms(samples, batches)
    for estimator in ESTIMATORS.values():
        weights = estimator(batches)
        expected = spreads(weights, normal_covariance(batches, parameters, float(mean @ mean)))
        found = (weights.variance(*norms).var(ddof=1), weights.squared_gradient(*norms).var(ddof=1))
        assert found == pytest.approx(expected, rel=0.1)


def test_unequal_batches_make_the_released_weights_vary_more() -> None:
    batches = (2, 6, 8, 16)
    covariance = normal_covariance(batches, parameters=1000, signal=0.01)
    released = spreads(ESTIMATORS["released"](batches), covariance)
    least = spreads(ESTIMATORS["minimum-variance"](batches), covariance)
    assert released[0] > 1.5 * least[0]
    assert released[1] > 2 * least[1]


@given(size=st.integers(1, 100), devices=st.integers(2, 9))
def test_equal_batches_make_the_estimators_equal(size: int, devices: int) -> None:
    released, least = (ESTIMATORS[name]([size] * devices) for name in ("released", "minimum-variance"))
    np.testing.assert_allclose(released.variance_local, least.variance_local, rtol=1e-9)
    np.testing.assert_allclose(released.gradient_local, least.gradient_local, rtol=1e-9)
    assert released.variance_global == pytest.approx(least.variance_global)
    assert released.gradient_global == pytest.approx(least.gradient_global)


def test_released_weights_follow_from_the_matrices_written_out() -> None:
    batches, total = (2, 6, 8), 16
    for_gradient, for_variance = np.empty((3, 3)), np.empty((3, 3))
    for i, one in enumerate(batches):
        for j, other in enumerate(batches):
            both = (total - one) * (total - other)
            for_gradient[i, j] = (total**2 - one**2 - other**2) / (total * both)
            for_variance[i, j] = one * other * (total - one - other) / both
        for_gradient[i, i] = (total + 2 * one) / (total**2 - total * one)
        for_variance[i, i] = total * one / (total - one)
    local, whole = [5.0, 4.0, 3.0], 2.5
    found = GradientNorms(0, batches, tuple(local), whole).estimate("released")
    each_gradient = [(total * whole - b * norm) / (total - b) for b, norm in zip(batches, local, strict=True)]
    each_variance = [b * total / (total - b) * (norm - whole) for b, norm in zip(batches, local, strict=True)]
    for matrix, each, result in (
        (for_gradient, each_gradient, found.squared_gradient),
        (for_variance, each_variance, found.variance),
    ):
        inverse = np.linalg.inv(matrix).sum(axis=1)
        assert result == pytest.approx(inverse @ each / inverse.sum())


@given(batches=batch_sizes, data=st.data())
def test_the_minimum_variance_estimate_of_the_noise_is_never_negative(
    batches: tuple[int, ...], data: st.DataObject
) -> None:
    gradients = np.array(data.draw(st.lists(st.floats(-10, 10), min_size=len(batches), max_size=len(batches))))
    whole = float(np.average(gradients, weights=batches))
    found = GradientNorms(0, batches, tuple(gradients**2), whole**2).estimate("minimum-variance")
    assert found.variance >= -1e-9 * sum(batches)


def test_the_noise_scale_is_in_samples() -> None:
    assert NoiseEstimate(12.0, 3.0).noise_scale == 4.0
    assert NoiseEstimate(12.0, -0.1).noise_scale == math.inf
    assert NoiseEstimate(-1.0, 3.0).noise_scale == 0.0


@given(
    decay=st.floats(0, 0.99),
    estimates=st.lists(st.tuples(st.floats(-10, 10), st.floats(-10, 10)), min_size=1, max_size=20),
)
def test_the_running_estimate_is_the_weighted_mean_of_all_steps(
    decay: float, estimates: list[tuple[float, float]]
) -> None:
    running = SmoothedNoise(decay)
    assert running.estimate is None
    for pair in estimates:
        running = running.update(NoiseEstimate(*pair))
    weights = decay ** np.arange(len(estimates) - 1, -1, -1)
    expected = np.average(np.array(estimates), axis=0, weights=weights)
    assert running.estimate is not None
    assert running.estimate.variance == pytest.approx(expected[0], abs=1e-9)
    assert running.estimate.squared_gradient == pytest.approx(expected[1], abs=1e-9)


def test_the_running_noise_scale_is_the_ratio_of_the_averages() -> None:
    running = SmoothedNoise(0.5).update(NoiseEstimate(2.0, 1.0)).update(NoiseEstimate(8.0, -0.25))
    assert running.estimate is not None
    assert running.estimate.noise_scale == pytest.approx((2 + 16) / (1 - 0.5))


@pytest.mark.parametrize(
    ("estimator", "batches", "norms", "message"),
    [
        ("released", (4,), (1.0,), "give the samples of two devices or more"),
        ("minimum-variance", (4, 0), (1.0, 1.0), "give every device at least one sample"),
        ("released", (4, 4), (1.0,), "1 squared norms do not fit 2 local batches"),
        ("minimum-varance", (4, 4), (1.0, 1.0), "did you mean 'minimum-variance'"),
    ],
)
def test_wrong_input_is_refused(
    estimator: str, batches: tuple[int, ...], norms: tuple[float, ...], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        GradientNorms(0, batches, norms, 1.0).estimate(estimator)


@pytest.mark.parametrize("decay", [-0.1, 1.0, math.nan])
def test_a_decay_that_is_no_share_is_refused(decay: float) -> None:
    with pytest.raises(InputError, match="at least 0 and less than 1"):
        SmoothedNoise(decay)
