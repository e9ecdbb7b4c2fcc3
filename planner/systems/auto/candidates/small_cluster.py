"""Candidate plans of small clusters: the fastest pipelines on every set of devices, alone and in pairs side by side."""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import combinations, pairwise, permutations, product
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
from planner.systems.auto.candidates.cut_points import cut_points
from planner.systems.auto.candidates.subset_dp import (
    SubsetPipelines,
    best_pipelines,
    bounds_grid,
    devices_of,
    samples_by_speed,
    subset_costs,
    timed_pipelines,
)

# Most devices for which every set is tried; larger clusters are searched by device class only.
MOST_DEVICES = 6

# Most possible pipelines for which all are timed; if there are more, the dynamic programme selects some.
_MOST_TIMED = 3000

# Most pipelines that become plans of their own, their longest step as a multiple of the shortest one by the closed
# form, and most pairs of pipelines that become plans.
_ALONE, _WORST, _PAIRS = 120, 1.6, 64

# For pairs of pipelines: divisions of the batch that are tried, divisions that are kept for each pair of device sets,
# and pipelines of each set that are combined.
_DIVISIONS, _DIVISIONS_OF_PAIR, _PER_SET = 64, 3, 3

# Microbatch sizes that are tried: `_MICROBATCHES` samples, and the batch divided by each of `_COUNTS`.
_COUNTS = (1, 2, 3)
_MICROBATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


def count_pipelines(devices: int, layers: int) -> int:
    """Return the number of pipelines that `all_pipelines` would list."""
    return sum(comb(layers - 1, len(subsets) - 1) for subsets in _ordered_subsets((1 << devices) - 1))


@lru_cache(maxsize=8)
def all_pipelines(devices: int, layers: int) -> tuple[Ints, Ints]:
    """Return all pipelines on some of ``devices`` devices: sequences of disjoint device sets with consecutive layers.

    Returns:
        Two arrays of integers, [pipelines, devices], with an entry for each stage: the set of its devices (bit i is 1
        if device i is a member), and the index of its first layer. Both are 0 after the last stage.
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
    """Yield every sequence of disjoint, non-empty subsets of a set of devices; sets are numbers as in `subset_dp`."""
    subset = devices
    while subset:
        yield (subset,)
        yield from ((subset, *others) for others in _ordered_subsets(devices & ~subset))
        subset = (subset - 1) & devices


class _PipelineShare(NamedTuple):
    """A pipeline, and the part of the batch that it takes.

    Attributes:
        sought: Microbatch size for which the pipeline was found, in samples; a key of `_Found`.
        number: Index of the pipeline among those found for this microbatch size.
        microbatch: Samples of the pipeline's largest microbatch, at most ``sought``.
        samples: Samples that the pipeline takes per step.
    """

    sought: int
    number: int
    microbatch: int
    samples: int


# (time of a step by the closed form in seconds, pipeline).
_Timed = tuple[float, _PipelineShare]

# Microbatch size in samples to the pipelines that were found for it.
_Found = Mapping[int, SubsetPipelines]


def small_cluster_plans(devices: Sequence[Device], scenario: Scenario, strategy: str) -> Iterator[Plan]:
    """Yield the fastest plans of one pipeline, and of two pipelines side by side, by the closed form.

    Args:
        devices: Devices that may be used, `MOST_DEVICES` at most.
        scenario: Scenario that the plans are for.
        strategy: Name that the plans give as their strategy.
    """
    batch, parts = scenario.training.global_batch, len(cut_points(scenario)) - 1
    found: dict[int, SubsetPipelines] = {}
    evenly = {-(-batch // count) for count in _COUNTS}
    few = count_pipelines(len(devices), parts) <= _MOST_TIMED
    for microbatch in sorted({size for size in _MICROBATCHES if size < batch} | evenly):
        costs, count = subset_costs(devices, scenario, microbatch), -(-batch // microbatch)
        found[microbatch] = (
            timed_pipelines(costs, count, *all_pipelines(len(devices), parts))
            if few
            else best_pipelines(costs, count, bounds_grid(costs))
        )
    for alone in _alone(found, batch):
        yield from _plan([alone], found, devices, scenario, strategy)
    for pair in _pairs(found, devices, scenario):
        yield from _plan(pair, found, devices, scenario, strategy)


def _alone(found: _Found, batch: int) -> list[_PipelineShare]:
    """Return the fastest pipelines that take the whole batch, and the fastest one on every set of devices."""
    by_set = _best_of_sets(found, batch, _ALONE)
    ranked = sorted(each for timed in by_set.values() for each in timed)
    quick = [share for time_s, share in ranked[:_ALONE] if time_s <= _WORST * ranked[0][0]]
    # If the objective is a price or has a budget, a slow pipeline on few devices may be best: keep one for each set.
    return list(dict.fromkeys((*quick, *(timed[0][1] for timed in by_set.values()))))


def _pairs(found: _Found, devices: Sequence[Device], scenario: Scenario) -> list[tuple[_PipelineShare, _PipelineShare]]:
    """Return the fastest pairs of pipelines on disjoint sets of devices, which divide the batch between them."""
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
    """Return the ``most`` fastest pipelines of each device set for steps of ``samples`` samples, fastest first.

    Assumption: if microbatches become smaller than those for which a pipeline was found, the time of a step shrinks in
    proportion.
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
    """Return the time of gradient sums between two pipelines, seconds, as if all of their stages were equal."""
    size_bytes = scenario.model.parameter_bytes(0, len(scenario.model.layers)) / min(len(ones), len(others))
    ends = [(a.name, b.name) for a in ones for b in others]
    paths = {nominal_path(scenario, *hop) for one, other in ends for hop in ((one, other), (other, one))}
    return ring_s(paths, size_bytes, 2)


@lru_cache(maxsize=256)
def _in_ring(names: tuple[str, ...], scenario: Scenario) -> tuple[str, ...]:
    """Return devices in the order in which the slowest hop of a ring over them is quickest; links may be one-sided."""
    if len(names) < 3:
        return names
    size_bytes = scenario.model.parameter_bytes(0, len(scenario.model.layers)) / len(names)
    paths = {hop: nominal_path(scenario, *hop) for hop in permutations(names, 2)}

    def time_s(ring: tuple[str, ...]) -> float:
        return ring_s({paths[hop] for hop in zip(ring, (*ring[1:], ring[0]), strict=True)}, size_bytes, len(ring))

    return min(((names[0], *others) for others in permutations(names[1:])), key=time_s)


def _plan(
    shares: Sequence[_PipelineShare], found: _Found, devices: Sequence[Device], scenario: Scenario, strategy: str
) -> Iterator[Plan]:
    """Yield the plan of one or two pipelines side by side, or nothing if a pipeline does not fit into memory."""
    pipelines = []
    for sought, number, microbatch, samples in shares:
        subset, first_layer = found[sought].devices[number], found[sought].first_layer[number]
        cuts = [*first_layer[subset > 0].tolist(), len(scenario.model.layers)]
        given = [samples_by_speed(devices_of(each, devices), scenario, microbatch) for each in subset.tolist() if each]
        rings = [_in_ring(tuple(name for name, share in each.items() if share), scenario) for each in given]
        stages = tuple(
            Stage(first, end, tuple(Replica(name, shares[name]) for name in ring), 1)
            for (first, end), ring, shares in zip(pairwise(cuts), rings, given, strict=True)
        )
        pipeline = with_hiding_depths(Pipeline(stages, even_cut(samples, -(-samples // microbatch))), scenario)
        if pipeline is None:
            return
        pipelines.append(pipeline)
    schedule, order = QUICK_ORDER
    yield Plan(scenario.name, scenario.model.name, strategy, schedule, tuple(pipelines), order)
