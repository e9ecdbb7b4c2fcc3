"""What layers cost on every set of few devices: the input of the dynamic programme over chains."""

from collections.abc import Sequence

import numpy as np

from planner.cost.layers import layer_table, running_sums
from planner.cost.network import ConstantRatePath, nominal_path
from planner.cost.synchronisation import ring_s
from planner.scenario.cluster import Device
from planner.scenario.scenario import Scenario
from planner.systems.auto.candidates.subset_split import Floats, Groups, Ints

# Bounds for the slowest stage: from the least that is possible to that of the quickest device alone, and beyond, where
# memory or links rule that out.
_BOUNDS, _BEYOND, _FARTHEST = 40, 10, 20.0

_NEVER_S = 1e30


def devices_of(group: int, devices: Sequence[Device]) -> list[Device]:
    """Return the devices of a set, whose bits are their numbers."""
    return [device for number, device in enumerate(devices) if group >> number & 1]


def samples_by_speed(members: Sequence[Device], scenario: Scenario, microbatch: int) -> dict[str, int]:
    """Return a microbatch's samples by name: one for each, as far as they go; each other one where it is done first.

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


def groups_of(devices: Sequence[Device], scenario: Scenario, microbatch: int) -> Groups:
    """Return what a microbatch of so many samples costs each set of devices."""
    sets, layers = 1 << len(devices), range(len(scenario.model.layers))
    samples = np.zeros((sets, len(devices)), np.int64)
    compute_s = np.zeros((sets, len(devices), len(layers) + 1))
    for group in range(1, sets):
        members = devices_of(group, devices)
        shares = samples_by_speed(members, scenario, microbatch)
        for number, device in enumerate(devices):
            if device in members:
                share = samples[group, number] = shares[device.name]
                compute_s[group, number] = _compute_s(scenario, device.kind, share)
    effects = scenario.effects.memory
    largest = max(layer.activation_bytes for layer in scenario.model.layers)
    workspace = effects.framework_bytes + round(effects.workspace_share * microbatch * largest)
    busy_s, way_s = _crossings(devices, scenario, microbatch)
    table = layer_table(scenario, devices[0].kind, microbatch)
    return Groups(
        compute_s,
        samples,
        table.state_bytes,
        table.activation_bytes,
        np.array([device.memory_bytes - workspace for device in devices], np.float64),
        busy_s,
        way_s,
        scenario.effects.compute.transfers_block,
        np.array([_sum_s(devices_of(group, devices), scenario) for group in range(sets)]),
    )


def _compute_s(scenario: Scenario, kind: str, samples: int) -> Floats:
    layers = len(scenario.model.layers)
    if not samples:
        # Without work a device has no place in a group.
        return _NEVER_S * np.arange(layers + 1.0)
    launches_s = 3 * scenario.effects.compute.launch_overhead_s / layers
    return running_sums(layer_table(scenario, kind, samples).layer_s + launches_s)


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
            ends = [(a.name, b.name) for a in devices_of(one, devices) for b in devices_of(other, devices)]
            pieces = -(-microbatch // max(one.bit_count(), other.bit_count()))
            busy_s[one, other], way_s[one, other] = _crossing([paths[pair] for pair in ends], pieces * outputs)
    return busy_s, way_s


def _crossing(paths: Sequence[ConstantRatePath], sizes: Ints) -> tuple[Floats, Floats]:
    distinct = set(paths)
    transmission_s = np.array([[path.transmission_s(size) for size in sizes.tolist()] for path in distinct])
    latency_s = np.array([path.latency_s for path in distinct])
    return transmission_s.max(axis=0), (transmission_s + latency_s[:, None]).max(axis=0)


def _sum_s(members: Sequence[Device], scenario: Scenario) -> float:
    """Seconds of a ring over the devices for the whole model."""
    count = len(members)
    if count < 2:
        return 0.0
    names = [device.name for device in members]
    paths = [nominal_path(scenario, one, other) for one, other in zip(names, [*names[1:], names[0]], strict=True)]
    return ring_s(paths, scenario.model.parameter_bytes(0, len(scenario.model.layers)), count)


def bounds_of(groups: Groups) -> Floats:
    """Return the bounds for the slowest stage or link that chains are sought for, rising, seconds."""
    devices = groups.compute_s.shape[1]
    alone_s = np.array([groups.compute_s[1 << number, number, -1] for number in range(devices)])
    high = float(alone_s.min())
    low = 1 / float((1 / np.maximum(alone_s, 1e-12)).sum())
    return np.concatenate((np.geomspace(low, high, _BOUNDS), np.geomspace(1.2 * high, _FARTHEST * high, _BEYOND)))
