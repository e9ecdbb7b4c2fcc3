"""Measures the simulated throughput of Asteroid and the baselines, and the errors of Asteroid's closed form."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean

import numpy as np

from experiments.benches.planning.pipeline_families import Times, problem_of
from experiments.benches.result import Row
from planner.cost.in_flight import fitting_depths
from planner.plan.plan import Pipeline, Plan
from planner.runs.metrics import measure, step_ends_s
from planner.scenario.scenario import Scenario
from planner.schedules.kernel.timing import finish_s
from planner.schedules.one_f_one_b import one_f_one_b
from planner.systems.asteroid.round_latency import RoundStep, dominant_step, round_latency_s, round_steps
from planner.systems.asteroid.stage_costs import levelled
from planner.systems.asteroid.strategy import HybridRules, asteroid_depth, by_memory, hybrid_plan, plain_depth
from planner.systems.registry import make_plan
from sim.simulator import Simulator
from traces.common.errors import InputError


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


PARALLEL = ("ddp", "gpipe")
HYBRID = ("pipedream", "dapple", "hetpipe")
OWN = ("asteroid", "asteroid-duplex")

# The first step fills an empty pipeline; the two after it show the throughput.
STEPS = 3


def simulated_samples_per_s(plan: Plan, scenario: Scenario) -> float:
    """Return the simulated throughput of a plan, samples/s."""
    return measure(Simulator().run(scenario, plan, None, STEPS)).samples_per_s


def throughput_rows(scenario: Scenario, place: Row) -> list[Row]:
    """Return a row for each strategy that finds a plan, Asteroid first; rows begin with the columns of ``place``."""
    rows: list[Row] = []
    asteroid_per_s = 0.0
    for strategy in (*OWN, *PARALLEL, *HYBRID):
        try:
            plan = make_plan(strategy, scenario)
        except InputError:
            # A baseline whose plan does not fit into memory is left out.
            continue
        record = Simulator().run(scenario, plan, None, STEPS)
        samples_per_s = measure(record).samples_per_s
        asteroid_per_s = asteroid_per_s or samples_per_s
        first_s = step_ends_s(record.events)[0]
        rows.append(
            {
                **place,
                "strategy": strategy,
                "stages": "/".join(str(len(stage.replicas)) for stage in plan.pipelines[0].stages),
                "pipelines": len(plan.pipelines),
                "samples_per_s": samples_per_s,
                "asteroid_ratio": asteroid_per_s / samples_per_s,
                "first_step_s": first_s,
                "closed_form_error": _error(plan, scenario, first_s, duplex=False),
                "corrected_error": _error(plan, scenario, first_s, duplex=True),
            }
        )
    return rows


def _error(plan: Plan, scenario: Scenario, first_s: float, duplex: bool) -> float | str:
    """Return the closed form's relative error on the first step; empty text if the form does not apply to the plan."""
    pipeline = plan.pipelines[0]
    if plan.strategy not in OWN or len(pipeline.stages) == 1:
        return ""
    return round_latency_s(round_steps(pipeline, scenario), len(pipeline.microbatches), duplex) / first_s - 1


def without_mechanisms(scenario: Scenario, plan: Plan) -> dict[str, Plan]:
    """Return Asteroid's plan with each mechanism off, by mechanism; leave out plans that do not fit into memory."""
    (pipeline,) = plan.pipelines
    depths = [plain_depth(len(pipeline.stages) - index) for index in range(len(pipeline.stages))]
    even = tuple(
        replace(stage, replicas=tuple(replace(replica, share=1.0) for replica in stage.replicas))
        for stage in pipeline.stages
    )
    unknowing = hybrid_plan(levelled(scenario), by_memory(scenario.cluster.devices), plan.strategy, HybridRules())
    found = {
        "depths 2(P - p) - 1: P - p": _with_depths(plan, pipeline, depths, scenario),
        "shares by speed: even": _with_depths(
            plan, replace(pipeline, stages=even), [stage.in_flight for stage in pipeline.stages], scenario
        ),
        "planning with each device's speed: with the mean": unknowing,
    }
    return {name: each for name, each in found.items() if each is not None}


def _with_depths(plan: Plan, pipeline: Pipeline, depths: list[int], scenario: Scenario) -> Plan | None:
    fitted = fitting_depths(depths, pipeline.stages, scenario, pipeline.microbatches)
    if fitted is None:
        return None
    return replace(plan, pipelines=(pipeline.with_depths(fitted),))
