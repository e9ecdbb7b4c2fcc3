"""Robust step times for time-varying links: quantiles over windows of the links' traces.

A window is an interval of the traces. Within a window, each link is taken to have its mean rate and mean latency of the
interval, because most steps are shorter than a window and do not see the mean of the whole trace. A plan is scored by
the step time that only a share of the windows exceeds: for a share of 0.1, at least nine of ten windows are as fast.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import harmonic_mean

import numpy as np
from numpy.typing import NDArray

from planner.plan.plan import Plan
from planner.scenario.cluster import Cluster
from planner.scenario.scenario import Scenario, in_window
from planner.step.evaluate import nominal_paths, step_times_s
from planner.step.graph import Floats
from planner.systems.auto.objective import CostModel
from traces.common.errors import InputError

# Assumed length of a window, seconds: longer than most steps, shorter than a run.
WINDOW_S = 60.0

# Least number of windows into which a trace is divided, since quantiles need several values, and most windows that are
# evaluated, at equal distances.
LEAST_WINDOWS, MOST_WINDOWS = 10, 240

# Most windows in which a start is chosen among few plans, by the detailed model.
_MOST_COMPARED = 24


@dataclass(frozen=True, slots=True)
class RobustRate:
    """Throughput that a plan reaches in most windows.

    Attributes:
        quantile: Share of the windows in which the plan may be slower than ``samples_per_s``.
        windows: Number of evaluated windows.
        window_s: Length of a window, seconds.
        samples_per_s: Throughput that the plan reaches in all other windows, samples per second.
    """

    quantile: float
    windows: int
    window_s: float
    samples_per_s: float


def trace_windows(scenario: Scenario, window_s: float = WINDOW_S) -> list[tuple[float, float]]:
    """Return (start, end) of each window in seconds; a single window if no link has a trace.

    The windows cover the longest trace, but not beyond the end of a trace that neither repeats nor holds its last rate.
    All are equally long: about ``window_s`` seconds, or less if the traces are short.
    """
    traces = [link.trace for link in scenario.cluster.links if link.trace is not None]
    if not traces:
        return [(0.0, window_s)]
    known_s = min((trace.duration_s for trace in traces if trace.ends), default=np.inf)
    covered_s = min(known_s, max(trace.duration_s for trace in traces))
    count = max(LEAST_WINDOWS, round(covered_s / window_s))
    starts_s = (_spread(count, MOST_WINDOWS) * covered_s / count).tolist()
    return [(start_s, start_s + covered_s / count) for start_s in starts_s]


def mean_step_s(
    plan: Plan, scenario: Scenario, step_s: Callable[[Plan, Scenario], float], window_s: float = WINDOW_S
) -> float:
    """Return the time of a step at the plan's mean throughput over windows of the traces, seconds.

    Args:
        plan: The plan to judge.
        scenario: The scenario, whose links have traces.
        step_s: Function from a plan and a scenario without traces to the time of a step, seconds.
        window_s: Length of a window, seconds.
    """
    windows = trace_windows(scenario, window_s)
    chosen = _spread(len(windows), _MOST_COMPARED)
    return harmonic_mean([step_s(plan, in_window(scenario, *windows[number])) for number in chosen])


def robust_cost_model(scenario: Scenario, quantile: float, window_s: float = WINDOW_S) -> CostModel:
    """Return a function from a plan to the step time (seconds) that at most a share ``quantile`` of windows exceeds.

    Raises:
        InputError: ``quantile`` is below 0, or not below 1.
    """
    check_quantile(quantile)
    windows = [in_window(scenario, *window) for window in trace_windows(scenario, window_s)]

    def step_s(plan: Plan) -> float:
        return _exceeded_by(step_times_s(plan, scenario, [nominal_paths(plan, window) for window in windows]), quantile)

    return step_s


def robust_rate(plan: Plan, scenario: Scenario, quantile: float, window_s: float = WINDOW_S) -> RobustRate:
    """Return the throughput that a plan reaches in all but a share ``quantile`` of the windows."""
    step_s = robust_cost_model(scenario, quantile, window_s)(plan)
    windows = trace_windows(scenario, window_s)
    start_s, end_s = windows[0]
    return RobustRate(quantile, len(windows), end_s - start_s, plan.global_batch / step_s if step_s else np.inf)


def in_bad_windows(scenario: Scenario, quantile: float, window_s: float = WINDOW_S) -> Scenario:
    """Return the scenario with constant links, each as slow as in all but a share ``quantile`` of the windows."""
    windows = [in_window(scenario, *window) for window in trace_windows(scenario, window_s)]
    links = []
    for same in zip(*(window.cluster.links for window in windows), strict=True):
        # Negated, since the slowest link is the worst. A rate may be infinite.
        rate_bps = -_exceeded_by(np.array([-link.bandwidth_bps for link in same]), quantile)
        latencies_s = np.array([link.latency_s for link in same])
        links.append(replace(same[0], bandwidth_bps=rate_bps, latency_s=_exceeded_by(latencies_s, quantile)))
    return replace(scenario, cluster=Cluster(scenario.cluster.devices, tuple(links)))


def check_quantile(quantile: float) -> None:
    """Raise `InputError` unless 0 <= ``quantile`` < 1."""
    if not 0 <= quantile < 1:
        raise InputError(
            f"a quantile of {quantile:g} is not allowed",
            valid="give a share of 0 or more and below 1, such as 0.1 for a throughput that nine of ten windows reach",
        )


def _spread(count: int, most: int) -> NDArray[np.int64]:
    """Return at most ``most`` of the numbers 0 to ``count - 1``, at nearly equal distances."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64))


def _exceeded_by(times_s: Floats, quantile: float) -> float:
    """Return the smallest of the times that at most a share ``quantile`` of the times exceeds, seconds."""
    longest_first = np.sort(times_s)[::-1]
    # The small summand makes up for rounding: 0.29 * 100 is a little less than 29 in floating point.
    return float(longest_first[min(len(times_s) - 1, int(quantile * len(times_s) + 1e-9))])
