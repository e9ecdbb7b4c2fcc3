"""The search of `auto`: candidates, the best of them changed little by little, and the order of actions at the end."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from math import inf

from planner.check import check_plan
from planner.cost.in_flight import no_split_fits
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.step.orders import with_schedule
from planner.systems.auto.candidates.build import plan_of
from planner.systems.auto.candidates.device_classes import device_classes_of
from planner.systems.auto.candidates.mixed import find_mixes
from planner.systems.auto.candidates.small_cluster import MOST_DEVICES, small_cluster_plans
from planner.systems.auto.local_search import improve
from planner.systems.auto.objective import CostModel, Objective, approximate_step_time_s, contended_step_time_s
from traces.common.errors import InputError

# So many of the candidates go through the local search, which may ask the judge so many times for each, and so many of
# the results are put in order: of many devices plans take longer to judge. Of few, those with unlike groups of devices
# are improved a little, and then the best of them for longer.
STARTS, FIRST_EVALUATIONS, EVALUATIONS, FINISHED = 10, 40, 120, 2
MANY_DEVICES, STARTS_OF_MANY, EVALUATIONS_OF_MANY, FINISHED_OF_MANY = 12, 3, 60, 2
# Of still more.
MOST_DEVICES_IMPROVED, STARTS_OF_MOST, EVALUATIONS_OF_MOST, FINISHED_OF_MOST = 64, 2, 20, 1

# In so many buckets the gradients of the model may be summed while backward goes on, where all devices hold all layers.
BUCKETS = (1, 2, 4, 8)

_NAME = "auto"


def search(
    scenario: Scenario,
    objective: Objective,
    judge: CostModel | None = None,
    without: frozenset[str] = frozenset(),
    seeds: Iterable[Plan] = (),
) -> Plan:
    """Return the best plan that is found.

    It depends on nothing but its arguments: devices that the scenario does not have, or that are ruled out, cannot be
    in the plan.

    Args:
        scenario: What to plan for.
        objective: What is to be least.
        judge: Says how long a step takes; the compiled evaluator if None.
        without: Devices that may not be used.
        seeds: Plans that the result is to be no worse than.

    Raises:
        InputError: Nothing fits into memory, or nothing keeps within the objective's limits.
    """
    ask = judge or (lambda plan: approximate_step_time_s(plan, scenario))

    def score(plan: Plan) -> float:
        if not without.isdisjoint(plan.devices):
            return inf
        return objective.score(plan, ask(plan), scenario)

    given = [plan for plan in seeds if without.isdisjoint(plan.devices) and _is_possible(plan, scenario)]
    ranked = sorted(_scored((*candidates(scenario, without), *given), score), key=lambda each: each[0])
    improved = _improved([plan for _, plan in ranked], scenario, score)
    exact = _exact(judge, scenario)
    finished = dict.fromkeys(ordered for plan in improved for ordered in _ordered(plan, scenario))
    able = [*(plan for plan in finished if _is_possible(plan, scenario)), *given]
    if not able:
        devices = [device for device in scenario.cluster.devices if device.name not in without]
        raise no_split_fits(scenario, _NAME, devices)
    best = min(able, key=lambda plan: objective.score(plan, exact(plan), scenario))
    if objective.score(best, exact(best), scenario) == inf:
        raise InputError(
            "no plan keeps within the limits of the objective",
            where=f"strategy '{_NAME}'",
            valid="a larger budget, a lower rate, or more devices",
        )
    return replace(best, strategy=_NAME)


def candidates(scenario: Scenario, without: frozenset[str] = frozenset()) -> Iterator[Plan]:
    """Give the plans of the best skeletons."""
    devices = [device for device in scenario.cluster.devices if device.name not in without]
    if len(devices) <= MOST_DEVICES:
        yield from small_cluster_plans(devices, scenario, _NAME)
    for mix in find_mixes(device_classes_of(scenario.cluster, without), scenario):
        plan = plan_of(mix.templates, scenario, _NAME)
        if plan is not None:
            yield plan


def _improved(ranked: Sequence[Plan], scenario: Scenario, score: Callable[[Plan], float]) -> list[Plan]:
    """The best plans after the local search, the best first."""

    def best(starts: Sequence[Plan], evaluations: int, most: int) -> list[Plan]:
        found = [improve(plan, scenario, score, evaluations) for plan in starts]
        return [plan for plan, _ in sorted(found, key=lambda each: each[1])[:most]]

    devices = len(scenario.cluster.devices)
    if devices > MOST_DEVICES_IMPROVED:
        return best(ranked[:STARTS_OF_MOST], EVALUATIONS_OF_MOST, FINISHED_OF_MOST)
    if devices > MANY_DEVICES:
        return best(ranked[:STARTS_OF_MANY], EVALUATIONS_OF_MANY, FINISHED_OF_MANY)
    unlike = {_places(plan): plan for plan in reversed(ranked)}
    starts = [plan for plan in ranked if unlike[_places(plan)] is plan][:STARTS]
    first = best(starts, FIRST_EVALUATIONS, len(starts))
    # Sums that begin while backward goes on may make the best of those without stages better than all.
    whole = [plan for plan in first[FINISHED:] if all(len(each.stages) == 1 for each in plan.pipelines)][:1]
    return best([*first[:FINISHED], *whole], EVALUATIONS, FINISHED + 1)


def _places(plan: Plan) -> frozenset[frozenset[str]]:
    """The devices of each pipeline."""
    return frozenset(
        frozenset(device for stage in pipeline.stages for replica in stage.replicas for device in replica.devices)
        for pipeline in plan.pipelines
    )


def _scored(plans: Iterable[Plan], score: Callable[[Plan], float]) -> list[tuple[float, Plan]]:
    return [(score(plan), plan) for plan in dict.fromkeys(plans)]


def _exact(judge: CostModel | None, scenario: Scenario) -> CostModel:
    return judge or (lambda plan: contended_step_time_s(plan, scenario))


def _ordered(plan: Plan, scenario: Scenario) -> Iterator[Plan]:
    """The plan in the order that a search finds, where there is something to order; of few devices in others too."""
    few = len(plan.devices) <= MANY_DEVICES
    if any(len(pipeline.stages) > 1 for pipeline in plan.pipelines):
        yield with_schedule(plan, scenario, "compact-zb")
        if few:
            yield plan
        return
    whole = replace(plan, schedule="1f1b", order="scheduled")
    yield whole
    # Sums may begin while backward goes on; with more, smaller buckets sooner, but for latency more often.
    largest = scenario.model.parameter_bytes(0, len(scenario.model.layers))
    for buckets in BUCKETS if few and len(plan.devices) > 1 else ():
        size_bytes = max(1, largest // buckets)
        yield replace(whole, synchronisation=replace(plan.synchronisation, bucket_bytes=size_bytes))


def _is_possible(plan: Plan, scenario: Scenario) -> bool:
    try:
        check_plan(plan, scenario)
    except InputError:
        return False
    return True
