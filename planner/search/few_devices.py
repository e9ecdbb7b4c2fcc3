"""Candidates over few devices, every one of which may be unlike the others: each set of them may be a stage."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, pairwise
from typing import NamedTuple

import numpy as np

from planner.cluster import Device
from planner.memory import state_bytes
from planner.microbatching import even_cut
from planner.plan import Pipeline, Plan, Replica, Stage
from planner.scenario import Scenario
from planner.search.build import QUICK_ORDER, with_hiding_depths
from planner.search.group_split import Chains, Floats, Groups, Ints, best_chains
from planner.steady_path import SteadyPath, nominal_path

# With more devices there are too many sets: they are searched in pools.
MOST_DEVICES = 6

# Bounds for the slowest stage: from the least that is possible to that of the quickest device alone, and beyond, where
# memory or links rule that out.
_BOUNDS, _BEYOND, _FARTHEST = 40, 10, 20.0

# So many chains become plans, if the closed form finds them no worse than so many times the best; and so many pairs.
_CHAINS, _WORST, _PAIRS = 120, 1.6, 48

# Divisions of the batch between two sets that are looked at, and those of each pair that may become plans.
_DIVISIONS, _DIVISIONS_OF_PAIR = 64, 3

_NEVER_S = 1e30

# Sizes of microbatches that are tried, beside those that cut the batch evenly into so few.
_COUNTS = (1, 2, 3)
_MICROBATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


class _Block(NamedTuple):
    """A chain that takes a part of the batch: on a set of devices, with a bound's number.

    Attributes:
        used: The set.
        bound: Number of the bound of the slowest stage.
        sought: Samples of the microbatches for which the chain was sought.
        microbatch: Samples of its microbatches at most.
        samples: Of a step.
    """

    used: int
    bound: int
    sought: int
    microbatch: int
    samples: int


def few_devices_plans(devices: Sequence[Device], scenario: Scenario, strategy: str) -> Iterator[Plan]:
    """Give the plans of the best chains on the best sets of devices, and of pairs of them side by side.

    Args:
        devices: That may be used, `MOST_DEVICES` at most.
        scenario: What it is for.
        strategy: Its name in the plans.
    """
    batch = scenario.training.global_batch
    chains: dict[int, Chains] = {}
    evenly = {-(-batch // count) for count in _COUNTS}
    for microbatch in sorted({size for size in _MICROBATCHES if size < batch} | evenly):
        groups = _groups(devices, scenario, microbatch)
        chains[microbatch] = best_chains(groups, -(-batch // microbatch), _bounds_s(groups))
    for alone in _alone(chains, batch):
        yield from _plan([alone], chains, devices, scenario, strategy)
    for pair in _pairs(chains, devices, scenario):
        yield from _plan(pair, chains, devices, scenario, strategy)


def _alone(chains: Mapping[int, Chains], batch: int) -> list[_Block]:
    """The best chains that take the whole batch: of each kind the one with the least bound."""
    unlike: dict[tuple[int, bytes, bytes], tuple[float, _Block]] = {}
    for microbatch, found in chains.items():
        steps_s = found.steps_s(-(-batch // microbatch))
        for bound, used in np.argwhere(np.isfinite(steps_s)).tolist():
            kind = (microbatch, found.group[bound, used].tobytes(), found.first_layer[bound, used].tobytes())
            block = _Block(used, bound, microbatch, microbatch, batch)
            unlike.setdefault(kind, (float(steps_s[bound, used]), block))
    ranked = sorted(unlike.values(), key=lambda each: each[0])
    quick = [block for time_s, block in ranked[:_CHAINS] if time_s <= _WORST * ranked[0][0]]
    # What costs least or keeps within a budget may be slow: the best of every set of devices takes part.
    best_of_set = {block.used: block for _, block in reversed(ranked)}
    return list(dict.fromkeys((*quick, *best_of_set.values())))


def _pairs(chains: Mapping[int, Chains], devices: Sequence[Device], scenario: Scenario) -> list[tuple[_Block, _Block]]:
    """The best pairs of chains on sets without a common device, each with the division of the batch that is best."""
    batch = scenario.training.global_batch
    divisions = sorted({round(part) for part in np.linspace(1, batch - 1, _DIVISIONS)}) if batch > 1 else []
    blocks = {samples: _blocks(chains, samples) for part in divisions for samples in (part, batch - part)}
    found = []
    for one, other in combinations(range(1, 1 << len(devices)), 2):
        if not one & other and divisions:
            sum_s = _sum_between_s(_devices_of(one, devices), _devices_of(other, devices), scenario)
            slowest_s = ((max(blocks[part][0][one], blocks[batch - part][0][other]), part) for part in divisions)
            for time_s, part in sorted(slowest_s)[:_DIVISIONS_OF_PAIR]:
                if np.isfinite(time_s):
                    found.append((time_s + sum_s, blocks[part][1][one], blocks[batch - part][1][other]))
    return [(one, other) for _, one, other in sorted(found)[:_PAIRS]]


def _blocks(chains: Mapping[int, Chains], samples: int) -> tuple[list[float], list[_Block]]:
    """Seconds for so many samples, and what takes them, of each set of devices.

    Microbatches that come out smaller than those of the chain take less in proportion.
    """
    sizes, steps_s = [], []
    for size, each in chains.items():
        count = -(-samples // size)
        sizes.append(-(-samples // count))
        steps_s.append(each.steps_s(count) * (sizes[-1] / size))
    flat_s, bounds = np.concatenate(steps_s), len(steps_s[0])
    keys = list(chains)
    best = flat_s.argmin(axis=0).tolist()
    blocks = [
        _Block(used, at % bounds, keys[at // bounds], sizes[at // bounds], samples) for used, at in enumerate(best)
    ]
    return flat_s.min(axis=0).tolist(), blocks


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
    for used, bound, sought, microbatch, samples in blocks:
        group, first_layer = chains[sought].group[bound, used], chains[sought].first_layer[bound, used]
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
