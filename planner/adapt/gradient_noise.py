"""The gradient noise scale, estimated from the squared norms of local and global gradients.

In one step, n devices take b_1, ..., b_n samples, B in all. g_i is the mean gradient of the samples of device i, g the
mean gradient of all B samples, and G the true gradient. S is the variance of the gradient of one sample, summed over
all parameters. The noise scale is S / |G|² (McCandlish et al., arXiv 1812.06162).
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.plan.plan import Plan
from traces.common.errors import InputError, find_by_name

Row = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class NoiseEstimate:
    """An estimate of S and |G|², from one step or smoothed over several.

    Attributes:
        variance: Estimate of S, the variance of a sample's gradient, in squared units of the gradient.
        squared_gradient: Estimate of |G|², the squared norm of the true gradient, in squared units of the gradient. An
            unbiased estimate may be negative.
    """

    variance: float
    squared_gradient: float

    @property
    def noise_scale(self) -> float:
        """S / |G|², in samples; infinite if the estimate of |G|² is not positive."""
        if self.squared_gradient <= 0:
            return math.inf
        return max(self.variance, 0.0) / self.squared_gradient


@dataclass(frozen=True, eq=False, slots=True)
class NormWeights:
    """Weights with which squared norms are summed to estimates of S and |G|²; they depend on the batch sizes alone.

    Attributes:
        variance_local: Weights of |g_i|² in S, [devices].
        variance_global: Weight of |g|² in S.
        gradient_local: Weights of |g_i|² in |G|², [devices].
        gradient_global: Weight of |g|² in |G|².
    """

    variance_local: Row
    variance_global: float
    gradient_local: Row
    gradient_global: float

    def variance(self, local_squared_norms: ArrayLike, global_squared_norm: ArrayLike) -> Row:
        """Return the estimate of S of each step, [steps]; without the axis ``steps`` in the arguments, of one step.

        Args:
            local_squared_norms: |g_i|², [steps, devices].
            global_squared_norm: |g|², [steps].
        """
        weighted = np.asarray(local_squared_norms) @ self.variance_local
        return np.asarray(weighted + self.variance_global * np.asarray(global_squared_norm))

    def squared_gradient(self, local_squared_norms: ArrayLike, global_squared_norm: ArrayLike) -> Row:
        """Return the estimate of |G|² of each step, [steps], from the same arguments as `variance`."""
        weighted = np.asarray(local_squared_norms) @ self.gradient_local
        return np.asarray(weighted + self.gradient_global * np.asarray(global_squared_norm))


NoiseEstimator = Callable[[Sequence[int]], NormWeights]
"""Function from the local batch sizes b_i, in samples, to the weights of the squared norms."""


def released(batch_sizes: Sequence[int]) -> NormWeights:
    """Return the weights of the code that Cannikin's authors released (arXiv 2402.05302); symbols as in the module.

    Every device i estimates |G|² by G_i = (B|g|² - b_i|g_i|²)/(B - b_i), S by S_i = b_i·B/(B - b_i)·(|g_i|² - |g|²).
    The estimates of all devices are averaged with the weights A⁻¹1/(1ᵀA⁻¹1), where 1 is the vector of ones, and A is
    the matrix of `_gradient_matrix` for |G|² and of `_variance_matrix` for S. The weights sum to one, so the average is
    unbiased. If batches differ, its variance is not the least possible, and some weights may be negative.

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
    """Return the weights with the least variance of the estimates for normally distributed gradients.

    The estimates are S = Σ b_i(|g_i|² - |g|²)/(n - 1) and |G|² = |g|² - S/B; symbols as in the module. Since
    Σ b_i(|g_i|² - |g|²) = Σ b_i|g_i - g|², this S is the sample variance between the n devices, and never negative. The
    devices need to all-reduce only one number, the sum of b_i|g_i|².

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


@dataclass(frozen=True, slots=True)
class SmoothedNoise:
    """A running estimate: exponential averages of S and of |G|² over the steps so far.

    The noise scale is the ratio of the averages of S and |G|², which has less bias than the average of ratios. Averages
    are divided by their total weight, as in Adam, so that they start without bias towards zero.

    Attributes:
        decay: Factor by which each new step multiplies the weights of earlier steps, at least 0 and below 1.
        weight: Sum of the weights of all steps so far, without unit.
        weighted: Sum of the estimates of all steps, each multiplied by its weight.
    """

    decay: float = 0.9
    weight: float = 0.0
    weighted: NoiseEstimate = NoiseEstimate(0.0, 0.0)

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise InputError(f"{self.decay} is not allowed", where="decay", valid="give at least 0 and less than 1")

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
            f"the noise scale cannot be estimated from {len(batch_sizes)} device",
            where="batch_sizes",
            valid="give the samples of two devices or more",
        )
    if min(batch_sizes) < 1:
        raise InputError(
            f"local batches of {', '.join(map(str, batch_sizes))} samples are not allowed",
            where="batch_sizes",
            valid="give every device at least one sample",
        )
    return np.array(batch_sizes, dtype=np.float64)


def _combination(matrix: Row) -> Row:
    """Return the weights A⁻¹1/(1ᵀA⁻¹1) for a matrix A, [devices]; see `released`."""
    solved = np.linalg.solve(matrix, np.ones(len(matrix)))
    return np.asarray(solved / solved.sum(), dtype=np.float64)


def _gradient_matrix(batch: Row) -> Row:
    """Return the matrix A for |G|² in the formulas of `released`, [devices, devices]."""
    total = float(batch.sum())
    rest, squares = total - batch, batch**2
    matrix: Row = (total**2 - squares[:, None] - squares) / (total * np.outer(rest, rest))
    np.fill_diagonal(matrix, (total + 2 * batch) / (total * rest))
    return matrix


def _variance_matrix(batch: Row) -> Row:
    """Return the matrix A for S in the formulas of `released`, [devices, devices]."""
    total = float(batch.sum())
    rest = total - batch
    matrix: Row = np.outer(batch, batch) * (total - batch[:, None] - batch) / np.outer(rest, rest)
    np.fill_diagonal(matrix, total * batch / rest)
    return matrix


@dataclass(frozen=True, slots=True)
class LocalNorms:
    """One device's part of `GradientNorms`, in squared units of the gradient.

    Attributes:
        samples: b_i, the number of samples of the device.
        local_squared_norm: |g_i|², squared norm of the mean gradient of these samples.
        global_squared_norm: |g|², squared norm of the mean gradient of all samples of the step.
    """

    step: int
    samples: int
    local_squared_norm: float
    global_squared_norm: float


# A single device has no other gradient to compare with.
_FEWEST_DEVICES = 2


def has_local_norms(plan: Plan) -> bool:
    """Return whether each device computes the gradient of the whole model, so that the devices' norms can be compared.

    Devices of a tensor-parallel group do not.
    """
    whole = all(len(pipeline.stages) == 1 for pipeline in plan.pipelines)
    alone = not any(replica.partners for replica in plan.replicas)
    return plan.synchronisation.method == "allreduce" and whole and alone and len(plan.replicas) >= _FEWEST_DEVICES


@dataclass(frozen=True, slots=True)
class GradientNorms:
    """Squared norms of one step's mean gradients, in squared units of the gradient.

    Attributes:
        step: Index of the step.
        batch_sizes: Number of samples b_i of each device that took part in the step; [devices].
        local_squared_norms: |g_i|², where g_i is the mean gradient of a device's samples; [devices].
        global_squared_norm: |g|², where g is the mean gradient of all samples of the step.
    """

    step: int
    batch_sizes: tuple[int, ...]
    local_squared_norms: tuple[float, ...]
    global_squared_norm: float

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "GradientNorms":
        """Return the norms whose `dataclasses.asdict` is in ``data``, which may have more entries."""
        local = tuple(data["local_squared_norms"])
        return cls(data["step"], tuple(data["batch_sizes"]), local, data["global_squared_norm"])

    @classmethod
    def of_devices(cls, parts: Sequence[LocalNorms]) -> "GradientNorms | None":
        """Return the norms of a step from those of its devices; None if fewer than two devices took part."""
        if len(parts) < _FEWEST_DEVICES:
            return None
        samples = tuple(part.samples for part in parts)
        local = tuple(part.local_squared_norm for part in parts)
        return cls(parts[0].step, samples, local, parts[0].global_squared_norm)

    def estimate(self, estimator: str) -> NoiseEstimate:
        """Return the estimate of S and |G|² from this step; ``estimator`` is a key of `ESTIMATORS`.

        Raises:
            InputError: The estimator is unknown, there are fewer than two devices, a batch has no samples, or there is
                not one norm per device.
        """
        weights = find_by_name(estimator, ESTIMATORS, "estimator of the noise scale")(self.batch_sizes)
        norms = self.local_squared_norms
        if len(norms) != len(self.batch_sizes):
            raise InputError(
                f"{len(norms)} squared norms do not fit {len(self.batch_sizes)} local batches",
                where="local_squared_norms",
                valid=f"give {len(self.batch_sizes)}, one for each device",
            )
        variance = weights.variance(norms, self.global_squared_norm)
        return NoiseEstimate(float(variance), float(weights.squared_gradient(norms, self.global_squared_norm)))


def smoothed_noise(steps: Iterable[GradientNorms], estimator: str) -> NoiseEstimate | None:
    """Return the running estimate after all steps; None without steps. ``estimator`` is a key of `ESTIMATORS`."""
    smoothed = SmoothedNoise()
    for norms in steps:
        smoothed = smoothed.update(norms.estimate(estimator))
    return smoothed.estimate
