"""Compares `auto` with the other strategies on random clusters, and checks what should not change its plans.

Plans are simulated for a few steps. For each cluster there are questions that no reference answers but the same
planner, asked otherwise: does another order of listing, do other names, or does a subset of the regions give another
step time?
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf, isfinite
from pathlib import Path
from statistics import median
from time import process_time

from experiments.benches.cases import draw_seeds
from experiments.benches.kept import KeptResults
from experiments.benches.planning.planner import LimitedProcess
from experiments.benches.planning.random_clusters import (
    random_cluster,
    region_subsets,
    relisted,
    renamed,
)
from experiments.benches.result import BenchResult, Check, Row, at_least, at_most
from planner.runs.metrics import measure
from planner.scenario.scenario import Scenario, within_regions
from planner.systems.auto.objective import contended_step_time_s
from planner.systems.registry import STRATEGIES, make_plan
from sim.simulator import Simulator
from traces.common.errors import InputError

OURS = "auto"

# Number of clusters of the whole bench and of `--quick`.
COUNT, QUICK_COUNT = 40, 6

# Steps that each plan is simulated for; the step time is the median of all but the first.
STEPS = 3

# Most processor seconds of a strategy on a cluster with its simulation; the time of some strategies grows with the
# square of the number of devices.
LIMIT_S = 60.0

# Bars. A step is longer or shorter only if it is so by more than rounding.
MOST_BEHIND, MOST_BY_ORDER, MOST_BY_REGIONS = 1.01, 0.005, 0.01
CLOSE, LEAST_CLOSE, MOST_MEDIAN = 0.10, 0.95, 0.03


@dataclass(frozen=True, slots=True)
class ClusterTask:
    """A strategy to measure on the cluster of a seed.

    Attributes:
        order: ``given``, or the change that should change nothing: ``relisted`` or ``renamed``.
        regions: Names of the regions to plan for; all if empty.
    """

    seed: int
    strategy: str
    order: str = "given"
    regions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """A plan's times, infinite if there is no plan.

    Attributes:
        simulated_s: Time of a step in the simulator, seconds.
        predicted_s: Time of a step as `ropebridge plan` gives it, seconds.
        search_s: Processor time of the search, seconds.
        problem: Why there is no plan; empty if there is one.
    """

    simulated_s: float = inf
    predicted_s: float = inf
    search_s: float = inf
    problem: str = ""


def measure_clusters(
    quick: bool,
    tell: Callable[[str], None],
    count: int | None = None,
    seed: int | None = None,
    keep: Path | None = None,
) -> BenchResult:
    """Let every strategy plan for random clusters, and `auto` also for changed ones.

    Args:
        quick: Whether to take fewer clusters.
        tell: Function that shows progress.
        count: Number of clusters; None for the bench's own number.
        seed: Seed of the first cluster, that of each further one is 1 more; None for a random one.
        keep: Folder of the results of each cluster, which are not measured again; None to keep none.
    """
    kept = KeptResults(keep)
    seeds = draw_seeds("clusters", count or (QUICK_COUNT if quick else COUNT), seed, tell)
    rows: list[Row] = []
    names = {number: f"cluster {number}" for number in seeds}
    with LimitedProcess(answer) as process:
        if any(kept.read(name) is None for name in names.values()):
            # Nothing is compiled while a search's time is taken.
            process.result(ClusterTask(seeds[0], OURS), 10 * LIMIT_S)
        for number, name in names.items():
            rows += kept.rows(name, partial(_rows, number, process), lambda row: not row["lost"])
            tell(", ".join(f"{key} {_cell(value)}" for key, value in rows[-1].items()))
    return BenchResult(rows, list(_checks(rows)))


def answer(task: ClusterTask) -> Answer:
    """Return the times of a strategy's plan."""
    scenario = _scenario(task)
    start_s = process_time()
    try:
        plan = make_plan(task.strategy, scenario)
    except InputError as error:
        return Answer(problem=str(error))
    search_s = process_time() - start_s
    if plan.synchronisation.method != "allreduce":
        return Answer(problem=f"pipelines do not wait for each other ({plan.synchronisation.method})")
    simulated_s = measure(Simulator().run(scenario, plan, None, STEPS)).step_s
    return Answer(simulated_s, contended_step_time_s(plan, scenario), search_s)


def _cell(value: str | float) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _scenario(task: ClusterTask) -> Scenario:
    scenario = random_cluster(task.seed)
    if task.regions:
        scenario = within_regions(scenario, task.regions)
    changes: Mapping[str, Callable[[Scenario, int], Scenario]] = {"relisted": relisted, "renamed": renamed}
    return changes[task.order](scenario, task.seed) if task.order in changes else scenario


def _rows(seed: int, process: LimitedProcess[ClusterTask, Answer]) -> list[Row]:
    def ask(task: ClusterTask) -> Answer:
        try:
            return process.result(task, LIMIT_S)
        except TimeoutError as error:
            return Answer(problem=str(error))
        except ChildProcessError as error:
            lost.append(task)
            return Answer(problem=str(error))

    lost: list[ClusterTask] = []
    scenario, own = random_cluster(seed), ClusterTask(seed, OURS)
    others = {name: ask(replace(own, strategy=name)).simulated_s for name in STRATEGIES if name != OURS}
    subsets = {each: ask(replace(own, regions=each)).simulated_s for each in region_subsets(scenario)}
    ours = ask(own)
    ordered = {order: ask(replace(own, order=order)).simulated_s for order in ("relisted", "renamed")}
    best = min(others, key=lambda name: others[name])
    regions = min(subsets, key=lambda each: subsets[each], default=())
    cluster = scenario.cluster
    row: Row = {
        "seed": seed,
        "devices": len(cluster.devices),
        "kinds": len({device.kind for device in cluster.devices}),
        "regions": len(cluster.regions),
        "search_s": ours.search_s,
        "auto_s": ours.simulated_s,
        "best_other": best if isfinite(others[best]) else "none",
        "behind": _ratio(ours.simulated_s, others[best]),
        "predicted_error": _ratio(ours.predicted_s, ours.simulated_s) - 1,
        "relisted": abs(_ratio(ordered["relisted"], ours.simulated_s) - 1),
        "renamed": abs(_ratio(ordered["renamed"], ours.simulated_s) - 1),
        "fewer_regions": 1 - min(1.0, _ratio(subsets.get(regions, inf), ours.simulated_s)),
        "best_regions": ", ".join(regions),
        "lost": len(lost),
        "problem": ours.problem,
    }
    return [row]


def _ratio(one_s: float, other_s: float) -> float:
    """Return a step time divided by another; 1 if there is no plan for either."""
    return 1.0 if one_s == other_s else one_s / other_s if isfinite(other_s) else 0.0


def _checks(rows: Sequence[Mapping[str, str | float | int]]) -> Iterator[Check]:
    def column(name: str) -> list[float]:
        return [float(row[name]) for row in rows]

    errors = [abs(error) for error in column("predicted_error")]
    longest = f"longest step of {OURS}, as a multiple of the best other strategy's"
    yield at_most(longest, max(column("behind")), MOST_BEHIND)
    yield at_least(
        "share of predicted steps within 10 % of the simulated ones",
        sum(error <= CLOSE for error in errors) / len(errors),
        LEAST_CLOSE,
    )
    yield at_most("median difference of predicted and simulated step, as a share", median(errors), MOST_MEDIAN)
    for change in ("relisted", "renamed"):
        largest = f"largest change of the step if devices are {change}, as a share"
        yield at_most(largest, max(column(change)), MOST_BY_ORDER)
    yield at_most("largest gain of fewer regions, as a share", max(column("fewer_regions")), MOST_BY_REGIONS)
