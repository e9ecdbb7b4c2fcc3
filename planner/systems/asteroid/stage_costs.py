"""What layers on a group of devices cost in a round: the steps that a planner of hybrid pipelines chooses from."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from planner.cost.layers import layer_table
from planner.cost.memory import most_samples
from planner.cost.network import nominal_path
from planner.plan.plan import Replica, Stage
from planner.scenario.cluster import Device
from planner.scenario.profile import LayerProfile, ModelProfile, TimeTable
from planner.scenario.scenario import Scenario
from planner.systems.asteroid.round_latency import RoundStep


def allocate(samples: int, times_s: Sequence[Sequence[float]], most: Sequence[int]) -> tuple[int, ...] | None:
    """Return the samples of each device, or None if they do not fit.

    Args:
        samples: Of a microbatch.
        times_s: For each device the seconds of forward and backward with 0, 1, ... ``samples`` samples.
        most: What each device's memory holds.
    """
    if sum(most) < samples:
        return None
    return _balanced(_in_proportion(samples, times_s, most), times_s, most)


def _in_proportion(samples: int, times_s: Sequence[Sequence[float]], most: Sequence[int]) -> list[int]:
    # A device that takes no time at all is as fast as can be told.
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
    """Layers on a group.

    Attributes:
        first_layer: Index of the first.
        end_layer: Index after the last.
        depth: Microbatches in flight.
        samples: (device, samples of a microbatch) of the group's devices that take any.
        step: What it costs.
    """

    first_layer: int
    end_layer: int
    depth: int
    samples: tuple[tuple[str, int], ...]
    step: RoundStep

    @property
    def stage(self) -> Stage:
        """The stage of a plan."""
        replicas = tuple(Replica(device, float(count)) for device, count in self.samples)
        return Stage(self.first_layer, self.end_layer, replicas, self.depth)


class StageCosts:
    """Costs of any layers on any group, for one size of microbatch; nothing is computed twice."""

    def __init__(self, scenario: Scenario, samples: int) -> None:
        self._scenario = scenario
        self._samples = samples
        self.choose = cache(self._choose)
        self.transfer = cache(self._transfer)
        self.least_rate_bps = cache(self._least_rate_bps)
        self._most = cache(self._most_samples)
        self._until_s = cache(self._seconds_until)
        self._times_s = cache(self._range_times_s)
        self._allocated = cache(self._allocate)

    def _choose(self, first_layer: int, end_layer: int, group: tuple[Device, ...], depth: int) -> StageChoice | None:
        """Layers on a group as Algorithm 1 shares out the samples; None if they do not fit with that depth."""
        most = tuple(self._most(first_layer, end_layer, device.memory_bytes, depth) for device in group)
        counts = self._allocated(first_layer, end_layer, tuple(device.kind for device in group), most)
        if counts is None:
            return None
        used = [(device, count) for device, count in zip(group, counts, strict=True) if count]
        columns = ((self._until_s(device.kind), count) for device, count in used)
        times_s = [
            [float(until[count, end_layer] - until[count, first_layer]) for until in both] for both, count in columns
        ]
        forward_s, backward_s = (max(column) for column in zip(*times_s, strict=True))
        sync_s = self._sync_s(first_layer, end_layer, tuple(device.name for device, _ in used))
        step = RoundStep(forward_s, backward_s, sync_s)
        return StageChoice(first_layer, end_layer, depth, tuple((d.name, count) for d, count in used), step)

    def _transfer(self, boundary: int, senders: tuple[str, ...], receivers: tuple[str, ...]) -> RoundStep:
        """The step in which the output of the layer before ``boundary`` passes between groups.

        All of a microbatch at the least bandwidth between them, as the paper has it [second-hand]; latency, which a
        LAN hardly has, is not counted.
        """
        size_bytes = self._samples * self._scenario.model.layers[boundary - 1].output_bytes
        time_s = 8 * size_bytes / self.least_rate_bps(senders, receivers)
        return RoundStep(time_s, time_s, is_transfer=True)

    def _least_rate_bps(self, senders: tuple[str, ...], receivers: tuple[str, ...]) -> float:
        """Bits per second of the slowest path from one group to another, or inside one."""
        ways = ((a, b) for a in senders for b in receivers if a != b)
        return min(nominal_path(self._scenario, *way).rate_bps for way in ways)

    def _sync_s(self, first_layer: int, end_layer: int, group: tuple[str, ...]) -> float:
        """Seconds of a ring over the group: T_a of the paper."""
        if len(group) == 1:
            return 0.0
        bits = 8 * self._scenario.model.parameter_bytes(first_layer, end_layer)
        return 2 * (len(group) - 1) / len(group) * bits / self.least_rate_bps(group, group)

    def _most_samples(self, first_layer: int, end_layer: int, memory_bytes: int, depth: int) -> int:
        """Samples of each microbatch that a device's memory holds, no more than a microbatch has."""
        stage = Stage(first_layer, end_layer, (), depth)
        return most_samples(self._scenario, stage, self._samples, depth, memory_bytes)

    def _allocate(
        self, first_layer: int, end_layer: int, kinds: tuple[str, ...], most: tuple[int, ...]
    ) -> tuple[int, ...] | None:
        times_s = [self._times_s(first_layer, end_layer, kind) for kind in kinds]
        return allocate(self._samples, times_s, most)

    def _range_times_s(self, first_layer: int, end_layer: int, kind: str) -> list[float]:
        forward_s, backward_s = self._until_s(kind)
        both = forward_s + backward_s
        return [float(each) for each in both[:, end_layer] - both[:, first_layer]]

    def _seconds_until(self, kind: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Forward and backward of all layers before each, [samples + 1, layers + 1] each."""
        tables = [layer_table(self._scenario, kind, samples) for samples in range(self._samples + 1)]
        return np.array([table.forward_s for table in tables]), np.array([table.backward_s for table in tables])


def levelled(scenario: Scenario, devices: Sequence[Device] = ()) -> Scenario:
    """Return the scenario as a planner sees it that knows only the mean of the devices' times.

    Args:
        scenario: Any.
        devices: Over which the mean is taken; all if empty.
    """
    kinds = [device.kind for device in devices or scenario.cluster.devices]
    layers = tuple(
        replace(layer, times=_mean_times(scenario, layer, index, kinds))
        for index, layer in enumerate(scenario.model.layers)
    )
    return replace(scenario, model=ModelProfile(scenario.model.name, layers))


def _mean_times(scenario: Scenario, layer: LayerProfile, index: int, kinds: Sequence[str]) -> dict[str, TimeTable]:
    # Asked before the tables are, since it names what is missing.
    for kind in kinds:
        scenario.model.times(index, index + 1, kind, 1)
    counts = tuple(sorted({count for kind in kinds for count in layer.times[kind].samples}))
    rows = [[layer.times[kind].at(count) for kind in kinds] for count in counts]
    mean = TimeTable(
        counts,
        tuple(sum(each.forward_s for each in row) / len(kinds) for row in rows),
        tuple(sum(each.backward_input_s for each in row) / len(kinds) for row in rows),
        tuple(sum(each.backward_weight_s for each in row) / len(kinds) for row in rows),
    )
    return dict.fromkeys(kinds, mean)
