"""Asteroid's throughput against that of the baselines, simulated, and how near its closed form comes."""

from dataclasses import replace

from experiments.benches.result import Row
from planner.cost.in_flight import fitting_depths
from planner.plan.plan import Pipeline, Plan
from planner.runs.metrics import measure, step_ends_s
from planner.scenario.scenario import Scenario
from planner.systems.asteroid.round_latency import round_latency_s, round_steps
from planner.systems.asteroid.stage_costs import levelled
from planner.systems.asteroid.strategy import HybridRules, by_memory, hybrid_plan, plain_depth
from planner.systems.registry import make_plan
from sim.simulator import Simulator
from traces.common.errors import InputError

PARALLEL = ("ddp", "gpipe")
HYBRID = ("pipedream", "dapple", "hetpipe")
OWN = ("asteroid", "asteroid-duplex")

# After the first, steps follow each other without a pause; two of them show the rate.
STEPS = 3


def simulated_samples_per_s(plan: Plan, scenario: Scenario) -> float:
    """Return what a plan trains per second in the simulator."""
    return measure(Simulator().run(scenario, plan, None, STEPS)).samples_per_s


def throughput_rows(scenario: Scenario, place: Row) -> list[Row]:
    """Return a row for each strategy that has a plan for the scenario, Asteroid first.

    Args:
        scenario: One of the edge scenarios.
        place: Names model, boards and batch.
    """
    rows: list[Row] = []
    asteroid_per_s = 0.0
    for strategy in (*OWN, *PARALLEL, *HYBRID):
        try:
            plan = make_plan(strategy, scenario)
        except InputError:
            # What does not fit is no baseline here.
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
    """How far the closed form is off the first step, relative to it; nothing where it does not apply.

    It counts on Asteroid's depths, and on more than one stage.
    """
    pipeline = plan.pipelines[0]
    if plan.strategy not in OWN or len(pipeline.stages) == 1:
        return ""
    return round_latency_s(round_steps(pipeline, scenario), len(pipeline.microbatches), duplex) / first_s - 1


def without_mechanisms(scenario: Scenario, plan: Plan) -> dict[str, Plan]:
    """Return Asteroid's plan with one mechanism off at a time, by what is off; only those that fit."""
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
    stages = tuple(replace(stage, in_flight=depth) for stage, depth in zip(pipeline.stages, fitted, strict=True))
    return replace(plan, pipelines=(replace(pipeline, stages=stages),))
