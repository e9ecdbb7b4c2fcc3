"""OptPerf: the division of a batch over unequal devices with the shortest data-parallel step (arXiv 2402.05302).

A step ends when its last device ends. In the fastest division all devices end at the same time T, except those that
memory limits and those that are too slow for a single sample. By the model of `planner.systems.cannikin.step_model`,
device i takes q_i b + s_i seconds before the backward of b samples and k_i b + m_i for the backward; gamma is the share
of backward before the first gradient bucket is ready, T_o and T_u are the times of the sums that overlap with backward
and of the last one. In T seconds, device i can process b_i(T) samples::

    b_i(T) = min((T - T_u - s_i - m_i) / (q_i + k_i),  (T - T_u - T_o - s_i - gamma * m_i) / (q_i + gamma * k_i))

clipped to 0 and to what fits into its memory. The first term limits devices that compute until the last sum begins, the
second those that wait for earlier sums. All b_i(T) grow with T, so a bisection finds the T at which their total is the
batch. The paper instead guesses which devices wait for sums, solves for T and corrects the guess; results are the same.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from planner.systems.cannikin.step_model import NodeSpeed, SumTimes
from traces.common.errors import InputError


@dataclass(frozen=True, slots=True)
class Division:
    """A division of a batch over devices.

    Attributes:
        samples: Number of samples of each device; a device with 0 samples takes no part.
        time_s: Time of the step, seconds, as `batch_time_s` predicts it.
    """

    samples: tuple[int, ...]
    time_s: float


def device_time_s(samples: float, speed: NodeSpeed, sums: SumTimes) -> float:
    """Return the time of a step of one device that takes ``samples`` and never waits for other devices, seconds."""
    forward_s, backward_s = speed.forward_s(samples), speed.backward_s(samples)
    waits_s = forward_s + sums.first_bucket_share * backward_s + sums.overlapped_s
    return max(forward_s + backward_s, waits_s) + sums.last_s


def batch_time_s(samples: Sequence[float], speeds: Sequence[NodeSpeed], sums: SumTimes) -> float:
    """Return the time of a step, seconds: the longest `device_time_s` of the devices that have samples."""
    return max(device_time_s(own, speed, sums) for own, speed in zip(samples, speeds, strict=True) if own > 0)


def real_division(
    batch: float, speeds: Sequence[NodeSpeed], sums: SumTimes, most: Sequence[int]
) -> tuple[tuple[float, ...], float]:
    """Return the fastest division with fractions of samples, as samples of each device, and its step time, seconds.

    Args:
        batch: Samples to divide, above zero.
        speeds: Speed of each device.
        sums: Times of the gradient sums.
        most: Number of samples that fit into the memory of each device.

    Raises:
        InputError: The batch does not fit into the memory of all devices together.
    """
    if not 0 < batch <= sum(most):
        raise InputError(
            f"a batch of {batch:g} samples does not fit on {len(most)} devices",
            where="division of the batch",
            valid=f"give 1 to {sum(most)} samples: the devices' memory holds {', '.join(map(str, most))}",
        )

    def samples_at(time_s: float) -> list[float]:
        return [
            _samples_within(time_s - sums.last_s, speed, sums, limit) for speed, limit in zip(speeds, most, strict=True)
        ]

    early_s = sums.last_s
    late_s = max(device_time_s(limit, speed, sums) for speed, limit in zip(speeds, most, strict=True))
    # The bisection ends when no floating-point number lies between `early_s` and `late_s`.
    while early_s < (middle_s := (early_s + late_s) / 2) < late_s:
        if sum(samples_at(middle_s)) >= batch:
            late_s = middle_s
        else:
            early_s = middle_s
    return tuple(samples_at(late_s)), late_s


def opt_perf(batch: int, speeds: Sequence[NodeSpeed], sums: SumTimes, most: Sequence[int], least: int = 0) -> Division:
    """Return the fastest division into whole samples.

    Each device gets its share of `real_division`, rounded down. The samples that are left go one by one to the device
    that would end first with one more. The arguments are those of `real_division`; ``least`` is the number of samples
    that every device must get.

    Raises:
        InputError: The batch does not fit into memory, or ``least`` samples per device are too many.
    """
    if batch < least * len(speeds) or min(most) < least:
        raise InputError(
            f"a batch of {batch} samples cannot be divided over {len(speeds)} devices that need at least {least} each "
            f"and whose memory holds {', '.join(map(str, most))}",
            where="division of the batch",
            valid=f"give {least * len(speeds)} samples or more, and devices whose memory holds {least} or more",
        )
    shares, _ = real_division(batch, speeds, sums, most)
    samples = [max(least, math.floor(share + 1e-9)) for share in shares]
    # If raising devices to `least` samples exceeds the batch, the slowest of the other devices lose samples.
    while sum(samples) > batch:
        times_s = [
            device_time_s(own, speed, sums) if own > least else -math.inf
            for own, speed in zip(samples, speeds, strict=True)
        ]
        samples[times_s.index(max(times_s))] -= 1
    _place(batch - sum(samples), samples, speeds, sums, most)
    return Division(tuple(samples), batch_time_s(samples, speeds, sums))


def _samples_within(rest_s: float, speed: NodeSpeed, sums: SumTimes, limit: int) -> float:
    """Return how many samples a device can process, not rounded, if the last sum begins after ``rest_s`` seconds."""
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
    """Add ``count`` samples to the list ``samples``, each to the device that would end first with one more."""
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
