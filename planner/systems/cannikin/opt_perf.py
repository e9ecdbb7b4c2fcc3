"""OptPerf: the division of a batch over unlike devices with the shortest data-parallel step.

From Cannikin (arXiv 2402.05302). A step ends with its last device. In the best division all devices end together,
except those that memory limits or that are too slow for a sample. The samples that device i can process in T are the
smaller of two inverses::

    b_i(T) = min((T - T_u - s_i - m_i) / (q_i + k_i),  (T - T_u - T_o - s_i - gamma * m_i) / (q_i + gamma * k_i))

clipped to the samples that fit into its memory. All b_i(T) grow with T, so the T at which they add up to the batch is
found by bisection. The paper instead guesses which devices wait for sums, solves for T, and guesses again; both give
the same result.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from planner.systems.cannikin.step_model import NodeSpeed, SumTimes
from traces.common.errors import InputError


@dataclass(frozen=True, slots=True)
class Division:
    """A division of a batch.

    Attributes:
        samples: Samples of each device; one without any takes no part.
        time_s: Time of the step by the model, seconds.
    """

    samples: tuple[int, ...]
    time_s: float


def device_time_s(samples: float, speed: NodeSpeed, sums: SumTimes) -> float:
    """Return T_i: the time until a device with ``samples`` ends its last sum if no other device is later, seconds."""
    forward_s, backward_s = speed.forward_s(samples), speed.backward_s(samples)
    waits_s = forward_s + sums.first_bucket_share * backward_s + sums.overlapped_s
    return max(forward_s + backward_s, waits_s) + sums.last_s


def batch_time_s(samples: Sequence[float], speeds: Sequence[NodeSpeed], sums: SumTimes) -> float:
    """Return the time of a step, which is that of its last device, seconds; devices without samples are left out."""
    return max(device_time_s(own, speed, sums) for own, speed in zip(samples, speeds, strict=True) if own > 0)


def real_division(
    batch: float, speeds: Sequence[NodeSpeed], sums: SumTimes, most: Sequence[int]
) -> tuple[tuple[float, ...], float]:
    """Return the best division into fractions of samples, and the time of its step, seconds.

    Args:
        batch: Samples to divide, above zero.
        speeds: Speed of each device.
        sums: Times of the gradient sums.
        most: Samples that fit into the memory of each device.

    Raises:
        InputError: Memory cannot hold the batch.
    """
    if not 0 < batch <= sum(most):
        raise InputError(
            f"a batch of {batch:g} samples does not fit on {len(most)} devices",
            valid=f"1 to {sum(most)} samples, which is what fits into their memory: {', '.join(map(str, most))}",
        )

    def samples_at(time_s: float) -> list[float]:
        return [
            _samples_within(time_s - sums.last_s, speed, sums, limit) for speed, limit in zip(speeds, most, strict=True)
        ]

    early_s = sums.last_s
    late_s = max(device_time_s(limit, speed, sums) for speed, limit in zip(speeds, most, strict=True))
    # The bisection ends when no double lies between the two.
    while early_s < (middle_s := (early_s + late_s) / 2) < late_s:
        if sum(samples_at(middle_s)) >= batch:
            late_s = middle_s
        else:
            early_s = middle_s
    return tuple(samples_at(late_s)), late_s


def opt_perf(batch: int, speeds: Sequence[NodeSpeed], sums: SumTimes, most: Sequence[int], least: int = 0) -> Division:
    """Return the best division into whole samples.

    Each device gets the whole part of its share, and the rest goes sample by sample to the device that ends first with
    one more.

    Args:
        batch: Samples to divide, above zero.
        speeds: Speed of each device.
        sums: Times of the gradient sums.
        most: Samples that fit into the memory of each device.
        least: Samples that every device must have.

    Raises:
        InputError: Memory cannot hold the batch, or there are not enough samples for all devices.
    """
    if batch < least * len(speeds) or min(most) < least:
        raise InputError(
            f"a batch of {batch} samples on {len(speeds)} devices, of which each must have {least} and can have "
            f"{', '.join(map(str, most))}",
            valid=f"{least * len(speeds)} samples or more, and room for {least} on every device",
        )
    shares, _ = real_division(batch, speeds, sums, most)
    samples = [max(least, math.floor(share + 1e-9)) for share in shares]
    # Where the least number is more than is best for some devices, the others have less.
    while sum(samples) > batch:
        times_s = [
            device_time_s(own, speed, sums) if own > least else -math.inf
            for own, speed in zip(samples, speeds, strict=True)
        ]
        samples[times_s.index(max(times_s))] -= 1
    _place(batch - sum(samples), samples, speeds, sums, most)
    return Division(tuple(samples), batch_time_s(samples, speeds, sums))


def _samples_within(rest_s: float, speed: NodeSpeed, sums: SumTimes, limit: int) -> float:
    """Return the samples that a device can process before the last bucket's sum has to begin."""
    share = sums.first_bucket_share
    alone_s = rest_s - speed.forward_fixed_s - speed.backward_fixed_s
    waiting_s = rest_s - sums.overlapped_s - speed.forward_fixed_s - share * speed.backward_fixed_s
    slopes_s = (
        speed.forward_per_sample_s + speed.backward_per_sample_s,
        speed.forward_per_sample_s + share * speed.backward_per_sample_s,
    )
    samples = float(limit)
    for left_s, slope_s in zip((alone_s, waiting_s), slopes_s, strict=True):
        if left_s < 0:
            return 0.0
        if slope_s > 0:
            samples = min(samples, left_s / slope_s)
    return samples


def _place(count: int, samples: list[int], speeds: Sequence[NodeSpeed], sums: SumTimes, most: Sequence[int]) -> None:
    """Give the remaining samples, one at a time, to the device that ends first with one more."""
    ends = [
        (device_time_s(own + 1, speed, sums), device)
        for device, (own, speed) in enumerate(zip(samples, speeds, strict=True))
        if own < most[device]
    ]
    heapq.heapify(ends)
    for _ in range(count):
        _, device = heapq.heappop(ends)
        samples[device] += 1
        if samples[device] < most[device]:
            heapq.heappush(ends, (device_time_s(samples[device] + 1, speeds[device], sums), device))
