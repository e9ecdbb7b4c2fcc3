"""All chains of stages on few devices: where there are not too many, nothing need be left out."""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import combinations, pairwise, product
from math import comb
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.cost.network import nominal_path
from planner.cost.synchronisation import ring_s
from planner.plan.microbatches import even_cut
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.scenario.cluster import Device
from planner.scenario.scenario import Scenario
from planner.systems.auto.candidates.build import QUICK_ORDER, with_hiding_depths
from planner.systems.auto.candidates.subset_costs import bounds_of, devices_of, groups_of, samples_by_speed
from planner.systems.auto.candidates.subset_split import Chains, best_chains, timed_chains

Ints = NDArray[np.int64]


def count_chains(devices: int, layers: int) -> int:
    """Return how many chains there are: ordered, disjoint sets of devices, each with a range of the layers."""
    return sum(comb(layers - 1, len(groups) - 1) for groups in _ordered_groups((1 << devices) - 1))


@lru_cache(maxsize=8)
def every_chain(devices: int, layers: int) -> tuple[Ints, Ints]:
    """Return the sets of devices, as numbers whose bits are devices, and first layers of all stages of all chains.

    Returns:
        Two arrays [chains, devices]; the set is 0 after the last stage.
    """
    chains = [
        (groups, (0, *cuts))
        for groups in _ordered_groups((1 << devices) - 1)
        for cuts in combinations(range(1, layers), len(groups) - 1)
    ]
    group = np.zeros((len(chains), devices), np.int64)
    first_layer = np.zeros((len(chains), devices), np.int64)
    for number, (groups, firsts) in enumerate(chains):
        group[number, : len(groups)], first_layer[number, : len(firsts)] = groups, firsts
    return group, first_layer


def _ordered_groups(devices: int) -> Iterator[tuple[int, ...]]:
    """Every sequence of disjoint sets of some of the devices."""
    group = devices
    while group:
        yield (group,)
        yield from ((group, *others) for others in _ordered_groups(devices & ~group))
        group = (group - 1) & devices


# With more devices there are too many sets: they are searched in pools.
MOST_DEVICES = 6

# Where there are so few chains, all of them get their times.
_MOST_CHAINS = 3000

# So many chains become plans, if the closed form finds them no worse than so many times the best; and so many pairs.
_CHAINS, _WORST, _PAIRS = 120, 1.6, 64

# Divisions of the batch between two sets that are looked at, those of each pair that may become plans, and chains of
# each set that are combined.
_DIVISIONS, _DIVISIONS_OF_PAIR, _OF_SET = 64, 3, 3

# Sizes of microbatches that are tried, beside those that cut the batch evenly into so few.
_COUNTS = (1, 2, 3)
_MICROBATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


class _Block(NamedTuple):
    """A chain that takes a part of the batch.

    Attributes:
        sought: Samples of the microbatches for which the chain was sought.
        chain: Its number among those.
        microbatch: Samples of its microbatches at most.
        samples: Of a step.
    """

    sought: int
    chain: int
    microbatch: int
    samples: int


# Seconds by the closed form, and what takes them.
_Timed = tuple[float, _Block]


def small_cluster_plans(devices: Sequence[Device], scenario: Scenario, strategy: str) -> Iterator[Plan]:
    """Give the plans of the best chains on the best sets of devices, and of pairs of them side by side.

    Args:
        devices: That may be used, `MOST_DEVICES` at most.
        scenario: What it is for.
        strategy: Its name in the plans.
    """
    batch, layers = scenario.training.global_batch, len(scenario.model.layers)
    chains: dict[int, Chains] = {}
    evenly = {-(-batch // count) for count in _COUNTS}
    few = count_chains(len(devices), layers) <= _MOST_CHAINS
    for microbatch in sorted({size for size in _MICROBATCHES if size < batch} | evenly):
        groups, count = groups_of(devices, scenario, microbatch), -(-batch // microbatch)
        chains[microbatch] = (
            timed_chains(groups, count, *every_chain(len(devices), layers))
            if few
            else best_chains(groups, count, bounds_of(groups))
        )
    for alone in _alone(chains, batch):
        yield from _plan([alone], chains, devices, scenario, strategy)
    for pair in _pairs(chains, devices, scenario):
        yield from _plan(pair, chains, devices, scenario, strategy)


def _alone(chains: Mapping[int, Chains], batch: int) -> list[_Block]:
    """The best chains that take the whole batch."""
    of_sets = _blocks(chains, batch, _CHAINS)
    ranked = sorted(each for blocks in of_sets.values() for each in blocks)
    quick = [block for time_s, block in ranked[:_CHAINS] if time_s <= _WORST * ranked[0][0]]
    # What costs least or keeps within a budget may be slow: the best of every set of devices takes part.
    return list(dict.fromkeys((*quick, *(blocks[0][1] for blocks in of_sets.values()))))


def _pairs(chains: Mapping[int, Chains], devices: Sequence[Device], scenario: Scenario) -> list[tuple[_Block, _Block]]:
    """The best pairs of chains on sets without a common device, each with the divisions of the batch that are best."""
    batch = scenario.training.global_batch
    divisions = sorted({round(part) for part in np.linspace(1, batch - 1, _DIVISIONS)}) if batch > 1 else []
    sizes = sorted({samples for part in divisions for samples in (part, batch - part)})
    blocks = {samples: _blocks(chains, samples, _OF_SET) for samples in sizes}
    found = []
    for one, other in combinations(range(1, 1 << len(devices)), 2):
        if one & other:
            continue
        able = [part for part in divisions if one in blocks[part] and other in blocks[batch - part]]
        slowest_s = sorted((max(blocks[part][one][0][0], blocks[batch - part][other][0][0]), part) for part in able)
        sum_s = _sum_between_s(devices_of(one, devices), devices_of(other, devices), scenario) if able else 0.0
        for _, part in slowest_s[:_DIVISIONS_OF_PAIR]:
            for (first_s, first), (second_s, second) in product(blocks[part][one], blocks[batch - part][other]):
                found.append((max(first_s, second_s) + sum_s, first, second))
    return [(one, other) for _, one, other in sorted(found)[:_PAIRS]]


def _blocks(chains: Mapping[int, Chains], samples: int, most: int) -> dict[int, list[_Timed]]:
    """What takes so many samples, of each set of devices the best few, the best first.

    Microbatches that come out smaller than those of the chain take less in proportion.
    """
    of_sets: dict[int, list[_Timed]] = {}
    keys, sizes, steps_s, used = list(chains), [], [], []
    for sought, each in chains.items():
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
        block = _Block(keys[index], at - int(starts[index]), sizes[index], samples)
        of_sets.setdefault(int(flat_used[at]), []).append((float(flat_s[at]), block))
    return of_sets


def _sum_between_s(ones: Sequence[Device], others: Sequence[Device], scenario: Scenario) -> float:
    """Seconds of the sums between two chains, as if each had a stage for every device."""
    size_bytes = scenario.model.parameter_bytes(0, len(scenario.model.layers)) / min(len(ones), len(others))
    ends = [(a.name, b.name) for a in ones for b in others]
    paths = {nominal_path(scenario, *hop) for one, other in ends for hop in ((one, other), (other, one))}
    return ring_s(paths, size_bytes, 2)


def _plan(
    blocks: Sequence[_Block], chains: Mapping[int, Chains], devices: Sequence[Device], scenario: Scenario, strategy: str
) -> Iterator[Plan]:
    """The plan of chains side by side, if it fits."""
    pipelines = []
    for sought, chain, microbatch, samples in blocks:
        group, first_layer = chains[sought].group[chain], chains[sought].first_layer[chain]
        cuts = [*first_layer[group > 0].tolist(), len(scenario.model.layers)]
        shares = [samples_by_speed(devices_of(each, devices), scenario, microbatch) for each in group.tolist() if each]
        stages = tuple(
            Stage(first, end, tuple(Replica(name, share) for name, share in each.items() if share), 1)
            for (first, end), each in zip(pairwise(cuts), shares, strict=True)
        )
        pipeline = with_hiding_depths(Pipeline(stages, even_cut(samples, -(-samples // microbatch))), scenario)
        if pipeline is None:
            return
        pipelines.append(pipeline)
    schedule, order = QUICK_ORDER
    yield Plan(scenario.name, scenario.model.name, strategy, schedule, tuple(pipelines), order)
