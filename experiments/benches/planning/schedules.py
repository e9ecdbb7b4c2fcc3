"""Compares the makespans of the schedules with each other, with lower bounds, and with the optimum.

CP-SAT proves the optimum of an instance if its time limit suffices; ratios are over these instances. The order of
unequal microbatches is free, so that only small instances of them can be proved.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import ceil
from statistics import mean
from time import perf_counter

import numpy as np

from experiments.benches.planning.pipeline_families import FAMILIES, Times, family, problem_of
from experiments.benches.result import BenchResult, Check, Row, at_least, at_most
from planner.schedules.compact_zb import compact_zb, portfolio
from planner.schedules.dynamic import dynamic_orders
from planner.schedules.kernel.bounds import lower_bound_s
from planner.schedules.kernel.problem import Floats, Orders, SchedulingProblem
from planner.schedules.kernel.timing import finish_s
from planner.schedules.one_f_one_b import one_f_one_b
from planner.schedules.optimal import solve
from planner.schedules.zero_bubble import zb_h1, zb_h2

# Number of stages, number of microbatches, and number of microbatches that fit into a stage's memory.
SHAPES = (
    (4, 8, 4),
    (4, 8, 6),
    (4, 8, 8),
    (4, 16, 6),
    (4, 32, 6),
    (8, 16, 8),
    (8, 16, 12),
    (8, 32, 10),
    (8, 64, 10),
    (8, 64, 16),
)
QUICK_SHAPES = ((4, 8, 4), (4, 16, 6), (8, 16, 8))
SMALL_SHAPES = ((2, 6, 3), (3, 5, 3))
LIMIT_S, QUICK_LIMIT_S = 10.0, 2.0

# Published shares of the ideal throughput by one-way latency, for P = 4 equal stages and 32 microbatches; forward F,
# input gradient I and weight gradient W take 1 s each. The first two columns are 1F1B with depths (microbatches in
# flight) of P - s and of 2(P - s) - 1 in stage s. The last two split the backward into I and W, with depths P - s and
# with depths that hide the round trip. In the published runs a worker that became free at the very moment of an arrival
# did not see that arrival; with it the last two columns are 0.970, 0.970 at latency 0 and 0.780, 0.897 at latency 1.
LATENCY_SHARES = {
    0: (0.914, 0.914, 0.950, 0.950),
    1: (0.611, 0.865, 0.750, 0.889),
    2: (0.459, 0.738, 0.549, 0.881),
    4: (0.307, 0.495, 0.344, 0.768),
    8: (0.184, 0.298, 0.197, 0.671),
}
LATENCY_STAGES, LATENCY_MICROBATCHES = 4, 32

SIMPLE = ("1f1b_s", "1f1b_deep_s", "zb_h1_s")

LEAST_PROVED = 0.8
MEAN_RATIO = 1.02
WORST_RATIO = 1.05
MOST_SEARCH_S = 0.2
WORST_SHARE_DIFFERENCE = 0.01


def latency_problems(latency_s: float) -> tuple[SchedulingProblem, SchedulingProblem, SchedulingProblem]:
    """Return the scheduling problems of `LATENCY_SHARES`: depths P - s, 2(P - s) - 1, and the round trip hidden."""
    stages = range(LATENCY_STAGES)
    problem = problem_of([Times(latency_s=latency_s)] * len(stages), [1] * LATENCY_MICROBATCHES, np.inf)
    shallow = [len(stages) - stage for stage in stages]
    round_trips_s = [2 * ways + 2 * latency_s * (ways - 1) for ways in shallow]
    hiding = [max(ways, ceil(trip_s / 3)) for ways, trip_s in zip(shallow, round_trips_s, strict=True)]
    depths = (shallow, [2 * ways - 1 for ways in shallow], hiding)
    first, second, third = (replace(problem, in_flight=tuple(each)) for each in depths)
    return first, second, third


def latency_shares(latency_s: float) -> tuple[float, ...]:
    """Return the shares of the ideal throughput, in the columns of `LATENCY_SHARES`, that the dynamic order reaches."""
    shallow, deep, hiding = latency_problems(latency_s)
    ideal_s = 3.0 * LATENCY_MICROBATCHES
    cases = ((shallow, False), (deep, False), (shallow, True), (hiding, True))
    return tuple(ideal_s / finish_s(problem, dynamic_orders(problem, split)) for problem, split in cases)


def _instances(quick: bool) -> Iterator[tuple[str, tuple[int, int, int], SchedulingProblem]]:
    shapes, seeds = (QUICK_SHAPES, (0,)) if quick else (SHAPES, (0, 1))
    for name, seed in product(FAMILIES, seeds):
        if seed and name in ("uniform", "latency"):
            continue
        for shape in SMALL_SHAPES if name == "unequal microbatches" else shapes:
            yield name, shape, family(name, *shape, seed)


def measure_schedules(quick: bool, tell: Callable[[str], None]) -> BenchResult:
    """Compare all schedules on all instances, and reproduce the published table of latencies."""
    limit_s = QUICK_LIMIT_S if quick else LIMIT_S
    # The first call compiles the schedulers.
    portfolio(family("unequal microbatches", 3, 6, 3))
    rows: list[Row] = []
    for name, (stages, microbatches, memory), problem in _instances(quick):
        tell(f"{name}, {stages} stages, {microbatches} microbatches, memory {memory}")
        case: Row = {"instance": name, "stages": stages, "microbatches": microbatches, "memory": memory}
        rows.append({**case, **_compare(problem, limit_s), "shares": ""})
    gains = []
    for latency_s, expected in LATENCY_SHARES.items():
        tell(f"latency {latency_s}")
        shares = latency_shares(latency_s)
        gains.append(np.subtract(shares, expected))
        problem = latency_problems(latency_s)[-1]
        case = {"instance": f"latency {latency_s} F", "stages": LATENCY_STAGES, "microbatches": LATENCY_MICROBATCHES}
        told = " ".join(f"{share:.3f}" for share in shares)
        rows.append({**case, "memory": "depth", **_compare(problem, limit_s), "shares": told})
    return BenchResult(rows, _checks(rows, np.array(gains)))


def _checks(rows: Sequence[Row], gains: Floats) -> list[Check]:
    proved = [row for row in rows if row["proved"]]
    checks = [at_least("share of instances with a proved optimum", len(proved) / len(rows), LEAST_PROVED)]
    for name in ("compact_zb", "portfolio"):
        ratios = [float(row[f"{name}_ratio"]) for row in proved]
        simple = [float(row[f"{name}_s"]) / min(float(row[key]) for key in SIMPLE) for row in rows]
        taken_s = max(float(row[f"{name}_taken_s"]) for row in rows)
        checks += [
            at_most(f"{name}: mean ratio to the optimum", mean(ratios), MEAN_RATIO),
            at_most(f"{name}: worst ratio to the optimum", max(ratios), WORST_RATIO),
            at_most(f"{name}: worst ratio to the better of 1F1B and ZB-H1", max(simple), 1 + 1e-9),
            at_most(f"{name}: longest search, seconds", taken_s, MOST_SEARCH_S),
        ]
    whole = float(np.abs(gains[:, :2]).max())
    return [
        *checks,
        at_most("table of latencies: worst difference of 1F1B", whole, WORST_SHARE_DIFFERENCE),
        at_least("table of latencies: least gain", float(gains.min()), -WORST_SHARE_DIFFERENCE),
    ]


def _compare(problem: SchedulingProblem, limit_s: float) -> Row:
    makespans = {}
    for name, factor in (("1f1b_s", 1), ("1f1b_deep_s", 2)):
        depths = tuple(factor * (problem.stages - stage) - factor + 1 for stage in range(problem.stages))
        makespans[name] = finish_s(problem, one_f_one_b(replace(problem, in_flight=depths)))
    makespans |= {name: finish_s(problem, make(problem)) for name, make in (("zb_h1_s", zb_h1), ("zb_h2_s", zb_h2))}
    makespans["dynamic_s"] = finish_s(problem, dynamic_orders(problem, split=True))
    makespans["compact_zb_s"], compact_taken_s = _timed(compact_zb, problem)
    makespans["portfolio_s"], portfolio_taken_s = _timed(portfolio, problem)
    best = solve(problem, limit_s)
    return {
        "bound_s": lower_bound_s(problem),
        "optimum_s": best.makespan_s,
        "proved": bool(best.is_proved),
        **makespans,
        "compact_zb_ratio": makespans["compact_zb_s"] / best.makespan_s,
        "portfolio_ratio": makespans["portfolio_s"] / best.makespan_s,
        "compact_zb_taken_s": compact_taken_s,
        "portfolio_taken_s": portfolio_taken_s,
    }


def _timed(schedule: Callable[[SchedulingProblem], Orders], problem: SchedulingProblem) -> tuple[float, float]:
    """Return the makespan of a schedule and the search time, the least of three, in seconds."""
    taken_s = []
    for _ in range(3):
        began_s = perf_counter()
        orders = schedule(problem)
        taken_s.append(perf_counter() - began_s)
    return finish_s(problem, orders), min(taken_s)
