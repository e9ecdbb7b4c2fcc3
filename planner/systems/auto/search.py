"""The search of strategy ``auto`` over everything that a plan can express, which docs/systems/auto.md describes.

Candidate plans are ranked by a fast cost model, the best ones again by a detailed one, and a local search improves the
best of these. Then the order of actions of the best results is optimised, and the plan with the lowest score by the
objective is returned. Devices are taken in an order that depends on neither their names nor the order of listing.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import inf

from planner.adapt.worker_moves import devices_of
from planner.check import is_possible
from planner.cost.in_flight import fitting_depths, no_split_fits, plain_depths
from planner.cost.synchronisation import uneven_sum
from planner.plan.microbatches import even_cut
from planner.plan.plan import ALGORITHMS, Plan
from planner.scenario.scenario import Scenario, check_takes_time
from planner.step.orders import with_schedule
from planner.systems.auto.candidates.build import QUICK_ORDER, plan_of
from planner.systems.auto.candidates.compressed import as_if_compressed, crosses_regions, with_compressions
from planner.systems.auto.candidates.device_classes import device_classes_of
from planner.systems.auto.candidates.mixed import find_mixes
from planner.systems.auto.candidates.small_cluster import MOST_DEVICES, small_cluster_plans
from planner.systems.auto.canonical import canonical
from planner.systems.auto.local_search.improve import improve
from planner.systems.auto.objective import CostModel, Objective, approximate_step_time_s, contended_step_time_s
from traces.common.errors import InputError


@dataclass(frozen=True, slots=True)
class _Effort:
    """Limits of the local search for clusters of one size.

    Attributes:
        most_devices: Most devices of a cluster to which these limits apply.
        starts: Number of the best candidates from which the local search starts.
        evaluations: Most plans that are scored from each start.
        finished: Number of the best results whose order of actions is optimised.
        judged: Number of the best candidates that are ranked again by the detailed cost model.
    """

    most_devices: float
    starts: int
    evaluations: int
    finished: int
    judged: int = 0


# Limits for small and for larger clusters, in which plans take longer to score. In small clusters the local search has
# two rounds: the first, with `_FIRST_EVALUATIONS` evaluations, starts from candidates whose pipelines use different
# sets of devices; the second, with `_SMALL.evaluations`, starts from the best results of the first.
_SMALL = _Effort(most_devices=12, starts=10, evaluations=120, finished=2)
_LARGER = (
    _Effort(64, starts=4, evaluations=60, finished=4, judged=24),
    _Effort(inf, starts=2, evaluations=20, finished=1),
)
_FIRST_EVALUATIONS = 40

# Numbers of gradient buckets that are tried for data-parallel plans, whose gradient sums overlap with backward.
BUCKETS = (1, 2, 4, 8)

_NAME = "auto"

# Score up to which a format listed earlier in the scenario is kept, as a multiple of the lowest one's.
_ROUNDED = 1.01

# Longest step of a seed that is scored by the detailed model, as a multiple of the best candidate's, in larger
# clusters: the fast model does not know that sums of gradients overlap with backward, which saves half at most.
_OVERLAP = 2.0

# Candidates that are looked at for sets of regions to search alone, and the score up to which their regions are
# searched, as a multiple of the lowest one.
_MOST_NEAR, _NEAR = 60, 1.15

# Number of the best results, apart from their orders of actions, that are tried with more microbatches in flight: those
# with fewer stages often gain more by it.
_DEEPENED = 6


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
    return search_near(scenario, objective, cost_model, without, seeds)[0]


def search_near(
    scenario: Scenario,
    objective: Objective,
    cost_model: CostModel | None,
    without: frozenset[str],
    seeds: Iterable[Plan],
) -> tuple[Plan, list[Plan]]:
    """Return the result of `search`, and the candidates whose scores are nearly as low as the lowest one."""
    for kind in dict.fromkeys(device.kind for device in scenario.cluster.devices):
        check_takes_time(scenario, kind)
    listed, scenario = scenario, canonical(scenario)
    quick = cost_model or (lambda plan: approximate_step_time_s(plan, scenario))
    exact = cost_model or (lambda plan: contended_step_time_s(plan, scenario))

    def may_run(plan: Plan) -> bool:
        is_trainable = scenario.code is None or uneven_sum(plan, scenario) is None
        return is_trainable and without.isdisjoint(plan.devices)

    def score(plan: Plan) -> float:
        if not may_run(plan):
            return inf
        return objective.score(plan, quick(plan), scenario)

    @cache
    def final_score(plan: Plan) -> float:
        return objective.score(plan, exact(plan), scenario)

    offered = (each for plan in seeds for each in with_compressions(plan, scenario))
    given = [plan for plan in offered if may_run(plan) and is_possible(plan, scenario)]
    ranked = sorted(dict.fromkeys((*candidates(scenario, without), *given)), key=score)
    effort = next(each for each in (_SMALL, *_LARGER) if len(scenario.cluster.devices) <= each.most_devices)
    if cost_model is None and effort.judged:
        ranked = [*sorted(ranked[: effort.judged], key=final_score), *ranked[effort.judged :]]
    scores = {plan: score(plan) for plan in ranked[:_MOST_NEAR]}
    near = [plan for plan, each in scores.items() if each <= _NEAR * min(scores.values())]
    improved = _improved(ranked, scenario, score, effort)
    if effort.judged:
        improved += ranked[: effort.starts]
    finished = dict.fromkeys(ordered for plan in improved for ordered in _ordered(plan, scenario))
    able = [plan for plan in finished if may_run(plan) and is_possible(plan, scenario)]
    able += [plan for plan in given if effort is _SMALL or score(plan) <= _OVERLAP * min(scores.values(), default=inf)]
    if not able:
        devices = [device for device in listed.cluster.devices if device.name not in without]
        raise no_split_fits(listed, _NAME, devices)
    able.sort(key=final_score)
    best = able[0]
    if effort is _SMALL or effort.judged:
        # Plans of equal scores are nearly always the same plan on interchangeable devices.
        unlike = {f"{final_score(plan):.9g}": plan for plan in reversed(able)}
        leading = [*dict.fromkeys(_in_quick_order(plan) for plan in reversed(unlike.values()))][:_DEEPENED]
        deeper = (each for plan in leading for each in _deeper(plan, scenario))
        best = min((best, *filter(may_run, deeper)), key=final_score)
        sums = (plan for plan in _with_other_sums(best) if is_possible(plan, scenario))
        best = min((best, *sums), key=final_score)
    if len(scenario.training.compressions) > 1:
        best = _least_rounded(best, scenario, final_score)
    if final_score(best) == inf:
        limits, advice = [], []
        if objective.budget_per_hour is not None:
            limits.append(f"at most {objective.budget_per_hour:g} USD per hour")
            advice.append("a larger budget")
        if objective.samples_per_s is not None:
            limits.append(f"at least {objective.samples_per_s:g} samples/s")
            advice.append("a lower rate")
        raise InputError(
            f"no plan keeps within the limits of the objective: {', '.join(limits)}",
            where=f"strategy '{_NAME}'",
            valid=f"give {', '.join(advice)}, or more devices",
        )
    return replace(best, strategy=_NAME), near


def _least_rounded(plan: Plan, scenario: Scenario, score: CostModel) -> Plan:
    """Return the plan with the first compression of the scenario whose score is hardly above the lowest one."""
    formats = [each for each in with_compressions(plan, scenario) if each == plan or is_possible(each, scenario)]
    lowest = min(map(score, formats), default=inf)
    return next((each for each in formats if score(each) <= _ROUNDED * lowest), plan)


def candidates(scenario: Scenario, without: frozenset[str] = frozenset()) -> Iterator[Plan]:
    """Yield the candidate plans of the search, none of which uses a device of ``without``.

    They have each compression that the scenario allows.
    """
    first, *_ = compressions = scenario.training.compressions
    for compression in compressions:
        faster = as_if_compressed(scenario, compression)
        if compression != first and faster is scenario:
            # Messages do not get smaller.
            continue
        for plan in _uncompressed(faster, without):
            if compression == first or crosses_regions(plan, scenario):
                yield replace(plan, compression=compression)


def _uncompressed(scenario: Scenario, without: frozenset[str]) -> Iterator[Plan]:
    devices = [device for device in scenario.cluster.devices if device.name not in without]
    if len(devices) <= MOST_DEVICES:
        yield from small_cluster_plans(devices, scenario, _NAME)
    for mix in find_mixes(device_classes_of(scenario.cluster, without), scenario):
        plan = plan_of(mix.templates, scenario, _NAME)
        if plan is not None:
            yield plan


def _improved(
    ranked: Sequence[Plan], scenario: Scenario, score: Callable[[Plan], float], effort: _Effort
) -> list[Plan]:
    """Return the best results of the local search from ``ranked``, which is in ascending order of the scores.

    In small clusters, the results of the first round follow.
    """

    def best(starts: Sequence[Plan], evaluations: int, most: int) -> list[Plan]:
        found = [improve(plan, scenario, score, evaluations) for plan in starts]
        return [plan for plan, _ in sorted(found, key=lambda each: each[1])[:most]]

    if effort is not _SMALL:
        # Seeds may differ from candidates, and from each other, in their order only.
        distinct: dict[Plan, None] = {}
        for plan in ranked:
            distinct.setdefault(_in_quick_order(plan))
            if len(distinct) == effort.starts:
                break
        return best([*distinct], effort.evaluations, effort.finished)
    firsts = {_device_sets(plan): plan for plan in reversed(ranked)}
    starts = [_in_quick_order(plan) for plan in ranked if firsts[_device_sets(plan)] is plan][: _SMALL.starts]
    first = best(starts, _FIRST_EVALUATIONS, len(starts))
    # `_ordered` shortens data-parallel plans more than others, by overlapping gradient sums with backward: keep one.
    rest = first[_SMALL.finished :]
    data_parallel = [plan for plan in rest if all(len(each.stages) == 1 for each in plan.pipelines)][:1]
    return best([*first[: _SMALL.finished], *data_parallel], _SMALL.evaluations, _SMALL.finished + 1) + first


def _in_quick_order(plan: Plan) -> Plan:
    """Return the plan in the order that is found at once, while others take longer to find than a step to evaluate.

    Buckets of gradients do not fit that order.
    """
    if not _has_stages(plan):
        return plan
    schedule, order = QUICK_ORDER
    sums = replace(plan.synchronisation, bucket_bytes=0)
    return replace(plan, schedule=schedule, order=order, synchronisation=sums)


def _has_stages(plan: Plan) -> bool:
    return any(len(pipeline.stages) > 1 for pipeline in plan.pipelines)


def _device_sets(plan: Plan) -> frozenset[frozenset[str]]:
    """Return the set of devices of each pipeline."""
    return frozenset(map(devices_of, plan.pipelines))


def _ordered(plan: Plan, scenario: Scenario) -> Iterator[Plan]:
    """Yield a plan with other orders of actions or, if it is data-parallel, with other sizes of gradient buckets."""
    few = len(plan.devices) <= _SMALL.most_devices
    if _has_stages(plan):
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


def _deeper(plan: Plan, scenario: Scenario) -> Iterator[Plan]:
    """Yield a plan with more microbatches in flight, in two orders, and with as many or twice as many of them.

    On links that flows share, more are needed than the latencies alone would need. Whole backwards, as in 1F1B, deliver
    gradients later than split ones, which more microbatches in flight hide.
    """
    if not _has_stages(plan):
        return
    orders = (("1f1b", "scheduled"), QUICK_ORDER)
    for (schedule, order), times, factor in product(orders, (1, 2), (2, 3, 4)):
        pipelines = []
        for pipeline in plan.pipelines:
            microbatches = even_cut(pipeline.samples, min(times * len(pipeline.microbatches), pipeline.samples))
            wanted = [max(1, factor * depth - 1) for depth in plain_depths(len(pipeline.stages))]
            depths = fitting_depths(wanted, pipeline.stages, scenario, microbatches)
            if depths is None:
                break
            pipelines.append(replace(pipeline, microbatches=microbatches).with_depths(depths))
        else:
            yield replace(plan, pipelines=tuple(pipelines), schedule=schedule, order=order)


def _with_other_sums(plan: Plan) -> Iterator[Plan]:
    """Yield the plan with the other algorithms of gradient sums, of fewer rounds or fewer bytes on slow links."""
    for algorithm in ALGORITHMS:
        if algorithm != plan.synchronisation.algorithm:
            yield replace(plan, synchronisation=replace(plan.synchronisation, algorithm=algorithm))
