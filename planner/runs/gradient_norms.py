"""What a run measures of the gradient noise: the squared norms of each step's gradients, local and global."""

from collections.abc import Iterable
from dataclasses import dataclass

from planner.runs.noise_scale import NoiseEstimate, SmoothedNoise, estimate_noise


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
        """Return what this step says by one of `planner.runs.noise_scale.ESTIMATORS`."""
        return estimate_noise(estimator, self.batch_sizes, self.local_squared_norms, self.global_squared_norm)


def smoothed_noise(steps: Iterable[GradientNorms], estimator: str) -> NoiseEstimate | None:
    """Return the running estimate after all steps; None where none was measured."""
    smoothed = SmoothedNoise()
    for norms in steps:
        smoothed = smoothed.update(norms.estimate(estimator))
    return smoothed.estimate
