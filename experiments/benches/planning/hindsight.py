"""Chooses the static plans that are best in hindsight, and says what changes of the plan could gain on them."""

from collections.abc import Sequence

import numpy as np

from experiments.benches.planning.adaptation_cases import run_for
from planner.check import is_possible
from planner.plan.plan import Plan
from planner.runs.metrics import measure
from planner.scenario.cluster import Link
from planner.scenario.scenario import Scenario, in_window
from planner.step.evaluate import step_times_s
from planner.step.graph import Floats
from planner.systems.auto.candidates.compressed import with_compressions
from planner.systems.auto.forecasting.forecast import LinkSample, forecast_paths
from planner.systems.auto.objective import Objective
from planner.systems.auto.portfolio import searched_once
from planner.systems.auto.strategy import start_plan

FIRST_MINUTE_S = 60.0

# Length of the windows on which plans are judged, seconds.
WINDOW_S = 10.0

# Most plans of a case that are simulated; the evaluator chooses them.
_MOST_STARTS = 3


def starting_plans(scenario: Scenario, duration_s: float) -> dict[Plan, float]:
    """Return static plans and their simulated throughput over ``duration_s``, samples/s, the best one first.

    They are those of strategy `auto` for the traces, for their means over the whole time and over the first minute,
    each in every format of messages that the scenario allows.
    """
    means = (in_window(scenario, 0.0, end_s) for end_s in (duration_s, FIRST_MINUTE_S))
    found = [start_plan(scenario, Objective()), *(searched_once(each)[0] for each in means)]
    formats = dict.fromkeys(each for plan in found for each in with_compressions(plan, scenario))
    possible = [plan for plan in formats if is_possible(plan, scenario)]
    judged_per_s = _judged_per_s(scenario, possible, duration_s).mean(axis=1)
    best = [possible[place] for place in np.argsort(-judged_per_s, kind="stable")[:_MOST_STARTS]]
    per_s = {plan: measure(run_for(duration_s, scenario, plan)).samples_per_s for plan in best}
    return dict(sorted(per_s.items(), key=lambda item: -item[1]))


def possible_gain(scenario: Scenario, plans: Sequence[Plan], duration_s: float) -> float:
    """Return the gain of the best plan of each window over the first of the plans, by the evaluator, a ratio."""
    judged_per_s = _judged_per_s(scenario, plans, duration_s)
    return float(judged_per_s.max(axis=0).mean() / judged_per_s[0].mean())


def _judged_per_s(scenario: Scenario, plans: Sequence[Plan], duration_s: float) -> Floats:
    """Return the throughput of each plan in each window of the traces by the evaluator, samples/s."""
    windows = [_window(scenario, WINDOW_S * number) for number in range(int(duration_s / WINDOW_S))]

    def rates_per_s(plan: Plan) -> Floats:
        networks = [forecast_paths(plan, scenario, window) for window in windows]
        return plan.global_batch / step_times_s(plan, scenario, networks)

    return np.stack([rates_per_s(plan) for plan in plans])


def _window(scenario: Scenario, start_s: float) -> dict[str, LinkSample]:
    samples = {}
    for link in scenario.cluster.links:
        if link.trace is not None:
            rate_bps = float(link.trace.bits_between(start_s, start_s + WINDOW_S)) / WINDOW_S
            samples[link.name] = LinkSample(rate_bps, _latency_s(link, start_s), WINDOW_S)
    return samples


def _latency_s(link: Link, moment_s: float) -> float:
    if link.trace is None or link.trace.latency_s is None:
        return link.latency_s
    return float(link.trace.latency_s[link.trace.piece_at(moment_s)])
