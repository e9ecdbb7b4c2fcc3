"""Measures the simulated throughput of Asteroid and its rivals, and the errors of Asteroid's closed form."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import mean

import numpy as np

from experiments.benches.planning.pipeline_families import Times, problem_of
from experiments.benches.result import Row
from experiments.reproductions.comparisons.best_plan import best_entry, best_of, describe
from experiments.reproductions.comparisons.contenders import CONTENDERS, asteroid_plans
from planner.runs.event_totals import step_ends_s
from planner.scenario.scenario import Scenario
from planner.schedules.kernel.timing import finish_s
from planner.schedules.one_f_one_b import one_f_one_b
from planner.systems.asteroid.round_latency import RoundStep, dominant_step, round_latency_s, round_steps
from planner.systems.asteroid.strategy import HybridRules, asteroid_depth, by_memory, plain_depth
from planner.systems.registry import make_plan
from sim.simulator import Simulator


@dataclass(frozen=True, slots=True)
class ClosedFormErrors:
    """Relative errors of Asteroid's closed form for the time of a round, and related figures, one per random pipeline.

    Attributes:
        published: Errors of the published form.
        corrected: Errors of the form corrected for full duplex.
        transfer_dominates: Whether the dominant step of the closed form is a transfer.
        plain_depth_ratios: Exact time with P - p microbatches in flight in stage p of P stages, divided by the exact
            time with 2(P - p) - 1.
    """

    published: Sequence[float]
    corrected: Sequence[float]
    transfer_dominates: Sequence[bool]
    plain_depth_ratios: Sequence[float]


def closed_form_errors(instances: int, seed: int = 0) -> ClosedFormErrors:
    """Return the errors of the closed form on random pipelines of 2 to 5 stages and 4 to 32 microbatches."""
    random = np.random.default_rng(seed)
    published, corrected, dominated, slower = [], [], [], []
    for _ in range(instances):
        count, microbatches = int(random.integers(2, 6)), int(random.integers(4, 33))
        forward_s = random.uniform(0.5, 2, count)
        backward_s = 2 * forward_s * random.uniform(0.9, 1.1, count)
        transfer_s = [*random.uniform(0, 2.5, count - 1), 0.0]
        stages = [Times(f, b / 2, b / 2, x) for f, b, x in zip(forward_s, backward_s, transfer_s, strict=True)]
        problem = problem_of(stages, [1.0] * microbatches, np.inf)
        exact_s, shallow_s = (
            finish_s(each, one_f_one_b(each))
            for each in (
                replace(problem, in_flight=tuple(depth(count - index) for index in range(count)))
                for depth in (asteroid_depth, plain_depth)
            )
        )
        steps: list[RoundStep] = []
        for f, b, x in zip(forward_s, backward_s, transfer_s, strict=True):
            steps += [RoundStep(float(f), float(b)), RoundStep(float(x), float(x), is_transfer=True)]
        steps.pop()
        published.append(round_latency_s(steps, microbatches) / exact_s - 1)
        corrected.append(round_latency_s(steps, microbatches, duplex=True) / exact_s - 1)
        dominated.append(steps[dominant_step(steps, microbatches, duplex=False)].is_transfer)
        slower.append(shallow_s / exact_s)
    return ClosedFormErrors(published, corrected, dominated, slower)


def describe_errors(errors: Sequence[float]) -> str:
    """Return mean and range of relative errors as text."""
    return f"{mean(errors):+.1%} in the mean, {min(errors):+.1%} to {max(errors):+.1%}"


OWN = "asteroid"
CORRECTED = "asteroid-duplex"

# End of the names of columns for plans that use every board.
ALL_BOARDS = " on all boards"
DATA_PARALLEL = ("ddp",)
PIPELINES = ("gpipe", "zb-h1-equal")
HYBRID = ("pipedream", "dapple", "hetpipe")
RIVALS = tuple(name for name in CONTENDERS if name not in (OWN, "regional pipelines"))


def throughput_row(scenario: Scenario) -> Row:
    """Return the throughput of Asteroid and of every rival, each with its best knobs, 0 for those without a plan."""
    entries = {name: best_entry(name, scenario) for name in (OWN, *RIVALS)}
    own = entries[OWN]
    assert own.plan is not None, "Asteroid has a plan in every setting"
    rival = max(RIVALS, key=lambda name: entries[name].samples_per_s)
    best = entries[rival]
    return {
        **{name: entry.samples_per_s for name, entry in entries.items()},
        "best_rival": rival,
        "ratio_to_best": own.samples_per_s / best.samples_per_s if best.plan else inf,
        "boards": len(own.plan.devices),
        "plan": describe(own.plan, scenario),
        "best_rival_plan": describe(best.plan, scenario) if best.plan else "",
        **on_all_boards(scenario),
    }


def on_all_boards(scenario: Scenario) -> Row:
    """Return the throughput of Asteroid and of conventional parallelism with their best knobs, but with all boards.

    Published comparisons use all boards. Data parallelism and pipelines are slow on slow links, where one board alone
    can be faster.
    """
    count = len(scenario.cluster.devices)
    own = asteroid_plans(scenario, HybridRules(), orders=[by_memory(scenario.cluster.devices)])
    row = {OWN + ALL_BOARDS: best_of(own, scenario).samples_per_s}
    for name in (*DATA_PARALLEL, *PIPELINES):
        plans = (plan for plan in CONTENDERS[name](scenario) if len(plan.devices) == count)
        row[name + ALL_BOARDS] = best_of(plans, scenario).samples_per_s
    return row


def ratio_to(row: Row, names: Sequence[str], where: str = "") -> float | None:
    """Return Asteroid's throughput divided by that of the fastest of some rivals; None if none of them has a plan.

    ``where`` is `ALL_BOARDS` for plans on all boards, and empty for plans on any boards.
    """
    fastest = max(float(row[name + where]) for name in names)
    return float(row[OWN + where]) / fastest if fastest else None


def own_errors(scenario: Scenario) -> Row:
    """Return the errors of both closed forms on the first step of Asteroid's plans over all boards."""
    row: dict[str, str | float] = {}
    for strategy in (OWN, CORRECTED):
        plan = make_plan(strategy, scenario)
        (pipeline,) = plan.pipelines
        if len(pipeline.stages) > 1:
            first_s = step_ends_s(Simulator().run(scenario, plan, None, 1).events)[0]
            steps, count = round_steps(pipeline, scenario), len(pipeline.microbatches)
            for form, duplex in (("published", False), ("corrected", True)):
                row[f"{strategy}: {form}"] = round_latency_s(steps, count, duplex) / first_s - 1
    return row


def ablation_rows_of(scenario: Scenario) -> list[Row]:
    """Return a row for each mechanism of the planner: Asteroid's best throughput with it, and planned without it."""
    whole = best_entry(OWN, scenario).samples_per_s
    plain = HybridRules()
    rows: list[Row] = []
    for mechanism, rules in {
        "allocation by speed: equal": replace(plain, even=True),
        "depths 2(P - p) - 1: P - p": replace(plain, depth=plain_depth),
        "groups of boards: single boards": replace(plain, widest=1),
    }.items():
        without = best_of(asteroid_plans(scenario, rules), scenario).samples_per_s
        rows.append(_ablation(mechanism, whole, without))
    unknowing = best_of(asteroid_plans(scenario, plain, levels=True), scenario).samples_per_s
    rows.append(_ablation("planning with each board's speed: with the mean", whole, unknowing))
    corrected = best_entry(CORRECTED, scenario).samples_per_s
    return [*rows, _ablation("ours, correction for full duplex: published form", corrected, whole)]


def _ablation(mechanism: str, whole: float, without: float) -> Row:
    return {"mechanism": mechanism, "whole": whole, "without": without, "gain": whole / without if without else inf}
