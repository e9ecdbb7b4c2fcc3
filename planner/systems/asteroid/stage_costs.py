"""Costs of layers on a group of devices that share each microbatch, as Asteroid's Algorithm 1 divides it.

The algorithm follows other publications that describe the paper (arXiv 2408.08015). It divides a microbatch of B
samples over the devices d of a group in two phases:

1. Each device gets samples in proportion to its speed 1 / (t_f(B) + t_b(B)), where t_f and t_b are the device's times
   of forward and backward, but no more than its memory holds. Samples that are left are divided again in the same way.
2. Since times are not linear in samples, single samples move from the slowest device to the device with free memory
   that would finish one more sample first, as long as this makes the slowest device faster.

Assumption: shares are rounded down; if all are zero, one sample goes to the device that would finish it first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from planner.cost.layers import layer_table
from planner.cost.memory import most_samples
from planner.plan.plan import Replica, Stage
from planner.scenario.cluster import Device
from planner.scenario.profile import LayerProfile, ModelProfile, TimeTable
from planner.scenario.scenario import Scenario
from planner.step.graph import Floats
from planner.systems.asteroid.round_latency import RoundStep, group_sync_s


def allocate(samples: int, times_s: Sequence[Sequence[float]], most: Sequence[int]) -> tuple[int, ...] | None:
    """Return the number of samples that Algorithm 1 gives each device; None if they do not fit into memory.

    Args:
        samples: Samples of a microbatch.
        times_s: A row for each device: its time of forward and backward for 0, 1, ... ``samples`` samples, seconds.
        most: Number of samples that fit into the memory of each device.
    """
    if sum(most) < samples:
        return None
    return _balanced(_in_proportion(samples, times_s, most), times_s, most)


def _in_proportion(samples: int, times_s: Sequence[Sequence[float]], most: Sequence[int]) -> list[int]:
    # A time of 0 s counts as 1e-12 s, to avoid a division by zero.
    speeds = [1 / max(column[samples], 1e-12) for column in times_s]
    placed = [0] * len(most)
    while left := samples - sum(placed):
        open_devices = [device for device, limit in enumerate(most) if placed[device] < limit]
        total = sum(speeds[device] for device in open_devices)
        given = {d: min(int(left * speeds[d] / total), most[d] - placed[d]) for d in open_devices}
        if not any(given.values()):
            given = {min(open_devices, key=lambda device: times_s[device][placed[device] + 1]): 1}
        for device, count in given.items():
            placed[device] += count
    return placed


def _balanced(placed: list[int], times_s: Sequence[Sequence[float]], most: Sequence[int]) -> tuple[int, ...]:
    devices = range(len(placed))
    while True:
        slowest = max(devices, key=lambda device: times_s[device][placed[device]])
        takers = [device for device in devices if device != slowest and placed[device] < most[device]]
        taker = min(takers, key=lambda device: times_s[device][placed[device] + 1], default=None)
        if taker is None or times_s[taker][placed[taker] + 1] >= times_s[slowest][placed[slowest]]:
            return tuple(placed)
        placed[slowest] -= 1
        placed[taker] += 1


@dataclass(frozen=True, slots=True)
class StageChoice:
    """A stage that the search may put into a pipeline, and its part of the round latency.

    Attributes:
        first_layer: Index of the first layer.
        end_layer: Index after the last layer.
        depth: Number of microbatches in flight.
        samples: (name, samples of a microbatch) of each device of the group that gets samples.
        step: Execution step of the stage.
    """

    first_layer: int
    end_layer: int
    depth: int
    samples: tuple[tuple[str, int], ...]
    step: RoundStep

    @property
    def stage(self) -> Stage:
        """The stage as part of a plan."""
        replicas = tuple(Replica(device, float(count)) for device, count in self.samples)
        return Stage(self.first_layer, self.end_layer, replicas, self.depth)


class StageCosts:
    """Cached costs of layers on groups of devices, for one microbatch size.

    Args:
        scenario: Scenario that gives times, memory and links.
        samples: Samples of a microbatch.
        even: Whether the devices of a group take equal shares, as far as memory allows, in place of Algorithm 1's.
    """

    def __init__(self, scenario: Scenario, samples: int, even: bool = False) -> None:
        self._scenario = scenario
        self._samples = samples
        self._even = even
        self.choose = cache(self._choose)
        self._most = cache(self._most_samples)
        self._until_s = cache(self._seconds_until)
        self._times_s = cache(self._range_times_s)
        self._allocated = cache(self._allocate)
        self._stepped = cache(self._step)

    def _choose(self, first_layer: int, end_layer: int, group: tuple[Device, ...], depth: int) -> StageChoice | None:
        """Return the stage with these layers and devices; None if memory is too small for ``depth`` microbatches."""
        most = tuple(self._most(first_layer, end_layer, device.memory_bytes, depth) for device in group)
        counts = self._allocated(first_layer, end_layer, tuple(device.kind for device in group), most)
        if counts is None:
            return None
        names, step = self._stepped(first_layer, end_layer, group, counts)
        return StageChoice(first_layer, end_layer, depth, names, step)

    def _step(
        self, first_layer: int, end_layer: int, group: tuple[Device, ...], counts: tuple[int, ...]
    ) -> tuple[tuple[tuple[str, int], ...], RoundStep]:
        """Return the devices that get samples, with their samples, and the execution step of the stage."""
        used = [(device, count) for device, count in zip(group, counts, strict=True) if count]
        columns = ((self._until_s(device.kind), count) for device, count in used)
        times_s = [
            [float(until[count, end_layer] - until[count, first_layer]) for until in both] for both, count in columns
        ]
        forward_s, backward_s = (max(column) for column in zip(*times_s, strict=True))
        sync_s = group_sync_s(self._scenario, first_layer, end_layer, tuple(device.name for device, _ in used))
        return tuple((device.name, count) for device, count in used), RoundStep(forward_s, backward_s, sync_s)

    def _most_samples(self, first_layer: int, end_layer: int, memory_bytes: int, depth: int) -> int:
        """Return the largest part of a microbatch that fits into a device's memory, in samples."""
        stage = Stage(first_layer, end_layer, (), depth)
        return most_samples(self._scenario, stage, self._samples, depth, memory_bytes)

    def _allocate(
        self, first_layer: int, end_layer: int, kinds: tuple[str, ...], most: tuple[int, ...]
    ) -> tuple[int, ...] | None:
        if self._even:
            return allocate(self._samples, [range(self._samples + 1)] * len(kinds), most)
        times_s = [self._times_s(first_layer, end_layer, kind) for kind in kinds]
        return allocate(self._samples, times_s, most)

    def _range_times_s(self, first_layer: int, end_layer: int, kind: str) -> list[float]:
        forward_s, backward_s = self._until_s(kind)
        both = forward_s + backward_s
        return [float(each) for each in both[:, end_layer] - both[:, first_layer]]

    def _seconds_until(self, kind: str) -> tuple[Floats, Floats]:
        """Return running sums of the layers' forward and backward times, seconds, [samples + 1, layers + 1] each."""
        tables = [layer_table(self._scenario, kind, samples) for samples in range(self._samples + 1)]
        return np.array([table.forward_s for table in tables]), np.array([table.backward_s for table in tables])


def levelled(scenario: Scenario) -> Scenario:
    """Return the scenario with each layer's times replaced by their mean over all devices of the cluster."""
    kinds = [device.kind for device in scenario.cluster.devices]
    for kind in kinds:
        # `times` raises an error that names a kind of device that the profile lacks.
        scenario.model.times(0, len(scenario.model.layers), kind, 1)
    layers = tuple(replace(layer, times=_mean_times(layer, kinds)) for layer in scenario.model.layers)
    return replace(scenario, model=ModelProfile(scenario.model.name, layers))


def _mean_times(layer: LayerProfile, kinds: Sequence[str]) -> dict[str, TimeTable]:
    counts = tuple(sorted({count for kind in kinds for count in layer.times[kind].samples}))
    rows = [[layer.times[kind].at(count) for kind in kinds] for count in counts]
    mean = TimeTable(
        counts,
        tuple(sum(each.forward_s for each in row) / len(kinds) for row in rows),
        tuple(sum(each.backward_input_s for each in row) / len(kinds) for row in rows),
        tuple(sum(each.backward_weight_s for each in row) / len(kinds) for row in rows),
    )
    return dict.fromkeys(kinds, mean)
