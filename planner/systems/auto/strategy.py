"""Strategy ``auto``: the search beside plans of other strategies, repeated for sets of regions and for bad windows."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import combinations
from math import inf

from planner.plan.plan import Plan
from planner.scenario.cluster import Link
from planner.scenario.scenario import Scenario, within_regions
from planner.systems.asteroid.strategy import asteroid
from planner.systems.auto.candidates.small_cluster import MOST_DEVICES
from planner.systems.auto.canonical import canonical
from planner.systems.auto.objective import CostModel, Objective, contended_step_time_s
from planner.systems.auto.robust import in_bad_windows, mean_step_s, robust_cost_model
from planner.systems.auto.search import search_near
from planner.systems.baselines.hybrid import dapple, hetpipe, pipedream
from planner.systems.baselines.uniform import ddp, gpipe, megatron, zb_equal
from planner.systems.cannikin.strategy import adaptdl, cannikin, lb_bsp
from planner.systems.deepcee.strategy import deepcee
from traces.common.errors import InputError

# Most regions of a cluster whose subsets are searched too; and most sets of the regions of candidates, and of few
# devices, beside those of better plans.
MOST_REGIONS, MOST_REGION_SETS, MOST_SMALL_SETS = 6, 3, 3

# Share of the windows of a trace that are bad ones, and how many times as good as the plan for mean rates a plan for
# them must be over all windows: since rates change within windows too, smaller differences may be errors.
_BAD_WINDOWS, _WORTHWHILE = 0.1, 1.05

# Ratio of rates or latencies up to which bad windows need no plan of their own.
_ALIKE = 1.2

# Strategies whose plans are seeds, and most devices, layers and samples of a microbatch for each of them. The planning
# time of the later ones grows with the square of the number of devices, or faster, that of the last ones also with the
# square of the layers and with the samples.
_SEEDS: tuple[tuple[Callable[[Scenario], Plan], int, float, float], ...] = (
    *((strategy, 64, inf, inf) for strategy in (deepcee, cannikin, lb_bsp, adaptdl, ddp, gpipe, megatron, zb_equal)),
    (pipedream, 32, inf, inf),
    *((strategy, 8, 64, 4096) for strategy in (asteroid, hetpipe, dapple)),
)


def auto(scenario: Scenario) -> Plan:
    """Return the plan of `start_plan` with the highest throughput.

    Raises:
        InputError: No plan fits into memory, or the model's profile has no times for a device kind of the cluster.
    """
    return start_plan(scenario, Objective())


def start_plan(scenario: Scenario, objective: Objective) -> Plan:
    """Return the plan with the lowest score by ``objective`` at the links' declared rates or over their traces.

    Over traces, the throughput of a plan is its mean over windows of time. The plan for the links' mean rates is
    compared with one for their rates in bad windows, since a link that fails often is worth less than its mean rate.

    Raises:
        InputError: As for `plan_for`.
    """
    plan = plan_for(scenario, objective)
    if all(link.trace is None for link in scenario.cluster.links):
        return plan
    bad = in_bad_windows(scenario, _BAD_WINDOWS)
    if all(map(_is_alike, scenario.cluster.links, bad.cluster.links)):
        return plan
    # The limits of the objective may not be kept in bad windows alone.
    try:
        other = plan_for(bad, objective)
    except InputError:
        return plan

    def score(each: Plan) -> float:
        return objective.score(each, mean_step_s(each, scenario, contended_step_time_s), scenario)

    return other if other != plan and _WORTHWHILE * score(other) < score(plan) else plan


def _is_alike(mean: Link, bad: Link) -> bool:
    """Return whether a link in bad windows is hardly slower than on average."""
    return mean.bandwidth_bps <= _ALIKE * bad.bandwidth_bps and bad.latency_s <= _ALIKE * mean.latency_s


def plan_for(scenario: Scenario, objective: Objective, cost_model: CostModel | None = None) -> Plan:
    """Return the plan with the lowest score that `search` finds, with plans of other strategies as seeds.

    In a few regions, the search is repeated within those of the plan, and within those of candidates that are nearly as
    good, if these are not all regions and their devices can compute as fast; also within sets of regions that have few
    devices. The arguments are those of `search`.

    Raises:
        InputError: No plan fits into memory or keeps the limits, or the model's profile has no times for a device kind
            of the cluster.
    """
    ordered = canonical(scenario)
    exact = cost_model or (lambda plan: contended_step_time_s(plan, ordered))
    nothing: frozenset[str] = frozenset()
    best, near = search_near(scenario, objective, cost_model, nothing, _published(ordered))
    best_score = objective.score(best, exact(best), ordered)
    if len(ordered.cluster.regions) > MOST_REGIONS:
        return best
    tried = {frozenset(ordered.cluster.regions)}
    waiting = _region_sets((best, *near), ordered)[:MOST_REGION_SETS] + _small_sets(ordered)
    while waiting:
        regions = waiting.pop(0)
        if regions in tried:
            continue
        tried.add(regions)
        part = canonical(within_regions(ordered, regions))
        if objective.name == "throughput" and _least_step_s(part) >= best_score:
            continue
        try:
            plan, _ = search_near(part, objective, cost_model, nothing, _published(part))
        except InputError:
            continue
        score = objective.score(plan, exact(plan), ordered)
        if score < best_score:
            best, best_score = plan, score
            waiting += _region_sets((best,), ordered)
    return best


def _least_step_s(scenario: Scenario) -> float:
    """Return the time of a step in which all devices compute at their highest rates, and nothing else takes time."""
    batch, layers = scenario.training.global_batch, len(scenario.model.layers)
    counts = sorted({min(batch, 2**power) for power in range(batch.bit_length() + 1)})
    rates: dict[str, float] = {}
    for kind in {device.kind for device in scenario.cluster.devices}:
        times_s = [scenario.model.times(0, layers, kind, count).total_s for count in counts]
        rates[kind] = max((count / each_s if each_s else inf) for count, each_s in zip(counts, times_s, strict=True))
    return batch / sum(rates[device.kind] for device in scenario.cluster.devices)


def _region_sets(plans: Iterable[Plan], scenario: Scenario) -> list[frozenset[str]]:
    """Return the sets of regions whose devices plans use, each once, without the set of all regions."""
    every = frozenset(scenario.cluster.regions)
    return [regions for regions in dict.fromkeys(_regions(plan, scenario) for plan in plans) if regions != every]


def _regions(plan: Plan, scenario: Scenario) -> frozenset[str]:
    devices = scenario.cluster.by_name
    return frozenset(devices[name].region for name in plan.devices)


def _small_sets(scenario: Scenario) -> list[frozenset[str]]:
    """Return the sets of regions, of those in which every set of devices is tried, whose devices compute fastest.

    None of them contains another. There are none in a cluster in which every set of devices is tried anyway; in one
    with more devices the search may find no plan for just a few regions.
    """
    regions = scenario.cluster.regions
    count = Counter(device.region for device in scenario.cluster.devices)
    if count.total() <= MOST_DEVICES:
        return []
    found: list[frozenset[str]] = []
    for size in range(len(regions) - 1, 0, -1):
        for each in map(frozenset, combinations(regions, size)):
            if sum(count[region] for region in each) <= MOST_DEVICES and not any(each < other for other in found):
                found.append(each)
    return sorted(found, key=lambda each: _least_step_s(within_regions(scenario, each)))[:MOST_SMALL_SETS]


def _published(scenario: Scenario) -> Iterator[Plan]:
    """Yield plans of other strategies that train synchronously; a strategy that finds no plan is skipped."""
    devices, layers = len(scenario.cluster.devices), len(scenario.model.layers)
    samples = scenario.training.microbatch or scenario.training.global_batch
    for strategy, most_devices, most_layers, most_samples in _SEEDS:
        if devices > most_devices or layers > most_layers or samples > most_samples:
            continue
        listings = [scenario]
        if strategy is deepcee and len(scenario.cluster.regions) > 1:
            # Where regions are equally far apart, it takes them in the order of listing, which tells nothing.
            listings.append(_listed_backwards(scenario))
        for listed in listings:
            try:
                yield strategy(listed)
            except InputError:
                continue


def _listed_backwards(scenario: Scenario) -> Scenario:
    """Return the scenario with its regions in reverse order, each with its devices in their order."""
    cluster = scenario.cluster
    backwards = [*cluster.regions][::-1]
    devices = sorted(cluster.devices, key=lambda device: backwards.index(device.region))
    return replace(scenario, cluster=replace(cluster, devices=tuple(devices)))


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
