"""Learning the speeds of devices and the times of gradient sums from the steps of a run, as in Cannikin.

The method is that of arXiv 2402.05302. The first step divides the batch evenly, the second in proportion to the speeds
measured in the first; then a line is fitted to the points (samples, time) of every device. The share of backward before
the first bucket is ready is a mean over the devices, weighted by the inverse of the variance. The time of the gradient
sums is the shortest that any device measured, since devices that are ready early also measure the wait for the last
device.

Assumption: if a device's time deviates from its line by more than a share of `CHANGED`, the whole device has become
faster or slower, and its older points are scaled. Sums are learned from the last `WINDOW` steps only, so that old
rates of the network are forgotten.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, variance

from planner.events.event import Event, EventKind
from planner.plan.plan import Plan
from planner.systems.cannikin.step_model import NO_SUMS, NodeSpeed, SumTimes, fit_speed

# Relative deviation of a measured time from the device's line above which the device's speed counts as changed.
CHANGED = 0.1

# Number of last steps from which sums are learned, and of last points that are kept for each sample count of a device.
WINDOW = 8

# Number of last sample counts of a device for which points are kept.
_REMEMBERED_COUNTS = 16

# Least variance in a weighted mean, so that a share that did not vary does not get infinite weight.
_LEAST_VARIANCE = 1e-6


@dataclass(frozen=True, slots=True)
class NodeTimes:
    """Compute times of a device for its part of a microbatch, as means over the microbatches of a step.

    Attributes:
        samples: Samples of the part, above zero.
        forward_s: Time before backward, seconds.
        backward_s: Time of backward, seconds.
    """

    samples: float
    forward_s: float
    backward_s: float

    @property
    def total_s(self) -> float:
        """Time of forward and backward, seconds."""
        return self.forward_s + self.backward_s


class SpeedLearner:
    """Lines fitted to the compute times of devices; each run needs an object of its own."""

    def __init__(self) -> None:
        self._points: dict[str, list[NodeTimes]] = {}
        # Lines that were fitted since the last observation of their device.
        self._fitted: dict[str, NodeSpeed] = {}

    def observe(self, device: str, times: NodeTimes) -> None:
        """Add the times of a device in one more step."""
        points = self._points.get(device, [])
        if len({point.samples for point in points}) > 1:
            expected = self.speed(device)
            ratio = times.total_s / (expected.forward_s(times.samples) + expected.backward_s(times.samples))
            counts = [point.samples for point in points]
            # Outside the range of sample counts to which it was fitted, the line may be wrong.
            if abs(ratio - 1) > CHANGED and min(counts) <= times.samples <= max(counts):
                points = [
                    replace(point, forward_s=ratio * point.forward_s, backward_s=ratio * point.backward_s)
                    for point in points
                ]
        elif points and points[0].samples == times.samples and abs(times.total_s / points[-1].total_s - 1) > CHANGED:
            points = []
        self._points[device] = _remembered([*points, times])
        self._fitted.pop(device, None)

    def has_line(self, device: str) -> bool:
        """Return whether a device was measured with two different numbers of samples or more."""
        return len({point.samples for point in self._points.get(device, [])}) > 1

    def knows(self, device: str) -> bool:
        """Return whether a device was measured at all."""
        return device in self._points

    def speed(self, device: str) -> NodeSpeed:
        """Return the speed fitted to all points of a device, which must have been measured before."""
        if device not in self._fitted:
            points = self._points[device]
            self._fitted[device] = fit_speed(
                [point.samples for point in points],
                [point.forward_s for point in points],
                [point.backward_s for point in points],
            )
        return self._fitted[device]


def _remembered(points: Sequence[NodeTimes]) -> list[NodeTimes]:
    """Return the last `WINDOW` points of each of the last `_REMEMBERED_COUNTS` sample counts."""
    by_count: dict[float, list[NodeTimes]] = {}
    for point in reversed(points):
        if point.samples in by_count or len(by_count) < _REMEMBERED_COUNTS:
            by_count.setdefault(point.samples, []).append(point)
    kept = [same[:WINDOW] for same in by_count.values()]
    return [point for same in reversed(kept) for point in reversed(same)]


class SumLearner:
    """Times of gradient sums over the last steps; each run needs an object of its own."""

    def __init__(self) -> None:
        self._steps: deque[Sequence[SumTimes]] = deque(maxlen=WINDOW)

    def observe(self, step: Iterable[SumTimes]) -> None:
        """Add the times that each device measured in one more step; the order of devices must always be the same."""
        self._steps.append(tuple(step))

    def sums(self) -> SumTimes:
        """Return the times of gradient sums without the wait for late devices; `NO_SUMS` before the first step."""
        if not self._steps:
            return NO_SUMS
        # Both times come from one measurement, since the least of each may belong to different devices.
        least = min((each for step in self._steps for each in step), key=lambda each: each.total_s)
        devices = min(len(step) for step in self._steps)
        shares = [[step[device].first_bucket_share for step in self._steps] for device in range(devices)]
        return SumTimes(
            inverse_variance_mean(
                [fmean(each) for each in shares],
                [variance(each) if len(each) > 1 else 0.0 for each in shares],
            ),
            least.overlapped_s,
            least.last_s,
        )


def inverse_variance_mean(means: Sequence[float], variances: Sequence[float]) -> float:
    """Return the mean of the estimates ``means``, weighted by the inverse of their ``variances``; none has a unit.

    A variance below `_LEAST_VARIANCE` counts as `_LEAST_VARIANCE`.
    """
    weights = [1 / max(_LEAST_VARIANCE, each) for each in variances]
    return sum(weight * mean for weight, mean in zip(weights, means, strict=True)) / sum(weights)


# Actions of backward: whole (B), or its input gradient (I) and weight gradient (W) apart. F is forward.
_BACKWARD = {"B", "I", "W"}


def measured_nodes(events: Iterable[Event], step: int, plan: Plan) -> Mapping[str, NodeTimes]:
    """Return the compute times of each device that has samples, as measured in one step of a plan of one stage."""
    compute_s: defaultdict[tuple[str, bool], float] = defaultdict(float)
    for event in events:
        if event.step == step and event.kind is EventKind.COMPUTE and event.action in {"F", *_BACKWARD}:
            compute_s[event.device, event.action == "F"] += event.end_s - event.start_s
    count = len(plan.pipelines[0].microbatches)
    return {
        device: NodeTimes(samples, compute_s[device, True] / count, compute_s[device, False] / count)
        for device, samples in samples_per_microbatch(plan).items()
        if samples > 0
    }


def samples_per_microbatch(plan: Plan) -> Mapping[str, float]:
    """Return the mean number of samples of a microbatch that each device takes in a plan of one stage."""
    (pipeline,) = plan.pipelines
    (stage,) = pipeline.stages
    taken: defaultdict[str, int] = defaultdict(int)
    for size in pipeline.microbatches:
        for replica, (first, end) in zip(stage.replicas, stage.intervals(size), strict=True):
            taken[replica.device] += end - first
    return {device: count / len(pipeline.microbatches) for device, count in taken.items()}


def measured_sums(events: Iterable[Event], step: int) -> tuple[SumTimes, ...]:
    """Return the times of gradient sums that each device measured in a step, sorted by device name.

    A measured sum begins when its own device is ready, so the time includes the wait for the last device.
    """
    backwards: dict[str, Event] = {}
    sums: defaultdict[str, list[Event]] = defaultdict(list)
    for event in sorted((each for each in events if each.step == step), key=lambda each: each.start_s):
        if event.kind is EventKind.COMPUTE and event.action in _BACKWARD:
            backwards[event.device] = event
        elif event.kind is EventKind.SYNC:
            sums[event.device].append(event)
    return tuple(_measured(backwards[device], sums[device]) for device in sorted(sums) if device in backwards)


def _measured(backward: Event, sums: list[Event]) -> SumTimes:
    *overlapped, last = sums
    lasted_s = backward.end_s - backward.start_s
    first_share = (sums[0].start_s - backward.start_s) / lasted_s if overlapped and lasted_s > 0 else 1.0
    return SumTimes(
        min(1.0, max(0.0, first_share)),
        sum(event.end_s - event.start_s for event in overlapped),
        last.end_s - last.start_s,
    )
