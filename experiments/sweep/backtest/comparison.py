"""Compares the runs of each window with each other, and sums up what a policy gains over all windows."""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np

from experiments.sweep.backtest.task import NONE, POLICY, PROGRESS, START, STATIC, TRACE
from experiments.sweep.outcomes import OK, Outcome
from experiments.sweep.points import Point
from experiments.sweep.table import Value
from traces.common.units import number_text

# Metrics of a run, in the order of the table's columns; the first seven compare it with the other runs of its window.
METRICS = (
    "gain",
    "regret_static",
    "regret_known_ahead",
    "best_static_per_s",
    "best_static",
    "known_ahead_per_s",
    "none_per_s",
    "samples_per_s",
    "step_s",
    "steps_done",
    "changes",
    "moves",
    "moved_bytes",
    "lost_s",
    "covered",
    "wan_bytes",
    "cost_usd",
)


def compared(points: Sequence[Point], outcomes: Mapping[str, Outcome]) -> dict[str, Outcome]:
    """Return the outcomes with the metrics that compare the runs of a window, without their progress.

    A window is compared when all its runs have ended; a run that failed takes no part.
    """
    shown = {key: replace(each, metrics=_without_progress(each.metrics)) for key, each in outcomes.items()}
    windows: defaultdict[tuple[str, float], list[Point]] = defaultdict(list)
    for point in points:
        windows[point.values[TRACE], point.values[START]].append(point)
    for own in windows.values():
        if any(point.key not in outcomes for point in own):
            continue
        done = {point.values[POLICY]: outcomes[point.key] for point in own if outcomes[point.key].status == OK}
        for name, figures in compared_runs({name: each.metrics for name, each in done.items()}).items():
            key = done[name].key
            shown[key] = replace(shown[key], metrics={**figures, **shown[key].metrics})
    return shown


def _without_progress(metrics: Mapping[str, Value]) -> dict[str, Value]:
    return {name: value for name, value in metrics.items() if name != PROGRESS}


def compared_runs(runs: Mapping[str, Mapping[str, Value]]) -> dict[str, dict[str, Value]]:
    """Return the metrics that compare the runs of one window, by the runs' names, from the metrics of each run.

    ``known_ahead_per_s`` adds, for each interval, the samples of the run that finishes most in it. It is an upper bound
    for these runs: no choice among them does more, with each interval known ahead and changes that take no time.
    """
    if NONE not in runs:
        return {}
    rates_per_s = {name: float(metrics["samples_per_s"]) for name, metrics in runs.items()}
    static_per_s = {name: rate for name, rate in rates_per_s.items() if name == NONE or name.startswith(STATIC)}
    best = max(static_per_s, key=lambda name: static_per_s[name])
    progress_per_s = np.array([json.loads(str(metrics[PROGRESS])) for metrics in runs.values()])
    in_intervals_per_s = np.diff(progress_per_s, axis=1, prepend=0.0)
    # The sum of one run's intervals may differ from its rate by rounding.
    known_ahead_per_s = max(float(in_intervals_per_s.max(axis=0).sum()), *rates_per_s.values())
    shared: dict[str, Value] = {
        "best_static_per_s": static_per_s[best],
        "best_static": best,
        "known_ahead_per_s": known_ahead_per_s,
        "none_per_s": rates_per_s[NONE],
    }
    return {
        name: {
            **_if_above_0("gain", rate, rates_per_s[NONE]),
            **_if_above_0("regret_static", static_per_s[best] - rate, static_per_s[best]),
            **_if_above_0("regret_known_ahead", known_ahead_per_s - rate, known_ahead_per_s),
            **shared,
        }
        for name, rate in rates_per_s.items()
    }


def _if_above_0(name: str, value: float, reference: float) -> dict[str, Value]:
    """Return the ratio of a value to a reference by its name; nothing if the reference is 0."""
    return {name: value / reference} if reference > 0 else {}


@dataclass(frozen=True, slots=True)
class PolicySummary:
    """What one policy gains over all windows that it finished and that could be compared.

    Attributes:
        policy: Name of the policy, or of one of `BOUNDS`, which have only gains.
        windows: Number of these windows.
        gain: Geometric mean of the gains.
        least_gain: The gain in the worst window.
        worst_trace: The trace of the worst window.
        worst_start_s: The start of the worst window, seconds from the beginning of the trace.
        regret_static: Mean regret against the best static plan of each window.
        regret_known_ahead: Mean regret against the upper bound of each window.
        changes: Mean number of changes of plan in a window.
        lost_s: Mean time in a window that is lost in moves of layers, seconds.
    """

    policy: str
    windows: int
    gain: float
    least_gain: float
    worst_trace: str
    worst_start_s: float
    regret_static: float | None
    regret_known_ahead: float | None
    changes: float | None
    lost_s: float | None


# References of a window by the name under which they are summed up: the columns of their throughput.
BOUNDS: Mapping[str, str] = {"best static plan": "best_static_per_s", "known ahead": "known_ahead_per_s"}


def summaries(rows: Iterable[Mapping[str, Any]]) -> list[PolicySummary]:
    """Return the summary of each policy, then those of `BOUNDS`, from the rows of the table.

    A policy that finished no window has no summary. Windows in which the plan that never changes finishes nothing have
    no gain, and take no part.
    """
    by_policy: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        if row.get("gain") is not None and not row[POLICY].startswith(STATIC):
            by_policy[row[POLICY]].append(row)
    found = [_summary(name, own, [row["gain"] for row in own]) for name, own in by_policy.items()]
    reference = by_policy.get(NONE, [])
    for name, column in BOUNDS.items() if reference else ():
        bound = _summary(name, reference, [row[column] / row["none_per_s"] for row in reference])
        found.append(replace(bound, regret_static=None, regret_known_ahead=None, changes=None, lost_s=None))
    return found


def _summary(name: str, rows: Sequence[Mapping[str, Any]], gains: Sequence[float]) -> PolicySummary:
    worst = min(range(len(rows)), key=lambda place: gains[place])
    return PolicySummary(
        policy=name,
        windows=len(rows),
        # A policy that finishes nothing has a gain of 0, and so has the geometric mean.
        gain=math.exp(fmean(map(math.log, gains))) if min(gains) > 0 else 0.0,
        least_gain=gains[worst],
        worst_trace=rows[worst][TRACE],
        worst_start_s=rows[worst][START],
        regret_static=fmean(row["regret_static"] for row in rows),
        regret_known_ahead=fmean(row["regret_known_ahead"] for row in rows),
        changes=fmean(row["changes"] for row in rows),
        lost_s=fmean(row["lost_s"] for row in rows),
    )


HEADS = (
    *("policy", "windows", "gain", "least gain", "worst window", "regret static", "regret known ahead"),
    *("changes", "lost s"),
)


def summary_cells(summary: PolicySummary) -> tuple[str, ...]:
    """Return a summary as texts in the order of `HEADS`."""
    return (
        summary.policy,
        str(summary.windows),
        f"{summary.gain:.3f}",
        f"{summary.least_gain:.3f}",
        f"{summary.worst_trace} at {number_text(summary.worst_start_s)} s",
        _share(summary.regret_static),
        _share(summary.regret_known_ahead),
        "" if summary.changes is None else f"{summary.changes:.1f}",
        "" if summary.lost_s is None else f"{summary.lost_s:.1f}",
    )


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
