"""Fits the law of `planner.scenario.convergence` to the losses of runs, with published laws as priors."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from planner.runs.published_laws import PRIOR_PRICE
from planner.scenario.convergence import (
    ALLREDUCE,
    SHAPE,
    Floats,
    LossLaw,
    TrainingMode,
    log_losses,
)
from traces.common.errors import InputError

# Wide priors of the shape: the floor is a half of the lowest loss, the exponent a third, the critical batch ten times
# the largest one, and the price does not grow. Means are found from the runs; these are standard deviations.
_DEVIATIONS = (1.0, 1.0, 0.7, 2.0, 0.5)
_EXPONENT = 0.35
# Short runs of small models differ by so much more from published prices than these differ from each other.
_WIDENED = 3.0
# Deviation of the corrections of the power law, logarithm of the loss.
_CORRECTION = 0.05

# The losses of a run that the fit takes begin after this share of it: what outer steps cost changes in a run, and
# losses to come are more like the late ones. Together they count as one: they go up and down together.
FIRST_SHARE = 0.3
# Number of places between the first and the last of them at which the power law is corrected.
_KNOTS = 8

_LEAST_NOISE, _ROUNDS = 1e-4, 4

# Number of laws that are drawn from the posterior.
DRAWS = 100


@dataclass(frozen=True, slots=True)
class LossCurve:
    """The loss of a run at some steps.

    Attributes:
        mode: How the run trained.
        steps: Numbers of finished steps, rising.
        losses: The loss after each of them.
    """

    mode: TrainingMode
    steps: tuple[int, ...]
    losses: tuple[float, ...]


def fit_law(curves: Sequence[LossCurve], source: str, count: int = DRAWS) -> LossLaw:
    """Return the law of the highest posterior, with ``count`` draws from it; with 0, it has no uncertainty.

    The residual of a loss is the difference of logarithms; its deviation is estimated from the residuals. For a draw,
    the losses of each run and the prior are disturbed by their deviations, and the law is fitted to them (randomize
    then optimize; Bardsley et al., SIAM J. Sci. Comput. 36, 2014).

    Raises:
        InputError: No curve is from synchronous training, to whose loss the others are compared; or a loss is not a
            positive number.
    """
    if not any(curve.mode.method == ALLREDUCE for curve in curves):
        raise InputError(
            f"no run has the method '{ALLREDUCE}'", valid="measure it, too: other losses are relative to it"
        )
    if not all(math.isfinite(loss) and loss > 0 for curve in curves for loss in curve.losses):
        raise InputError("a loss is not above zero, or not finite", valid="lower the learning rate, or train longer")
    points = _Points.of(curves)
    mean, deviation = _prior(curves)
    noise, found = 0.05, mean
    for _ in range(_ROUNDS):
        found = points.fitted(mean, deviation, noise, found)
        noise = max(_LEAST_NOISE, math.sqrt(float(np.mean(np.square(points.residuals(found))))))
    random = np.random.default_rng(0)
    draws = [
        points.disturbed(random, noise).fitted(random.normal(mean, deviation), deviation, noise, found)
        for _ in range(count)
    ]
    modes = [curve.mode for curve in curves]
    return LossLaw(
        source,
        points.reference,
        tuple(found.tolist()),
        tuple(tuple(each.tolist()) for each in draws) or (tuple(found.tolist()),),
        tuple(dict.fromkeys(mode.method for mode in modes)),
        tuple(dict.fromkeys(mode.compression for mode in modes)),
        max(mode.interval_steps for mode in modes),
        max(mode.workers for mode in modes),
        min(loss for curve in curves for loss in curve.losses),
        tuple(dict.fromkeys(mode.momentum for mode in modes if mode.method != ALLREDUCE)),
        tuple(points.knots.tolist()),
    )


def held_out_errors(curves: Sequence[LossCurve], source: str) -> Mapping[tuple[int, int], float]:
    """Return by workers and interval the relative error of the steps to the last loss of runs that the fit left out.

    The error is the median over the runs with this number of workers and interval. A loss that the law never reaches
    counts as infinite.
    """
    errors: dict[tuple[int, int], float] = {}
    for pair in dict.fromkeys((c.mode.workers, c.mode.interval_steps) for c in curves if c.mode.method != ALLREDUCE):
        out = [curve for curve in curves if (curve.mode.workers, curve.mode.interval_steps) == pair]
        law = fit_law([curve for curve in curves if curve not in out], source, count=0)
        found = [abs(law.steps_to(c.losses[-1], c.mode).expected / c.steps[-1] - 1) for c in out]
        errors[pair] = float(np.median(found))
    return errors


def _prior(curves: Sequence[LossCurve]) -> tuple[Floats, Floats]:
    """Return mean and deviation of the prior of each parameter."""
    lowest = min(min(curve.losses) for curve in curves)
    batch = max(curve.mode.global_batch for curve in curves)
    shape = (math.log(lowest / 2), math.log(lowest / 2), math.log(_EXPONENT), -math.log(10 * batch), 0.0)
    assert len(shape) == len(SHAPE)
    mean = np.array([*shape, *(each for each, _ in PRIOR_PRICE), *([0.0] * _KNOTS)])
    return mean, np.array([*_DEVIATIONS, *(_WIDENED * each for _, each in PRIOR_PRICE), *([_CORRECTION] * _KNOTS)])


@dataclass(frozen=True, eq=False)
class _Points:
    """The points of all curves in arrays, [points], the numbers of their runs, and where the power law is corrected."""

    log_losses: Floats
    terms: Floats
    batches: Floats
    steps: Floats
    runs: NDArray[np.int64]
    reference: float
    knots: Floats

    @classmethod
    def of(cls, curves: Sequence[LossCurve]) -> "_Points":
        counts = [len(curve.steps) for curve in curves]
        batches = np.repeat([float(curve.mode.global_batch) for curve in curves], counts)
        steps = np.array([step for curve in curves for step in curve.steps], np.float64)
        samples = steps * batches
        reference = float(np.exp(np.mean(np.log(samples))))
        synchronous = np.repeat([curve.mode.method == ALLREDUCE for curve in curves], counts)
        ends = np.log(samples[synchronous] / reference)
        return cls(
            np.log([loss for curve in curves for loss in curve.losses]),
            np.repeat([curve.mode.terms for curve in curves], counts, axis=0),
            batches,
            steps,
            np.repeat(np.arange(len(curves)), counts),
            reference,
            np.linspace(ends.min(), ends.max(), _KNOTS),
        )

    def residuals(self, parameters: Floats) -> Floats:
        expected = log_losses(parameters, self.terms, self.batches, self.steps, self.reference, self.knots)
        return np.asarray(self.log_losses - expected)

    def fitted(self, mean: Floats, deviation: Floats, noise: float, start: Floats) -> Floats:
        # The points of a run weigh together as much as one.
        scale = noise * np.sqrt(np.bincount(self.runs))[self.runs]

        def residuals(parameters: Floats) -> Floats:
            return np.concatenate([self.residuals(parameters) / scale, (parameters - mean) / deviation])

        return np.asarray(least_squares(residuals, start, x_scale=deviation).x)

    def disturbed(self, random: np.random.Generator, noise: float) -> "_Points":
        """Return the points with all losses of a run moved together, and each point on its own, by ``noise``."""
        together = random.normal(0, noise, self.runs[-1] + 1)[self.runs]
        return replace(self, log_losses=self.log_losses + together + random.normal(0, noise, len(self.runs)))
