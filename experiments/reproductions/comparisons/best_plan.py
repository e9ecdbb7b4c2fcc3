"""The judge of a comparison: finds the fastest plan of a strategy over its knobs, by the same rules for everyone.

The evaluator ranks all candidate plans of a strategy by the time of a step (`contended_step_time_s`), which estimates
the effect of flows that share a link. The simulator, which computes it, then decides between the best few.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from experiments.reproductions.comparisons.contenders import CONTENDERS
from planner.check import is_possible
from planner.plan.plan import Plan
from planner.runs.metrics import measure
from planner.scenario.scenario import Scenario
from planner.systems.auto.objective import contended_step_time_s
from sim.simulator import Simulator

# Number of candidates of each strategy that are simulated, and of steps of each simulation. The first step is longer
# than the others if nothing waits at its start, so more than one is needed.
SIMULATED = 3
STEPS = 3


@dataclass(frozen=True, slots=True)
class Entry:
    """The best plan of a strategy in a scenario.

    Attributes:
        plan: The fastest plan; None if no candidate fits into memory.
        samples_per_s: Its simulated throughput, samples/s; 0 without a plan.
        candidates: Number of plans that fit into memory and were ranked.
    """

    plan: Plan | None
    samples_per_s: float
    candidates: int


@cache
def best_entry(strategy: str, scenario: Scenario) -> Entry:
    """Return the fastest plan of one of `CONTENDERS` over all of its knobs."""
    return best_of(CONTENDERS[strategy](scenario), scenario)


def best_of(plans: Iterable[Plan], scenario: Scenario) -> Entry:
    """Return the fastest of some plans; those that do not fit into memory are left out."""
    possible = (plan for plan in dict.fromkeys(plans) if is_possible(plan, scenario))
    scored = {plan: contended_step_time_s(plan, scenario) for plan in possible}
    nearest = sorted(scored, key=lambda plan: scored[plan])[:SIMULATED]
    simulated = [(samples_per_s(plan, scenario), -rank) for rank, plan in enumerate(nearest)]
    if not simulated:
        return Entry(None, 0.0, 0)
    best_per_s, rank = max(simulated)
    return Entry(nearest[-rank], best_per_s, len(scored))


def samples_per_s(plan: Plan, scenario: Scenario) -> float:
    """Return the simulated throughput of a plan, samples/s."""
    return measure(Simulator().run(scenario, plan, None, STEPS)).samples_per_s


def describe(plan: Plan, scenario: Scenario) -> str:
    """Return the knobs of a plan as text: the layers and replicas of each stage, microbatches and recomputation."""
    regions = len({scenario.cluster.by_name[device].region for device in plan.devices})
    pipelines = [
        " ".join(
            f"{stage.end_layer - stage.first_layer}x{len(stage.replicas)}K{stage.in_flight}" for stage in each.stages
        )
        for each in plan.pipelines
    ]
    first = plan.pipelines[0]
    recomputed = ", recomputed" if any(stage.recompute for stage in plan.stages) else ""
    where = f" in {regions} region{'s' * (regions > 1)}" if len(scenario.cluster.regions) > 1 else ""
    return f"{' | '.join(pipelines)}; {len(first.microbatches)} of {first.microbatches[0]}{recomputed}{where}"
