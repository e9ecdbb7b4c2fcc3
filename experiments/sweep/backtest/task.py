"""Carries out one point of a backtest: the run of a policy, or of a plan that never changes, in a window of a trace."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from experiments.runs.carry_out import check_length
from experiments.runs.scenario import choose_plan
from experiments.sweep.backtest.windows import Window, window_of
from experiments.sweep.definition import user_file
from experiments.sweep.table import Value
from planner.adapt.policy import coverage_of
from planner.events.event import EventKind
from planner.events.log import EventLog, as_log
from planner.files.scenario import read_scenario
from planner.plan.plan import Plan
from planner.runs.event_totals import event_totals
from planner.runs.metrics import measure
from planner.runs.record import RunRecord
from planner.scenario.scenario import Scenario
from planner.systems.registry import make_plan, make_policy
from sim.simulator import Simulator
from traces.formats import read_trace
from traces.trace import FloatArray, LinkTrace

# Names of the parameters of a backtest.
TRACE, START, POLICY = "trace", "start_s", "policy"

# The policy that never changes the plan, with which all others are compared.
NONE = "none"

# Prefix of a rival among the values of `POLICY`: no policy, and the plan that a strategy makes in hindsight.
STATIC = "static:"

# Length of the intervals whose best run is known ahead, seconds.
INTERVAL_S = 10.0

# Metric with the samples that are finished at the end of each interval, divided by the length of the window, as JSON.
# It is compared with that of other runs, not shown.
PROGRESS = "progress"


@dataclass(frozen=True, slots=True)
class BacktestTask:
    """The task of a backtest.

    Attributes:
        scenario: The scenario's file.
        folder: The folder to which the user's Python files are relative.
        traces: The folder of the traces.
        links: Names of the links that play a trace.
        scaled: Whether the trace is scaled on each link to the link's declared rate.
        window_s: Length of a window, seconds.
        plan: File of the plan with which all policies begin; None if a strategy makes it.
        strategy: The strategy that makes it; None for the default one.
        log: The folder of the logs.
    """

    scenario: Path
    folder: Path
    traces: Path
    links: tuple[str, ...]
    scaled: bool
    window_s: float
    plan: Path | None
    strategy: str | None
    log: Path

    def measure(self, values: Mapping[str, Any]) -> dict[str, Value]:
        """Simulate a policy or a rival in a window; return its metrics."""
        window, name = _window(self, values[TRACE], values[START]), values[POLICY]
        if name.startswith(STATIC):
            plan = make_plan(self._name_or_file("strategy", name.removeprefix(STATIC)), window.in_hindsight)
            policy = None
        else:
            plan = _first_plan(self, values[TRACE], values[START])
            # Not `actual`: a policy must not know the trace.
            policy = make_policy(self._name_or_file("policy", name), window.known)
        check_length(window.actual, plan, sys.maxsize, self.window_s, on_disk=False)
        metrics = window_metrics(Simulator(self.window_s).run(window.actual, plan, policy, sys.maxsize), self.window_s)
        coverage = coverage_of(policy)
        return metrics if coverage is None or coverage.share is None else {**metrics, "covered": coverage.share}

    def first_plan(self, known: Scenario) -> Plan:
        """Return the plan with which all policies begin, by what is known at the start of a window."""
        strategy = None if self.strategy is None else self._name_or_file("strategy", self.strategy)
        return choose_plan(known, self.plan, strategy)

    def _name_or_file(self, setting: str, name: str) -> str:
        return str(user_file(setting, name, self.folder) or name)


# Cached, since the runs of one window follow each other.
@lru_cache(maxsize=4)
def _window(task: BacktestTask, trace: str, start_s: float) -> Window:
    scenario = _scenario(task.scenario)
    played = _trace(task.traces / trace)
    return window_of(scenario, task.links, played, start_s, task.window_s, scaled=task.scaled)


@lru_cache(maxsize=4)
def _first_plan(task: BacktestTask, trace: str, start_s: float) -> Plan:
    return task.first_plan(_window(task, trace, start_s).known)


@lru_cache(maxsize=4)
def _scenario(path: Path) -> Scenario:
    return read_scenario(path)


@lru_cache(maxsize=4)
def _trace(path: Path) -> LinkTrace:
    return read_trace(path)


def window_metrics(record: RunRecord, window_s: float) -> dict[str, Value]:
    """Return the metrics of a run in a window, which may have finished its last step after the end of the window.

    A step that the end of the window divides counts in proportion to its time.
    """
    log = as_log(record.events)
    totals = event_totals(log)
    ends_s = np.array(totals.step_ends_s)
    finished = np.cumsum([_plan_at(record, step).global_batch for step in range(len(ends_s))])
    intervals_s = np.append(np.arange(INTERVAL_S, window_s, INTERVAL_S), window_s)
    progress_per_s = np.interp(intervals_s, [0.0, *ends_s], [0.0, *finished]) / window_s
    metrics = measure(record, totals)
    changes = [each for each in record.decisions if each.first_step < len(ends_s)]
    return {
        "samples_per_s": float(progress_per_s[-1]),
        "step_s": metrics.step_s,
        "steps_done": metrics.steps,
        "changes": len(changes),
        "moves": sum(bool(each.migration.moves) for each in changes),
        "moved_bytes": sum(each.migration.size_bytes for each in changes),
        "lost_s": moving_s(record, log, ends_s, window_s),
        "wan_bytes": metrics.wan_bytes,
        "cost_usd": metrics.cost_usd,
        PROGRESS: json.dumps(progress_per_s.tolist()),
    }


def moving_s(record: RunRecord, log: EventLog, ends_s: FloatArray, window_s: float) -> float:
    """Return the time lost in moves of layers, seconds.

    A move lasts from the end of the last step with the old plan to the arrival of the last layer.
    """
    migrating, lost_s = log.is_a(EventKind.MIGRATE), 0.0
    for decision in record.decisions:
        own = migrating & (log.columns["step"] == decision.first_step)
        if own.any():
            begun_s = float(ends_s[min(decision.first_step, len(ends_s)) - 1]) if decision.first_step else 0.0
            lost_s += max(0.0, min(float(log.columns["arrived_s"][own].max()), window_s) - begun_s)
    return lost_s


def _plan_at(record: RunRecord, step: int) -> Plan:
    return next((each.plan for each in reversed(record.decisions) if each.first_step <= step), record.plan)
