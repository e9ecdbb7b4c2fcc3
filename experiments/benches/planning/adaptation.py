"""Measures the gain of adaptation on traces: policies `auto` and `deepcee` against a plan that never changes.

All runs of a case (`experiments.benches.planning.adaptation_cases`) start with a static plan that is best in hindsight,
of those of strategy `auto` for the traces, for their means over the whole hour and over its first minute, each with and
without compression. For comparison there are:

- the throughput of the plan for the first minute's means without compression, which is all that a user can know then;
- the throughput with the best plan in each window of the traces, if it were known ahead and changes took no time, and
  if training stops while layers are moved. Its plans are the starting ones, and those that the policies ran or `auto`
  considered.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import geometric_mean, median

from experiments.benches.kept import KeptResults
from experiments.benches.planning.adaptation_cases import LEAST_GAIN, AdaptationCase, drawn, run_for, usable_cases
from experiments.benches.planning.adaptation_traces import DEVELOP, DURATION_S, HELD_OUT
from experiments.benches.planning.hindsight import FIRST_MINUTE_S, possible_gains, starting_plans
from experiments.benches.result import BenchResult, Check, Row, at_least
from experiments.sweep.engines.local import process_pool, results_in_order, usable_cores
from planner.runs.metrics import measure
from planner.scenario.scenario import allowing_compressions, in_window
from planner.systems.auto.policy import AutoPolicy
from planner.systems.auto.portfolio import searched_once
from planner.systems.deepcee.policy import DeepceePolicy

QUICK_TRACES = ("preset lte", "preset rail-lte", "preset satellite")
QUICK_DURATION_S = 600.0

# Bars beside `LEAST_GAIN`: the least mean gain against the start of a user who knows one minute, and for cases in which
# changes could gain `WORTHWHILE` or more, their least number, the least mean gain and the least share of the possible
# gain, in the median.
LEAST_GAIN_OF_USERS = 1.25
WORTHWHILE, FEWEST_WORTHWHILE, LEAST_WORTHWHILE_GAIN, LEAST_SHARE = 1.15, 3, 1.10, 0.5


def measure_adaptation(
    quick: bool,
    tell: Callable[[str], None],
    count: int | None = None,
    seed: int | None = None,
    keep: Path | None = None,
) -> BenchResult:
    """Simulate cases with and without policies.

    Args:
        quick: Whether to take a few cases for ten minutes.
        tell: Function that shows progress.
        count: Number of cases, drawn at random; None for all.
        seed: Seed of the draw; None for a random one.
        keep: Folder of the results of each case, which are not measured again; None to keep none.
    """
    kept = KeptResults(keep)
    halves = (DEVELOP,) if quick else (DEVELOP, HELD_OUT)
    chosen = [case for case in usable_cases(halves, tell) if not quick or case.pair.name in QUICK_TRACES]
    if count is not None:
        chosen = drawn(chosen, count, seed, tell)
    rows: list[Row] = []
    with process_pool(usable_cores()) as pool:
        measure_each = partial(kept_case, kept, duration_s=QUICK_DURATION_S if quick else DURATION_S)
        for row in results_in_order(pool, measure_each, chosen):
            rows.append(row)
            most = f"{row['possible_gain']:.3f} ({row['payable_gain']:.3f} with moves paid)"
            gains = f"auto {row['auto_gain']:.3f} of {most}, deepcee {row['deepcee_gain']:.3f}"
            tell(f"{row['scenario']}, {row['trace']} ({row['half']}): {gains}")
    by_half = {half: [row for row in rows if row["half"] == half] for half in halves}
    found = [check for half, own in by_half.items() if own for check in checks(half, own)]
    return BenchResult(rows, found)


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


def kept_case(kept: KeptResults, case: AdaptationCase, duration_s: float) -> Row:
    """Return the row of one case, measured unless it has been kept."""
    name = f"{case.scenario.name}, {case.pair.name}, {case.half}, {duration_s:g} s"
    return kept.rows(name, lambda: [measure_case(case, duration_s)])[0]


def measure_case(case: AdaptationCase, duration_s: float) -> Row:
    """Simulate one case for ``duration_s`` seconds without a policy and with each policy; return its row."""
    scenario = case.scenario
    starts_per_s = starting_plans(scenario, duration_s)
    start, none_per_s = next(iter(starts_per_s.items()))
    users = searched_once(allowing_compressions(in_window(scenario, 0.0, FIRST_MINUTE_S), ("none",)))[0]
    users_per_s = starts_per_s.get(users) or measure(run_for(duration_s, scenario, users)).samples_per_s
    deepcee = run_for(duration_s, scenario, start, DeepceePolicy(scenario))
    policy = AutoPolicy(scenario, searched_once)
    adapted = run_for(duration_s, scenario, start, policy)
    changes = [decision.plan for decision in (*deepcee.decisions, *adapted.decisions)]
    plans = list(dict.fromkeys((*starts_per_s, *policy.portfolio.plans(), *changes)))
    auto_per_s, possible = measure(adapted).samples_per_s, possible_gains(scenario, plans, duration_s)
    return {
        "scenario": scenario.name,
        "trace": case.pair.name,
        "half": case.half,
        "scaled": "yes" if case.pair.scaled else "no",
        "users_per_s": users_per_s,
        "none_per_s": none_per_s,
        "auto_per_s": auto_per_s,
        "compression": start.compression,
        "possible_gain": possible.free,
        "payable_gain": possible.paid,
        "auto_gain": auto_per_s / none_per_s,
        "deepcee_gain": measure(deepcee).samples_per_s / none_per_s,
        "users_gain": auto_per_s / users_per_s,
        "covered": "none" if policy.coverage.share is None else policy.coverage.share,
        "decisions": len(adapted.decisions),
        "moved_mb": sum(decision.migration.size_bytes for decision in adapted.decisions) / 1e6,
    }
