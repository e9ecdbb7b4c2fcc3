"""Strategy ``auto``: a search over everything that a plan can express, which docs/systems/auto.md describes.

Candidate plans are ranked by a fast cost model, and a local search improves the best ones. Then the order of actions of
the best results is optimised, and the plan with the lowest score by the objective is returned.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from planner.check import is_possible
from planner.cost.in_flight import no_split_fits
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.step.orders import with_schedule
from planner.systems.asteroid.strategy import asteroid
from planner.systems.auto.candidates.build import plan_of
from planner.systems.auto.candidates.device_classes import device_classes_of
from planner.systems.auto.candidates.mixed import find_mixes
from planner.systems.auto.candidates.small_cluster import MOST_DEVICES, small_cluster_plans
from planner.systems.auto.local_search import improve
from planner.systems.auto.objective import CostModel, Objective, approximate_step_time_s, contended_step_time_s
from planner.systems.auto.robust import in_bad_windows, robust_cost_model
from planner.systems.cannikin.strategy import cannikin, lb_bsp
from planner.systems.deepcee.strategy import deepcee
from traces.common.errors import InputError


@dataclass(frozen=True, slots=True)
class _Effort:
    """Limits of the local search for clusters of one size.

    Attributes:
        most_devices: Most devices of a cluster to which these limits apply.
        starts: Number of the best candidates from which the local search starts.
        evaluations: Most plans that are scored from each start.
        finished: Number of the best results whose order of actions is optimised.
    """

    most_devices: float
    starts: int
    evaluations: int
    finished: int


# Limits for small and for larger clusters, in which plans take longer to score. In small clusters the local search has
# two rounds: the first, with `_FIRST_EVALUATIONS` evaluations, starts from candidates whose pipelines use different
# sets of devices; the second, with `_SMALL.evaluations`, starts from the best results of the first.
_SMALL = _Effort(most_devices=12, starts=10, evaluations=120, finished=2)
_LARGER = (_Effort(64, starts=3, evaluations=60, finished=2), _Effort(inf, starts=2, evaluations=20, finished=1))
_FIRST_EVALUATIONS = 40

# Numbers of gradient buckets that are tried for data-parallel plans, whose gradient sums overlap with backward.
BUCKETS = (1, 2, 4, 8)

_NAME = "auto"


def search(
    scenario: Scenario,
    objective: Objective,
    cost_model: CostModel | None = None,
    without: frozenset[str] = frozenset(),
    seeds: Iterable[Plan] = (),
) -> Plan:
    """Return the plan with the lowest score by ``objective`` that is found; equal arguments give equal plans.

    Args:
        scenario: Scenario to plan for.
        objective: Quantity to minimise, and its limits.
        cost_model: Function from a plan to the time of its step, seconds. If None, the two models of
            `planner.systems.auto.objective` are used: the fast one in the search, the detailed one for the last choice.
        without: Names of devices that may not be used.
        seeds: Plans that are additional candidates, so that the result is at least as good as each of them.

    Raises:
        InputError: No plan fits into memory, or none keeps the objective's limits.
    """
    quick = cost_model or (lambda plan: approximate_step_time_s(plan, scenario))
    exact = cost_model or (lambda plan: contended_step_time_s(plan, scenario))

    def score(plan: Plan) -> float:
        if not without.isdisjoint(plan.devices):
            return inf
        return objective.score(plan, quick(plan), scenario)

    def final_score(plan: Plan) -> float:
        return objective.score(plan, exact(plan), scenario)

    given = [plan for plan in seeds if without.isdisjoint(plan.devices) and is_possible(plan, scenario)]
    ranked = sorted(dict.fromkeys((*candidates(scenario, without), *given)), key=score)
    improved = _improved(ranked, scenario, score)
    finished = dict.fromkeys(ordered for plan in improved for ordered in _ordered(plan, scenario))
    able = [*(plan for plan in finished if is_possible(plan, scenario)), *given]
    if not able:
        devices = [device for device in scenario.cluster.devices if device.name not in without]
        raise no_split_fits(scenario, _NAME, devices)
    best = min(able, key=final_score)
    if final_score(best) == inf:
        raise InputError(
            "no plan keeps within the limits of the objective: "
            f"budget {objective.budget_per_hour or 'any'}, rate {objective.samples_per_s or 'any'}",
            where=f"strategy '{_NAME}'",
            valid="give a larger budget (dollars per hour), a lower rate (samples per second), or more devices",
        )
    return replace(best, strategy=_NAME)


def candidates(scenario: Scenario, without: frozenset[str] = frozenset()) -> Iterator[Plan]:
    """Yield the candidate plans of the search, none of which uses a device of ``without``."""
    devices = [device for device in scenario.cluster.devices if device.name not in without]
    if len(devices) <= MOST_DEVICES:
        yield from small_cluster_plans(devices, scenario, _NAME)
    for mix in find_mixes(device_classes_of(scenario.cluster, without), scenario):
        plan = plan_of(mix.templates, scenario, _NAME)
        if plan is not None:
            yield plan


def _improved(ranked: Sequence[Plan], scenario: Scenario, score: Callable[[Plan], float]) -> list[Plan]:
    """Return the best results of the local search from ``ranked``; both are in ascending order of their scores."""

    def best(starts: Sequence[Plan], evaluations: int, most: int) -> list[Plan]:
        found = [improve(plan, scenario, score, evaluations) for plan in starts]
        return [plan for plan, _ in sorted(found, key=lambda each: each[1])[:most]]

    devices = len(scenario.cluster.devices)
    if devices > _SMALL.most_devices:
        effort = next(each for each in _LARGER if devices <= each.most_devices)
        return best(ranked[: effort.starts], effort.evaluations, effort.finished)
    distinct = {_device_sets(plan): plan for plan in reversed(ranked)}
    starts = [plan for plan in ranked if distinct[_device_sets(plan)] is plan][: _SMALL.starts]
    first = best(starts, _FIRST_EVALUATIONS, len(starts))
    # `_ordered` shortens data-parallel plans more than others, by overlapping gradient sums with backward: keep one.
    rest = first[_SMALL.finished :]
    data_parallel = [plan for plan in rest if all(len(each.stages) == 1 for each in plan.pipelines)][:1]
    return best([*first[: _SMALL.finished], *data_parallel], _SMALL.evaluations, _SMALL.finished + 1)


def _device_sets(plan: Plan) -> frozenset[frozenset[str]]:
    """Return the set of devices of each pipeline."""
    return frozenset(
        frozenset(device for stage in pipeline.stages for replica in stage.replicas for device in replica.devices)
        for pipeline in plan.pipelines
    )


def _ordered(plan: Plan, scenario: Scenario) -> Iterator[Plan]:
    """Yield a plan with other orders of actions or, if it is data-parallel, with other sizes of gradient buckets."""
    few = len(plan.devices) <= _SMALL.most_devices
    if any(len(pipeline.stages) > 1 for pipeline in plan.pipelines):
        yield with_schedule(plan, scenario, "compact-zb")
        if few:
            yield plan
        return
    whole = replace(plan, schedule="1f1b", order="scheduled")
    yield whole
    # With more buckets, the first sum starts earlier during backward, but each bucket adds a latency.
    largest = scenario.model.parameter_bytes(0, len(scenario.model.layers))
    for buckets in BUCKETS if few and len(plan.devices) > 1 else ():
        size_bytes = max(1, largest // buckets)
        yield replace(whole, synchronisation=replace(plan.synchronisation, bucket_bytes=size_bytes))


# Most devices for which plans of published planners are used as seeds, and most for Asteroid's plan: Asteroid's
# planning time grows with the square of the number of devices.
MOST_SEEDED, MOST_OF_ASTEROID = 32, 12


def auto(scenario: Scenario) -> Plan:
    """Return the plan with the shortest step that the search finds.

    Raises:
        InputError: No plan fits into memory, or the model's profile has no times for a device kind of the cluster.
    """
    return plan_for(scenario, Objective())


def plan_for(scenario: Scenario, objective: Objective, cost_model: CostModel | None = None) -> Plan:
    """Return the plan with the lowest score that `search` finds, with plans of published planners as seeds.

    The arguments are those of `search`.

    Raises:
        InputError: No plan fits into memory or keeps the limits, or the model's profile has no times for a device kind
            of the cluster.
    """
    return search(scenario, objective, cost_model, seeds=_published(scenario))


def _published(scenario: Scenario) -> Iterator[Plan]:
    """Yield plans of published planners that train synchronously; a planner that finds no plan is skipped."""
    devices = len(scenario.cluster.devices)
    strategies = (deepcee, cannikin, lb_bsp) if devices <= MOST_SEEDED else ()
    for strategy in (*strategies, asteroid) if devices <= MOST_OF_ASTEROID else strategies:
        try:
            yield strategy(scenario)
        except InputError:
            continue


def robust_plan(scenario: Scenario, objective: Objective, quantile: float) -> Plan:
    """Return the plan with the lowest score by ``objective`` at the step time of bad windows of the links' traces.

    This is the step time that at most a share ``quantile`` of the windows exceeds (`robust_cost_model`). There are two
    searches, one with candidates for the links' mean rates and one with candidates for their rates in bad windows,
    because a plan that avoids an unreliable link is no good candidate at the link's mean rate.

    Raises:
        InputError: No plan fits into memory or keeps the limits.
    """
    cost_model = robust_cost_model(scenario, quantile)
    plans = [plan_for(each, objective, cost_model) for each in (scenario, in_bad_windows(scenario, quantile))]
    return min(plans, key=lambda plan: objective.score(plan, cost_model(plan), scenario))
