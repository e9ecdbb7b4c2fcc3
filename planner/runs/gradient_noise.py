"""What a run measures of the gradient noise: the squared norms of each step's gradients, local and global."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import ArrayLike, NDArray

from traces.common.errors import InputError
from traces.common.names import find_by_name

Row = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class NoiseEstimate:
    """What one step, or several smoothed, say about the noise of the gradient.

    Attributes:
        variance: S, the variance of a sample's gradient summed over the parameters; squared units of the gradient.
        squared_gradient: |G|², of the true gradient; an estimate without bias may be negative.
    """

    variance: float
    squared_gradient: float

    @property
    def noise_scale(self) -> float:
        """S / |G|², in samples; infinite where no gradient can be told from the noise (|G|² is not positive)."""
        if self.squared_gradient <= 0:
            return math.inf
        return max(self.variance, 0.0) / self.squared_gradient


@dataclass(frozen=True, eq=False, slots=True)
class NormWeights:
    """How an estimator weighs the squared norms: S and |G|² are a sum each, and depend on the batch sizes alone.

    Attributes:
        variance_local: For S, of |g_i|², per device.
        variance_global: For S, of |g|².
        gradient_local: For |G|², of |g_i|², per device.
        gradient_global: For |G|², of |g|².
    """

    variance_local: Row
    variance_global: float
    gradient_local: Row
    gradient_global: float

    def variance(self, local_squared_norms: ArrayLike, global_squared_norm: ArrayLike) -> Row:
        """Return S of each step; norms of shape steps x devices (|g_i|²) and steps (|g|²), or of one step."""
        weighted = np.asarray(local_squared_norms) @ self.variance_local
        return np.asarray(weighted + self.variance_global * np.asarray(global_squared_norm))

    def squared_gradient(self, local_squared_norms: ArrayLike, global_squared_norm: ArrayLike) -> Row:
        """Return |G|² of each step, as `variance` does S."""
        weighted = np.asarray(local_squared_norms) @ self.gradient_local
        return np.asarray(weighted + self.gradient_global * np.asarray(global_squared_norm))


NoiseEstimator = Callable[[Sequence[int]], NormWeights]
"""Turns the local batch sizes b_i into weights of the norms."""


def released(batch_sizes: Sequence[int]) -> NormWeights:
    """Weights by the matrices in the code that Cannikin's authors released (arXiv 2402.05302).

    Each device estimates on its own, G_i = (B|g|² - b_i|g_i|²)/(B - b_i) and S_i = b_i·B/(B - b_i)·(|g_i|² - |g|²), and
    the estimates are combined with weights A⁻¹1/(1ᵀA⁻¹1), of a matrix A for each. The weights sum to one, so the result
    has no bias; but they are not those of least variance where batches differ, and some may be negative.

    Raises:
        InputError: Fewer than two devices, or a batch without samples.
    """
    batch = _checked(batch_sizes)
    total = batch.sum()
    rest = total - batch
    for_gradient = _combination(_gradient_matrix(batch))
    for_variance = _combination(_variance_matrix(batch)) * batch * total / rest
    return NormWeights(
        variance_local=for_variance,
        variance_global=-float(for_variance.sum()),
        gradient_local=-for_gradient * batch / rest,
        gradient_global=float((for_gradient * total / rest).sum()),
    )


def minimum_variance(batch_sizes: Sequence[int]) -> NormWeights:
    """S = Σ b_i(|g_i|² - |g|²)/(n - 1) and |G|² = |g|² - S/B: the least variance where gradients are normal.

    Since Σ b_i(|g_i|² - |g|²) = Σ b_i|g_i - g|², this S is the sample variance between the n devices, and never
    negative. It needs the sum of b_i|g_i|² over the devices and nothing else: one number to all-reduce.

    Raises:
        InputError: Fewer than two devices, or a batch without samples.
    """
    batch = _checked(batch_sizes)
    total, others = batch.sum(), len(batch) - 1
    return NormWeights(
        variance_local=batch / others,
        variance_global=float(-total / others),
        gradient_local=-batch / (total * others),
        gradient_global=(others + 1) / others,
    )


ESTIMATORS: Mapping[str, NoiseEstimator] = MappingProxyType(
    {"released": released, "minimum-variance": minimum_variance}
)
"""Estimators by name."""


def estimate_noise(
    estimator: str, batch_sizes: Sequence[int], local_squared_norms: Sequence[float], global_squared_norm: float
) -> NoiseEstimate:
    """Return what one step says.

    Args:
        estimator: A key of `ESTIMATORS`.
        batch_sizes: b_i, samples per device.
        local_squared_norms: |g_i|², of the mean gradient of a device's samples, in squared units of the gradient.
        global_squared_norm: |g|², of the mean gradient of all samples of the step, likewise.

    Raises:
        InputError: Unknown estimator, fewer than two devices, a batch without samples, or not one norm per device.
    """
    weights = find_by_name(estimator, ESTIMATORS, "estimator of the noise scale")(batch_sizes)
    if len(local_squared_norms) != len(batch_sizes):
        raise InputError(
            f"{len(local_squared_norms)} squared norms for {len(batch_sizes)} local batches",
            valid="give one for each device",
        )
    return NoiseEstimate(
        float(weights.variance(local_squared_norms, global_squared_norm)),
        float(weights.squared_gradient(local_squared_norms, global_squared_norm)),
    )


@dataclass(frozen=True, slots=True)
class SmoothedNoise:
    """A running estimate: S and |G|² are averaged, each for itself, and only then divided.

    A ratio of two noisy numbers is biased, and far off where |G|² comes near zero; the ratio of their averages is less
    so. Averages are exponential; divided by their total weight, they lean on no value from before the first step.

    Attributes:
        decay: What a step's weight is multiplied by with each further step, 0 to below 1, without unit.
        weight: The weights of all steps so far, summed, without unit.
        weighted: The estimates of all steps, multiplied by their weights and summed.
    """

    decay: float = 0.9
    weight: float = 0.0
    weighted: NoiseEstimate = NoiseEstimate(0.0, 0.0)

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise InputError(f"a decay of {self.decay}", valid="it is at least 0 and below 1")

    def update(self, estimate: NoiseEstimate) -> "SmoothedNoise":
        """Return the running estimate with one more step."""
        share = 1 - self.decay
        weighted = NoiseEstimate(
            self.decay * self.weighted.variance + share * estimate.variance,
            self.decay * self.weighted.squared_gradient + share * estimate.squared_gradient,
        )
        return SmoothedNoise(self.decay, self.decay * self.weight + share, weighted)

    @property
    def estimate(self) -> NoiseEstimate | None:
        """The averages of S and |G|²; None before the first step."""
        if self.weight == 0:
            return None
        return NoiseEstimate(self.weighted.variance / self.weight, self.weighted.squared_gradient / self.weight)


def _checked(batch_sizes: Sequence[int]) -> Row:
    if len(batch_sizes) < 2:
        raise InputError(
            f"{len(batch_sizes)} local batch", valid="the noise scale needs two devices or more to compare"
        )
    if min(batch_sizes) < 1:
        raise InputError(
            f"local batches of {', '.join(map(str, batch_sizes))} samples", valid="every device needs at least one"
        )
    return np.array(batch_sizes, dtype=np.float64)


def _combination(matrix: Row) -> Row:
    """Return weights A⁻¹1/(1ᵀA⁻¹1)."""
    solved = np.linalg.solve(matrix, np.ones(len(matrix)))
    return np.asarray(solved / solved.sum(), dtype=np.float64)


def _gradient_matrix(batch: Row) -> Row:
    """Return A_G of the released code."""
    total = float(batch.sum())
    rest, squares = total - batch, batch**2
    matrix: Row = (total**2 - squares[:, None] - squares) / (total * np.outer(rest, rest))
    np.fill_diagonal(matrix, (total + 2 * batch) / (total * rest))
    return matrix


def _variance_matrix(batch: Row) -> Row:
    """Return A_S of the released code."""
    total = float(batch.sum())
    rest = total - batch
    matrix: Row = np.outer(batch, batch) * (total - batch[:, None] - batch) / np.outer(rest, rest)
    np.fill_diagonal(matrix, total * batch / rest)
    return matrix


@dataclass(frozen=True, slots=True)
class GradientNorms:
    """Squared norms of one step's mean gradients, in squared units of the gradient.

    Attributes:
        step: Index.
        batch_sizes: b_i, samples of each device that took some.
        local_squared_norms: |g_i|², of the mean gradient of a device's samples.
        global_squared_norm: |g|², of the mean gradient of all samples of the step.
    """

    step: int
    batch_sizes: tuple[int, ...]
    local_squared_norms: tuple[float, ...]
    global_squared_norm: float

    def estimate(self, estimator: str) -> NoiseEstimate:
        """Return what this step says by one of `planner.runs.gradient_noise.ESTIMATORS`."""
        return estimate_noise(estimator, self.batch_sizes, self.local_squared_norms, self.global_squared_norm)


def smoothed_noise(steps: Iterable[GradientNorms], estimator: str) -> NoiseEstimate | None:
    """Return the running estimate after all steps; None where none was measured."""
    smoothed = SmoothedNoise()
    for norms in steps:
        smoothed = smoothed.update(norms.estimate(estimator))
    return smoothed.estimate
