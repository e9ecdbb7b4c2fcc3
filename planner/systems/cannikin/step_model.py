"""The model of a data-parallel step: the speed of each device, and the times of gradient sums, bucket by bucket.

The model and its symbols are those of Cannikin (arXiv 2402.05302).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.cost.network import ConstantRatePath
from planner.cost.synchronisation import GradientSync, gradient_syncs
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from traces.common.errors import InputError


@dataclass(frozen=True, slots=True)
class NodeSpeed:
    """Compute time of one device for b samples: q b + s seconds before backward, and k b + m seconds of backward.

    Attributes:
        forward_per_sample_s: Slope q, seconds per sample.
        forward_fixed_s: Intercept s, seconds.
        backward_per_sample_s: Slope k, seconds per sample.
        backward_fixed_s: Intercept m, seconds.
    """

    forward_per_sample_s: float
    forward_fixed_s: float
    backward_per_sample_s: float
    backward_fixed_s: float

    def forward_s(self, samples: float) -> float:
        """Return the time before the backward of ``samples`` samples, q b + s, seconds."""
        return self.forward_per_sample_s * samples + self.forward_fixed_s

    def backward_s(self, samples: float) -> float:
        """Return the time of the backward of ``samples`` samples, k b + m, seconds."""
        return self.backward_per_sample_s * samples + self.backward_fixed_s

    def over_step(self, microbatches: int, update_s: float = 0.0) -> "NodeSpeed":
        """Return the speed of a whole step of ``microbatches``, as a function of the samples of one microbatch.

        Only the backward of the last microbatch overlaps with gradient sums. All earlier compute, and the optimizer's
        update of the previous step, which takes ``update_s``, count as time before backward.
        """
        before = microbatches - 1
        return replace(
            self,
            forward_per_sample_s=microbatches * self.forward_per_sample_s + before * self.backward_per_sample_s,
            forward_fixed_s=microbatches * self.forward_fixed_s + before * self.backward_fixed_s + update_s,
        )


@dataclass(frozen=True, slots=True)
class SumTimes:
    """Times of a step's gradient sums, and the moment at which the first can begin.

    Attributes:
        first_bucket_share: Share gamma of backward after which the first bucket's gradients are complete.
        overlapped_s: Time T_o of all sums but the last bucket's, seconds.
        last_s: Time T_u of the last bucket's sum, which begins when backward has ended, seconds.
    """

    first_bucket_share: float
    overlapped_s: float
    last_s: float

    @property
    def total_s(self) -> float:
        """Time of all sums, seconds."""
        return self.overlapped_s + self.last_s


# Sums that take no time, to balance compute alone.
NO_SUMS = SumTimes(1.0, 0.0, 0.0)


def fit_line(samples: Sequence[float], times_s: Sequence[float]) -> tuple[float, float]:
    """Return slope, in seconds per sample, and intercept, in seconds, of the line with the least squared errors.

    Errors are relative, since noise grows with the measured time. Neither result is negative: the line goes through the
    origin if all points have the same number of samples or the intercept would be negative, and is level if the slope
    would be negative.

    Raises:
        InputError: There are no points, or a number of samples or a time is not above zero.
    """
    counts, seconds = np.asarray(samples, np.float64), np.asarray(times_s, np.float64)
    if not len(counts) or counts.min() <= 0 or seconds.min() <= 0:
        raise InputError(
            f"a line cannot be fitted to times {list(times_s)} s for samples {list(samples)}",
            where="speed of a device",
            valid="give at least one point, with samples and time above zero",
        )
    rates = counts / seconds
    through_origin = float(rates.sum() / (rates**2).sum())
    if counts.min() == counts.max():
        return through_origin, 0.0
    rows = np.stack([counts, np.ones_like(counts)], axis=1) / seconds[:, None]
    (slope, intercept), *_ = np.linalg.lstsq(rows, np.ones_like(counts), rcond=None)
    if intercept < 0:
        return through_origin, 0.0
    if slope < 0:
        return 0.0, float((1 / seconds).sum() / (1 / seconds**2).sum())
    return float(slope), float(intercept)


def fit_speed(samples: Sequence[float], forward_s: Sequence[float], backward_s: Sequence[float]) -> NodeSpeed:
    """Return the speed whose two lines are fitted to measured times by `fit_line`.

    Args:
        samples: Samples of each point.
        forward_s: Time before backward of each point, seconds.
        backward_s: Time of backward of each point, seconds.

    Raises:
        InputError: As `fit_line`.
    """
    return NodeSpeed(*fit_line(samples, forward_s), *fit_line(samples, backward_s))


def sum_times(plan: Plan, scenario: Scenario, path: Callable[[str, str], ConstantRatePath]) -> SumTimes:
    """Return the times of the gradient sums of a plan of one stage.

    Gamma, `SumTimes.first_bucket_share`, depends slightly on the device and its samples. The result is the mean over
    the devices that have samples, each with its own part of the largest microbatch.

    Args:
        plan: Plan with one pipeline of one stage.
        scenario: Scenario that the plan is for.
        path: Function that returns the path from one device to another.
    """
    syncs = gradient_syncs(plan, scenario)
    if not syncs:
        return NO_SUMS
    element_bytes = scenario.training.element_bytes
    times_s = [sum_time_s(sync, element_bytes, path) for sync in syncs]
    if not plan.synchronisation.bucket_bytes:
        return SumTimes(1.0, 0.0, sum(times_s))
    share = _first_bucket_share(syncs[0].first_layer, plan, scenario) if len(syncs) > 1 else 1.0
    return SumTimes(share, sum(times_s[:-1]), times_s[-1])


def sum_time_s(sync: GradientSync, element_bytes: int, path: Callable[[str, str], ConstantRatePath]) -> float:
    """Return the time of a sum that all its devices begin at once, seconds: the slowest message per round, added."""
    rounds: dict[int, float] = {}
    for device in sync.devices:
        for exchange in sync.exchanges(device):
            if exchange.send_to is not None:
                hop = path(device, sync.devices[exchange.send_to])
                took_s = hop.delivery_s(exchange.send_elements * element_bytes)
                rounds[exchange.round] = max(rounds.get(exchange.round, 0.0), took_s)
    return sum(rounds.values())


def _first_bucket_share(first_layer: int, plan: Plan, scenario: Scenario) -> float:
    (pipeline,) = plan.pipelines
    (stage,) = pipeline.stages
    shares: list[float] = []
    for replica, samples in zip(stage.replicas, stage.most_samples(pipeline.microbatches), strict=True):
        kind = scenario.cluster.by_name[replica.device].kind
        whole_s = scenario.model.times(stage.first_layer, stage.end_layer, kind, samples).backward_s
        if whole_s > 0:
            shares.append(scenario.model.times(first_layer, stage.end_layer, kind, samples).backward_s / whole_s)
    return sum(shares) / len(shares) if shares else 1.0
