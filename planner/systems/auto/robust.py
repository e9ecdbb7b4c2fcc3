"""Plans for links that sway: judged by the rate that they reach in most windows of the links' traces.

A window stands for a steady network: each link has its mean rate and mean latency of these seconds. A step is shorter
than a window, so that what it meets is one window rather than the mean of all. The score of a plan is a quantile over
the windows: with 0.1, the throughput that nine windows of ten reach or exceed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.plan.plan import Plan
from planner.scenario.cluster import Cluster
from planner.scenario.scenario import Scenario
from planner.scenario.variants import in_window
from planner.step.evaluate import nominal_paths, step_times_s
from planner.step.graph import Floats
from planner.systems.auto.objective import CostModel
from traces.common.errors import InputError

# Assumed: longer than most steps, shorter than what a run lasts.
WINDOW_S = 60.0

# A shorter trace is cut into so many windows all the same, since one window has no quantiles; of a longer one so many
# are looked at, evenly apart.
LEAST_WINDOWS, MOST_WINDOWS = 10, 240


@dataclass(frozen=True, slots=True)
class RobustRate:
    """What a plan reaches in most windows.

    Attributes:
        quantile: Share of the windows in which it may be slower.
        windows: How many were looked at.
        window_s: Length of each, seconds.
        samples_per_s: Throughput that all other windows reach.
    """

    quantile: float
    windows: int
    window_s: float
    samples_per_s: float


def trace_windows(scenario: Scenario, window_s: float = WINDOW_S) -> list[tuple[float, float]]:
    """Return start and end of windows over the longest trace, seconds; one window where no link has a trace.

    All are equally long, about as long as asked for, and shorter where the trace is short; they do not go beyond the
    end of a trace after which nothing is known.
    """
    traces = [link.trace for link in scenario.cluster.links if link.trace is not None]
    if not traces:
        return [(0.0, window_s)]
    known_s = min((trace.duration_s for trace in traces if trace.ends), default=np.inf)
    horizon_s = min(known_s, max(trace.duration_s for trace in traces))
    count = max(LEAST_WINDOWS, round(horizon_s / window_s))
    chosen = np.unique(np.linspace(0, count - 1, min(count, MOST_WINDOWS)).round())
    return [(start_s, start_s + horizon_s / count) for start_s in (chosen * horizon_s / count).tolist()]


def window_steps_s(plan: Plan, scenario: Scenario, windows: Sequence[Scenario]) -> Floats:
    """Return the seconds of a step in each window, [windows]."""
    return step_times_s(plan, scenario, [nominal_paths(plan, window) for window in windows])


def robust_cost_model(scenario: Scenario, quantile: float, window_s: float = WINDOW_S) -> CostModel:
    """Return a judge of plans: the seconds of a step that only a share ``quantile`` of the windows exceeds.

    Raises:
        InputError: The quantile is not a share below 1.
    """
    check_quantile(quantile)
    windows = [in_window(scenario, *window) for window in trace_windows(scenario, window_s)]

    def judge(plan: Plan) -> float:
        return _exceeded_by(window_steps_s(plan, scenario, windows), quantile)

    return judge


def robust_rate(plan: Plan, scenario: Scenario, quantile: float, window_s: float = WINDOW_S) -> RobustRate:
    """Return what a plan reaches in all but a share ``quantile`` of the windows.

    Raises:
        InputError: The quantile is not a share below 1.
    """
    step_s = robust_cost_model(scenario, quantile, window_s)(plan)
    windows = trace_windows(scenario, window_s)
    start_s, end_s = windows[0]
    return RobustRate(quantile, len(windows), end_s - start_s, plan.global_batch / step_s if step_s else np.inf)


def in_bad_windows(scenario: Scenario, quantile: float, window_s: float = WINDOW_S) -> Scenario:
    """Return the scenario with steady links, each as slow as in its slowest window but a share ``quantile`` of them."""
    windows = [in_window(scenario, *window) for window in trace_windows(scenario, window_s)]
    links = []
    for same in zip(*(window.cluster.links for window in windows), strict=True):
        seconds_per_bit = np.array([1 / link.bandwidth_bps for link in same])
        latencies_s = np.array([link.latency_s for link in same])
        rate_bps = 1 / _exceeded_by(seconds_per_bit, quantile)
        links.append(replace(same[0], bandwidth_bps=rate_bps, latency_s=_exceeded_by(latencies_s, quantile)))
    return replace(scenario, cluster=Cluster(scenario.cluster.devices, tuple(links)))


def check_quantile(quantile: float) -> None:
    """Raise InputError unless the quantile is a share of 0 or more and below 1."""
    if not 0 <= quantile < 1:
        raise InputError(
            f"a quantile of {quantile:g}",
            valid="a share of 0 or more and below 1: 0.1 for the throughput that nine windows of ten reach",
        )


def _exceeded_by(times_s: Floats, quantile: float) -> float:
    """The least time that no more than a share of the windows exceeds, seconds."""
    longest_first = np.sort(times_s)[::-1]
    # A share such as 0.29 of 100 windows rounds to a little less than 29.
    return float(longest_first[min(len(times_s) - 1, int(quantile * len(times_s) + 1e-9))])
