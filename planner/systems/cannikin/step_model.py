"""Cannikin's model of a data-parallel step (arXiv 2402.05302): device speeds, and times of gradient sums by bucket."""

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
    """Compute time of one device as two lines: b samples take q b + s seconds before backward, k b + m in backward.

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
        """Return the time before the backward of ``samples`` samples, seconds."""
        return self.forward_per_sample_s * samples + self.forward_fixed_s

    def backward_s(self, samples: float) -> float:
        """Return the time of the backward of ``samples`` samples, seconds."""
        return self.backward_per_sample_s * samples + self.backward_fixed_s

    def over_step(self, microbatches: int, update_s: float = 0.0) -> "NodeSpeed":
        """Return the speed of a step of several microbatches, where b is the number of samples of one microbatch.

        Only the backward of the last microbatch counts as backward, since only this one overlaps with gradient sums.
        All compute before it counts as time before backward, and so does the previous step's optimizer update, which
        takes ``update_s`` seconds.
        """
        before = microbatches - 1
        return replace(
            self,
            forward_per_sample_s=microbatches * self.forward_per_sample_s + before * self.backward_per_sample_s,
            forward_fixed_s=microbatches * self.forward_fixed_s + before * self.backward_fixed_s + update_s,
        )


@dataclass(frozen=True, slots=True)
class SumTimes:
    """Times of a step's gradient sums, which are made bucket by bucket.

    Attributes:
        first_bucket_share: Share of backward after which the first bucket's gradients are complete (gamma).
        overlapped_s: Time of all buckets' sums but the last, which overlap with backward, seconds (T_o).
        last_s: Time of the last bucket's sum, which begins when backward has ended, seconds (T_u).
    """

    first_bucket_share: float
    overlapped_s: float
    last_s: float

    @property
    def total_s(self) -> float:
        """Time of all sums, seconds."""
        return self.overlapped_s + self.last_s


# Gradient sums that take no time, for a division by compute alone.
NO_SUMS = SumTimes(1.0, 0.0, 0.0)


def fit_line(samples: Sequence[float], times_s: Sequence[float]) -> tuple[float, float]:
    """Return slope (seconds per sample) and intercept (seconds) of the line with the least squared relative errors.

    Relative errors are used because noise grows with the measured time. If the intercept would be negative or all
    points have the same number of samples, the line goes through the origin. If the slope would be negative, it is 0.

    Raises:
        InputError: There are no points, or a number of samples or a time is not above zero.
    """
    counts, seconds = np.asarray(samples, np.float64), np.asarray(times_s, np.float64)
    if not len(counts) or counts.min() <= 0 or seconds.min() <= 0:
        raise InputError(
            f"no line can be fitted to times_s {list(times_s)} for samples {list(samples)}",
            where="speed of a device",
            valid="give at least one point, with a number of samples and a time above zero",
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
    """Return the lines fitted to the times of forward and of backward, in seconds, at the sample counts ``samples``."""
    return NodeSpeed(*fit_line(samples, forward_s), *fit_line(samples, backward_s))


def sum_times(plan: Plan, scenario: Scenario, path: Callable[[str, str], ConstantRatePath]) -> SumTimes:
    """Return the times of the gradient sums of a plan.

    The share of backward before the first bucket is ready differs slightly between devices: it is the mean over them.

    Args:
        plan: Plan with one pipeline of one stage.
        scenario: Scenario that the plan is for.
        path: Function from the names of two devices to the path between them.
    """
    syncs = gradient_syncs(plan, scenario)
    if not syncs:
        return NO_SUMS
    times_s = [sum_time_s(sync, path) for sync in syncs]
    if not plan.synchronisation.bucket_bytes:
        return SumTimes(1.0, 0.0, sum(times_s))
    share = _first_bucket_share(syncs[0].first_layer, plan, scenario) if len(syncs) > 1 else 1.0
    return SumTimes(share, sum(times_s[:-1]), times_s[-1])


def sum_time_s(sync: GradientSync, path: Callable[[str, str], ConstantRatePath]) -> float:
    """Return the time of one bucket's sum, seconds: the slowest message of each round, added over all rounds."""
    rounds: dict[int, float] = {}
    for device in sync.devices:
        for exchange in sync.exchanges(device):
            if exchange.send_to is not None:
                hop = path(device, sync.devices[exchange.send_to])
                took_s = hop.delivery_s(sync.sent_bytes(exchange), sync.shards)
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
