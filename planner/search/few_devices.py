"""Candidates over few devices, every one of which may be unlike the others: each set of them may be a stage."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, pairwise, product
from typing import NamedTuple

import numpy as np

from planner.cluster import Device
from planner.memory import state_bytes
from planner.microbatching import even_cut
from planner.plan import Pipeline, Plan, Replica, Stage
from planner.scenario import Scenario
from planner.search.build import QUICK_ORDER, with_hiding_depths
from planner.search.every_chain import count_chains, every_chain
from planner.search.group_split import Chains, Floats, Groups, Ints, best_chains, timed_chains
from planner.steady_path import SteadyPath, nominal_path

# With more devices there are too many sets: they are searched in pools.
MOST_DEVICES = 6

# Bounds for the slowest stage: from the least that is possible to that of the quickest device alone, and beyond, where
# memory or links rule that out.
_BOUNDS, _BEYOND, _FARTHEST = 40, 10, 20.0

# Where there are so few chains, all of them get their times.
_MOST_CHAINS = 3000

# So many chains become plans, if the closed form finds them no worse than so many times the best; and so many pairs.
_CHAINS, _WORST, _PAIRS = 120, 1.6, 64

# Divisions of the batch between two sets that are looked at, those of each pair that may become plans, and chains of
# each set that are combined.
_DIVISIONS, _DIVISIONS_OF_PAIR, _OF_SET = 64, 3, 3

_NEVER_S = 1e30

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


def few_devices_plans(devices: Sequence[Device], scenario: Scenario, strategy: str) -> Iterator[Plan]:
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
        groups, count = _groups(devices, scenario, microbatch), -(-batch // microbatch)
        chains[microbatch] = (
            timed_chains(groups, count, *every_chain(len(devices), layers))
            if few
            else best_chains(groups, count, _bounds_s(groups))
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
        sum_s = _sum_between_s(_devices_of(one, devices), _devices_of(other, devices), scenario) if able else 0.0
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
    size_bytes = scenario.model.parameter_bytes(0, len(scenario.model.layers)) / min(len(ones), len(others)) / 2
    ends = [(a.name, b.name) for a in ones for b in others]
    paths = {nominal_path(scenario, *hop) for one, other in ends for hop in ((one, other), (other, one))}
    return 2 * max(path.latency_s + path.occupancy_s(size_bytes) for path in paths)


def _plan(
    blocks: Sequence[_Block], chains: Mapping[int, Chains], devices: Sequence[Device], scenario: Scenario, strategy: str
) -> Iterator[Plan]:
    """The plan of chains side by side, if it fits."""
    pipelines = []
    for sought, chain, microbatch, samples in blocks:
        group, first_layer = chains[sought].group[chain], chains[sought].first_layer[chain]
        cuts = [*first_layer[group > 0].tolist(), len(scenario.model.layers)]
        shares = [_samples(_devices_of(each, devices), scenario, microbatch) for each in group.tolist() if each]
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


def _devices_of(group: int, devices: Sequence[Device]) -> list[Device]:
    return [device for number, device in enumerate(devices) if group >> number & 1]


def _samples(members: Sequence[Device], scenario: Scenario, microbatch: int) -> dict[str, int]:
    """A microbatch shared by speed: one sample for each, as far as they go; each other one goes where it is done first.

    Without its one sample a device would have no place in a group, which may need its memory.
    """
    layers = len(scenario.model.layers)
    first = min(1, microbatch // len(members))
    given = dict.fromkeys((device.name for device in members), first)
    for _ in range(microbatch - first * len(members)):
        soonest = min(
            members, key=lambda device: scenario.model.times(0, layers, device.kind, given[device.name] + 1).total_s
        )
        given[soonest.name] += 1
    return given


def _groups(devices: Sequence[Device], scenario: Scenario, microbatch: int) -> Groups:
    sets, layers = 1 << len(devices), range(len(scenario.model.layers))
    samples = np.zeros((sets, len(devices)), np.int64)
    compute_s = np.zeros((sets, len(devices), len(layers) + 1))
    for group in range(1, sets):
        members = _devices_of(group, devices)
        shares = _samples(members, scenario, microbatch)
        for number, device in enumerate(devices):
            if device in members:
                share = samples[group, number] = shares[device.name]
                compute_s[group, number, 1:] = _compute_s(scenario, device.kind, share)
    effects = scenario.effects.memory
    largest = max(layer.activation_bytes for layer in scenario.model.layers)
    workspace = effects.framework_bytes + round(effects.workspace_share * microbatch * largest)
    busy_s, way_s = _crossings(devices, scenario, microbatch)
    return Groups(
        compute_s,
        samples,
        _until([state_bytes(scenario, layer, layer + 1) for layer in layers]),
        _until([layer.activation_bytes for layer in scenario.model.layers]),
        np.array([device.memory_bytes - workspace for device in devices], np.float64),
        busy_s,
        way_s,
        scenario.effects.compute.transfers_block,
        np.array([_sum_s(_devices_of(group, devices), scenario) for group in range(sets)]),
    )


def _compute_s(scenario: Scenario, kind: str, samples: int) -> Floats:
    layers = range(len(scenario.model.layers))
    if not samples:
        # Without work a device has no place in a group.
        return _NEVER_S * np.arange(1.0, len(layers) + 1)
    launches_s = 3 * scenario.effects.compute.launch_overhead_s / len(layers)
    return np.cumsum([scenario.model.times(at, at + 1, kind, samples).total_s + launches_s for at in layers])


def _until(values: Sequence[float]) -> Floats:
    return np.concatenate(([0.0], np.cumsum(np.array(values, np.float64))))


def _crossings(devices: Sequence[Device], scenario: Scenario, microbatch: int) -> tuple[Floats, Floats]:
    """Seconds that each layer's output keeps the worst path between two sets busy, and until it is there."""
    sets, outputs = 1 << len(devices), np.array([layer.output_bytes for layer in scenario.model.layers])
    paths = {
        (one.name, other.name): nominal_path(scenario, one.name, other.name)
        for one in devices
        for other in devices
        if one is not other
    }
    busy_s = np.zeros((sets, sets, len(outputs)))
    way_s = np.zeros((sets, sets, len(outputs)))
    for one in range(1, sets):
        for other in range(1, sets):
            if one & other:
                continue
            ends = [(a.name, b.name) for a in _devices_of(one, devices) for b in _devices_of(other, devices)]
            pieces = -(-microbatch // max(one.bit_count(), other.bit_count()))
            busy_s[one, other], way_s[one, other] = _crossing([paths[pair] for pair in ends], pieces * outputs)
    return busy_s, way_s


def _crossing(paths: Sequence[SteadyPath], sizes: Ints) -> tuple[Floats, Floats]:
    distinct = set(paths)
    occupancy_s = np.array([[path.occupancy_s(size) for size in sizes.tolist()] for path in distinct])
    latency_s = np.array([path.latency_s for path in distinct])
    return occupancy_s.max(axis=0), (occupancy_s + latency_s[:, None]).max(axis=0)


def _sum_s(members: Sequence[Device], scenario: Scenario) -> float:
    """Seconds of a ring over the devices for the whole model."""
    count = len(members)
    if count < 2:
        return 0.0
    part = scenario.model.parameter_bytes(0, len(scenario.model.layers)) / count
    names = [device.name for device in members]
    paths = [nominal_path(scenario, one, other) for one, other in zip(names, [*names[1:], names[0]], strict=True)]
    return 2 * (count - 1) * max(path.latency_s + path.occupancy_s(part) for path in paths)


def _bounds_s(groups: Groups) -> Floats:
    devices = groups.compute_s.shape[1]
    alone_s = np.array([groups.compute_s[1 << number, number, -1] for number in range(devices)])
    high = float(alone_s.min())
    low = 1 / float((1 / np.maximum(alone_s, 1e-12)).sum())
    return np.concatenate((np.geomspace(low, high, _BOUNDS), np.geomspace(1.2 * high, _FARTHEST * high, _BEYOND)))
