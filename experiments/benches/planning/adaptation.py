"""Measures the gain of adaptation on traces: policies `auto` and `deepcee` against a plan that never changes.

All runs of a case (`experiments.benches.planning.adaptation_cases`) start with a static plan that is best in hindsight,
of those of strategy `auto` for the traces, for their means over the whole hour and over its first minute, each with and
without compression. For comparison there are:

- the throughput of the plan for the first minute's means without compression, which is all that a user can know then;
- the throughput with the best plan in each window of the traces, if it were known ahead and changes took no time, over
  the starting plans and those that the policies ran or `auto` considered.

Further checks compare the gains that the simulator predicts with those of real, paced runs.
"""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from random import Random
from statistics import geometric_mean, median

import numpy as np

from executor.backend import TorchBackend, choose_emulator
from experiments.benches.cases import TRACES_VARIABLE, draw_seeds
from experiments.benches.planning.adaptation_cases import LEAST_GAIN, AdaptationCase, cases, run_for
from experiments.benches.planning.adaptation_traces import DEVELOP, DURATION_S, HELD_OUT
from experiments.benches.result import BenchResult, Check, Row, at_least, at_most
from experiments.runs.scenario import choose_scenario
from experiments.sweep.engines.local import process_pool, usable_cores
from planner.check import is_possible
from planner.plan.plan import Plan
from planner.runs.metrics import measure
from planner.runs.record import Backend
from planner.scenario.cluster import Link
from planner.scenario.scenario import Scenario, in_window
from planner.step.evaluate import step_times_s
from planner.step.graph import Floats
from planner.systems.auto.candidates.compressed import with_compressions
from planner.systems.auto.forecasting.forecast import LinkSample, forecast_paths
from planner.systems.auto.objective import Objective
from planner.systems.auto.policy import AutoPolicy
from planner.systems.auto.portfolio import searched_once
from planner.systems.auto.strategy import start_plan
from planner.systems.deepcee.policy import DeepceePolicy
from planner.systems.registry import make_plan, make_policy
from sim.simulator import Simulator

REAL_SCENARIO = "two-regions"

# Pairs of the strategy of the first plan and the policy. `depth` changes only how many microbatches are in flight; the
# other policies also move layers.
GAINING = (("megatron", "depth"), ("pipedream", "depth"))
MOVING = (("deepcee", "deepcee"), ("megatron", "auto"))

# Number of steps of the runs in both backends: with every plan they last until the link's rate has recovered.
REAL_STEPS = 50

LEAST_REAL_GAIN = 1.05
WORST_GAIN_DIFFERENCE = 0.05


def real_checks(tell: Callable[[str], None]) -> list[Check]:
    """Run plans with and without a policy in both backends; check that simulated and real gains agree."""
    scenario = choose_scenario(REAL_SCENARIO)
    real = TorchBackend("paced", emulator=choose_emulator("auto", tell), tell=tell)
    backends: dict[str, Backend] = {"simulated": Simulator(), "real": real}
    least, worst, moving = math.inf, 0.0, 0
    for strategy, policy in (*GAINING, *MOVING):
        plan = make_plan(strategy, scenario)
        gains = {}
        for name, backend in backends.items():
            plain = backend.run(scenario, plan, None, REAL_STEPS)
            adapted = backend.run(scenario, plan, make_policy(policy, scenario), REAL_STEPS)
            gains[name] = measure(adapted).samples_per_s / measure(plain).samples_per_s
            tell(f"{REAL_SCENARIO}, {strategy}, policy {policy}, {name}: gain {gains[name]:.3f}")
            moving += any(decision.migration.moves for decision in adapted.decisions)
        if (strategy, policy) in GAINING:
            least = min(least, *gains.values())
        worst = max(worst, abs(gains["simulated"] - gains["real"]))
    return [
        at_least("two regions: least gain of policy depth, simulated or real", least, LEAST_REAL_GAIN),
        at_least("two regions: runs in which layers moved", moving, 1),
        at_most("two regions: worst difference of simulated and real gain", worst, WORST_GAIN_DIFFERENCE),
    ]


FIRST_MINUTE_S = 60.0

QUICK_TRACES = ("preset lte", "preset rail-lte", "preset satellite")
QUICK_DURATION_S = 600.0

# Length of the windows on which plans are judged in hindsight, seconds.
WINDOW_S = 10.0

# Bars beside `LEAST_GAIN`: the least mean gain against the start of a user who knows one minute, and for cases in which
# changes could gain `WORTHWHILE` or more, their least number, the least mean gain and the least share of the possible
# gain, in the median.
LEAST_GAIN_OF_USERS = 1.25
WORTHWHILE, FEWEST_WORTHWHILE, LEAST_WORTHWHILE_GAIN, LEAST_SHARE = 1.15, 3, 1.10, 0.5

# Most starting plans of a case that are simulated; the evaluator chooses them.
_MOST_STARTS = 3


def measure_adaptation(
    quick: bool, tell: Callable[[str], None], count: int | None = None, seed: int | None = None
) -> BenchResult:
    """Simulate cases with and without policies, and run two regions for real.

    Args:
        quick: Whether to take a few cases for ten minutes, and to leave out the real runs.
        tell: Function that shows progress.
        count: Number of cases, drawn at random and without the real runs; None for all.
        seed: Seed of the draw; None for a random one.
    """
    folder = Path(os.environ[TRACES_VARIABLE]) if TRACES_VARIABLE in os.environ else None
    if folder is None:
        tell(f"only presets: {TRACES_VARIABLE} names no folder of recorded traces")
    halves = (DEVELOP,) if quick else (DEVELOP, HELD_OUT)
    chosen = [case for case in cases(halves, folder) if not quick or case.pair.name in QUICK_TRACES]
    if count is not None:
        draw = Random(draw_seeds("cases", 1, seed, tell)[0])
        chosen = draw.sample(chosen, min(count, len(chosen)))
    rows: list[Row] = []
    with process_pool(usable_cores()) as pool:
        for row in pool.map(measure_case, chosen, repeat(QUICK_DURATION_S if quick else DURATION_S)):
            rows.append(row)
            gains = f"auto {row['auto_gain']:.3f} of {row['possible_gain']:.3f}, deepcee {row['deepcee_gain']:.3f}"
            tell(f"{row['scenario']}, {row['trace']} ({row['half']}): {gains}")
    by_half = {half: [row for row in rows if row["half"] == half] for half in halves}
    found = [check for half, own in by_half.items() if own for check in checks(half, own)]
    if quick or count is not None:
        tell("the real runs are left out")
        return BenchResult(rows, found)
    return BenchResult(rows, [*found, *real_checks(tell)])


def checks(half: str, rows: Sequence[Row]) -> list[Check]:
    """Return the checks of the gains of `auto`, which are its throughput divided by that of the plan it starts with."""
    found = [
        at_least(f"{half}: least auto / none", min(float(row["auto_gain"]) for row in rows), LEAST_GAIN),
        at_least(f"{half}: auto / users' start, mean", _mean(rows, "users_gain"), LEAST_GAIN_OF_USERS),
    ]
    worthwhile = [row for row in rows if float(row["possible_gain"]) >= WORTHWHILE]
    named = f"{half}, possible gain of {WORTHWHILE:g} or more"
    found.append(at_least(f"{named}: cases", len(worthwhile), FEWEST_WORTHWHILE))
    if worthwhile:
        shares = [(float(row["auto_gain"]) - 1) / (float(row["possible_gain"]) - 1) for row in worthwhile]
        found.append(at_least(f"{named}: auto / none, mean", _mean(worthwhile, "auto_gain"), LEAST_WORTHWHILE_GAIN))
        found.append(at_least(f"{named}: share of it, median", median(shares), LEAST_SHARE))
    return found


def _mean(rows: Sequence[Row], column: str) -> float:
    """Return the geometric mean of a column of ratios."""
    return geometric_mean(float(row[column]) for row in rows)


def measure_case(case: AdaptationCase, duration_s: float) -> Row:
    """Simulate one case for ``duration_s`` seconds without a policy and with each policy; return its row."""
    scenario = case.scenario
    users = searched_once(_uncompressed(in_window(scenario, 0.0, FIRST_MINUTE_S)))[0]
    starts = _starts(scenario, duration_s)
    static = dict.fromkeys((users, *starts))
    static_per_s = {plan: measure(run_for(duration_s, scenario, plan)).samples_per_s for plan in static}
    start = max(starts, key=lambda plan: static_per_s[plan])
    deepcee = run_for(duration_s, scenario, start, DeepceePolicy(scenario))
    policy = AutoPolicy(scenario, searched_once)
    adapted = run_for(duration_s, scenario, start, policy)
    changes = [decision.plan for decision in (*deepcee.decisions, *adapted.decisions)]
    plans = list(dict.fromkeys((start, *starts, *policy.portfolio.plans(), *changes)))
    users_per_s, none_per_s, auto_per_s = static_per_s[users], static_per_s[start], measure(adapted).samples_per_s
    return {
        "scenario": scenario.name,
        "trace": case.pair.name,
        "half": case.half,
        "scaled": "yes" if case.pair.scaled else "no",
        "users_per_s": users_per_s,
        "none_per_s": none_per_s,
        "auto_per_s": auto_per_s,
        "compression": start.compression,
        "possible_gain": _possible_gain(scenario, plans, duration_s),
        "auto_gain": auto_per_s / none_per_s,
        "deepcee_gain": measure(deepcee).samples_per_s / none_per_s,
        "users_gain": auto_per_s / users_per_s,
        "decisions": len(adapted.decisions),
        "moved_mb": sum(decision.migration.size_bytes for decision in adapted.decisions) / 1e6,
    }


def _starts(scenario: Scenario, duration_s: float) -> list[Plan]:
    """Return the starting plans that are best by the evaluator, over all windows of the traces."""
    means = (in_window(scenario, 0.0, end_s) for end_s in (duration_s, FIRST_MINUTE_S))
    found = [start_plan(scenario, Objective()), *(searched_once(each)[0] for each in means)]
    formats = dict.fromkeys(each for plan in found for each in with_compressions(plan, scenario))
    possible = [plan for plan in formats if is_possible(plan, scenario)]
    judged_per_s = _judged_per_s(scenario, possible, duration_s).mean(axis=1)
    return [possible[place] for place in np.argsort(-judged_per_s, kind="stable")[:_MOST_STARTS]]


def _uncompressed(scenario: Scenario) -> Scenario:
    return replace(scenario, training=replace(scenario.training, compressions=("none",)))


def _latency_s(link: Link, moment_s: float) -> float:
    if link.trace is None or link.trace.latency_s is None:
        return link.latency_s
    return float(link.trace.latency_s[link.trace.piece_at(moment_s)])


def _possible_gain(scenario: Scenario, plans: Sequence[Plan], duration_s: float) -> float:
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
