"""Candidate plans of small clusters: pipelines on every set of devices, alone and in pairs, with nothing left out."""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import combinations, pairwise, product
from math import comb
from typing import NamedTuple

import numpy as np

from planner.cost.network import nominal_path
from planner.cost.synchronisation import ring_s
from planner.plan.microbatches import even_cut
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.scenario.cluster import Device
from planner.scenario.scenario import Scenario
from planner.step.graph import Ints
from planner.systems.auto.candidates.build import QUICK_ORDER, with_hiding_depths
from planner.systems.auto.candidates.subset_dp import (
    SubsetPipelines,
    best_pipelines,
    bounds_grid,
    devices_of,
    samples_by_speed,
    subset_costs,
    timed_pipelines,
)

# More devices have too many sets: they are searched by device class.
MOST_DEVICES = 6

# Where there are at most so many pipelines, all of them are timed.
_MOST_TIMED = 3000

# At most so many pipelines become plans, if the closed form finds them no slower than the best by this factor; and at
# most so many pairs.
_ALONE, _WORST, _PAIRS = 120, 1.6, 64

# Divisions of the batch between two sets that are tried, those of each pair that may become plans, and pipelines of
# each set that are combined.
_DIVISIONS, _DIVISIONS_OF_PAIR, _PER_SET = 64, 3, 3

# Microbatch sizes that are tried, besides those that cut the batch evenly into so few microbatches.
_COUNTS = (1, 2, 3)
_MICROBATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


def count_pipelines(devices: int, layers: int) -> int:
    """Return the number of pipelines: ordered, disjoint sets of devices, each with a range of the layers."""
    return sum(comb(layers - 1, len(subsets) - 1) for subsets in _ordered_subsets((1 << devices) - 1))


@lru_cache(maxsize=8)
def all_pipelines(devices: int, layers: int) -> tuple[Ints, Ints]:
    """Return the sets of devices, as numbers whose bits are devices, and the first layers of all pipelines' stages.

    Returns:
        Two arrays [pipelines, devices]; the set is 0 after the last stage.
    """
    pipelines = [
        (subsets, (0, *cuts))
        for subsets in _ordered_subsets((1 << devices) - 1)
        for cuts in combinations(range(1, layers), len(subsets) - 1)
    ]
    subset = np.zeros((len(pipelines), devices), np.int64)
    first_layer = np.zeros((len(pipelines), devices), np.int64)
    for number, (subsets, firsts) in enumerate(pipelines):
        subset[number, : len(subsets)], first_layer[number, : len(firsts)] = subsets, firsts
    return subset, first_layer


def _ordered_subsets(devices: int) -> Iterator[tuple[int, ...]]:
    """Every sequence of disjoint sets of some of the devices."""
    subset = devices
    while subset:
        yield (subset,)
        yield from ((subset, *others) for others in _ordered_subsets(devices & ~subset))
        subset = (subset - 1) & devices


class _PipelineShare(NamedTuple):
    """A pipeline that takes a part of the batch.

    Attributes:
        sought: Microbatch size for which the pipeline was searched for, samples.
        number: Number of the pipeline among those found for this size.
        microbatch: Largest microbatch, samples.
        samples: Samples per step.
    """

    sought: int
    number: int
    microbatch: int
    samples: int


# Seconds of a step by the closed form, and the pipeline that takes them.
_Timed = tuple[float, _PipelineShare]

# Microbatch size to the pipelines found for it.
_Found = Mapping[int, SubsetPipelines]


def small_cluster_plans(devices: Sequence[Device], scenario: Scenario, strategy: str) -> Iterator[Plan]:
    """Give the plans of the best pipelines on the best sets of devices, and of pairs of them side by side.

    Args:
        devices: Devices that may be used, `MOST_DEVICES` at most.
        scenario: Scenario that the plans are for.
        strategy: Name of the strategy in the plans.
    """
    batch, layers = scenario.training.global_batch, len(scenario.model.layers)
    found: dict[int, SubsetPipelines] = {}
    evenly = {-(-batch // count) for count in _COUNTS}
    few = count_pipelines(len(devices), layers) <= _MOST_TIMED
    for microbatch in sorted({size for size in _MICROBATCHES if size < batch} | evenly):
        costs, count = subset_costs(devices, scenario, microbatch), -(-batch // microbatch)
        found[microbatch] = (
            timed_pipelines(costs, count, *all_pipelines(len(devices), layers))
            if few
            else best_pipelines(costs, count, bounds_grid(costs))
        )
    for alone in _alone(found, batch):
        yield from _plan([alone], found, devices, scenario, strategy)
    for pair in _pairs(found, devices, scenario):
        yield from _plan(pair, found, devices, scenario, strategy)


def _alone(found: _Found, batch: int) -> list[_PipelineShare]:
    """Return the best pipelines that take the whole batch."""
    by_set = _best_of_sets(found, batch, _ALONE)
    ranked = sorted(each for timed in by_set.values() for each in timed)
    quick = [share for time_s, share in ranked[:_ALONE] if time_s <= _WORST * ranked[0][0]]
    # The plan that costs least, or keeps within a budget, may be slow: the best one of every set of devices is kept.
    return list(dict.fromkeys((*quick, *(timed[0][1] for timed in by_set.values()))))


def _pairs(found: _Found, devices: Sequence[Device], scenario: Scenario) -> list[tuple[_PipelineShare, _PipelineShare]]:
    """Return the best pairs of pipelines on disjoint sets of devices, each with the best divisions of the batch."""
    batch = scenario.training.global_batch
    divisions = sorted({round(part) for part in np.linspace(1, batch - 1, _DIVISIONS)}) if batch > 1 else []
    sizes = sorted({samples for part in divisions for samples in (part, batch - part)})
    best = {samples: _best_of_sets(found, samples, _PER_SET) for samples in sizes}
    pairs = []
    for one, other in combinations(range(1, 1 << len(devices)), 2):
        if one & other:
            continue
        able = [part for part in divisions if one in best[part] and other in best[batch - part]]
        slowest_s = sorted((max(best[part][one][0][0], best[batch - part][other][0][0]), part) for part in able)
        sum_s = _sum_between_s(devices_of(one, devices), devices_of(other, devices), scenario) if able else 0.0
        for _, part in slowest_s[:_DIVISIONS_OF_PAIR]:
            for (first_s, first), (second_s, second) in product(best[part][one], best[batch - part][other]):
                pairs.append((max(first_s, second_s) + sum_s, first, second))
    return [(one, other) for _, one, other in sorted(pairs)[:_PAIRS]]


def _best_of_sets(found: _Found, samples: int, most: int) -> dict[int, list[_Timed]]:
    """Pipelines that take so many samples per step: of each set of devices the best few, the best first.

    Microbatches smaller than those that a pipeline was searched for are assumed to take proportionally less.
    """
    by_set: dict[int, list[_Timed]] = {}
    keys, sizes, steps_s, used = list(found), [], [], []
    for sought, each in found.items():
        count = -(-samples // sought)
        sizes.append(-(-samples // count))
        steps_s.append(each.steps_s(count) * (sizes[-1] / sought))
        used.append(each.used)
    flat_s, flat_used = np.concatenate(steps_s), np.concatenate(used)
    starts = np.cumsum([0, *(len(each) for each in steps_s)])
    order = np.lexsort((flat_s, flat_used))
    first = np.flatnonzero(np.diff(flat_used[order], prepend=-1))
    rank = np.arange(len(order)) - np.repeat(first, np.diff(first, append=len(order)))
    for at in order[rank < most].tolist():
        index = int(np.searchsorted(starts, at, side="right")) - 1
        share = _PipelineShare(keys[index], at - int(starts[index]), sizes[index], samples)
        by_set.setdefault(int(flat_used[at]), []).append((float(flat_s[at]), share))
    return by_set


def _sum_between_s(ones: Sequence[Device], others: Sequence[Device], scenario: Scenario) -> float:
    """Seconds of the gradient sums between two pipelines, as if each had a stage for every device."""
    size_bytes = scenario.model.parameter_bytes(0, len(scenario.model.layers)) / min(len(ones), len(others))
    ends = [(a.name, b.name) for a in ones for b in others]
    paths = {nominal_path(scenario, *hop) for one, other in ends for hop in ((one, other), (other, one))}
    return ring_s(paths, size_bytes, 2)


def _plan(
    shares: Sequence[_PipelineShare], found: _Found, devices: Sequence[Device], scenario: Scenario, strategy: str
) -> Iterator[Plan]:
    """Return the plan of pipelines side by side, if it fits."""
    pipelines = []
    for sought, number, microbatch, samples in shares:
        subset, first_layer = found[sought].devices[number], found[sought].first_layer[number]
        cuts = [*first_layer[subset > 0].tolist(), len(scenario.model.layers)]
        given = [samples_by_speed(devices_of(each, devices), scenario, microbatch) for each in subset.tolist() if each]
        stages = tuple(
            Stage(first, end, tuple(Replica(name, share) for name, share in each.items() if share), 1)
            for (first, end), each in zip(pairwise(cuts), given, strict=True)
        )
        pipeline = with_hiding_depths(Pipeline(stages, even_cut(samples, -(-samples // microbatch))), scenario)
        if pipeline is None:
            return
        pipelines.append(pipeline)
    schedule, order = QUICK_ORDER
    yield Plan(scenario.name, scenario.model.name, strategy, schedule, tuple(pipelines), order)
