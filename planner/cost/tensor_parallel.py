"""The time that a tensor-parallel group spends on messages among its devices, which share a host.

The sums over the group are ring all-reduces over the host's interconnect, each of 2 (n - 1) rounds in which a device
sends 1/n of the bytes to the next. Every device can send at the interconnect's rate while it receives, as over NVLink
or PCIe; there is no TCP inside a host.

One rule holds for messages between stages, in simulation and in real runs: the group's first device sends and receives
them unsharded, so that each crosses the network once, and broadcasts what it has received to the rest of its group.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from planner.scenario.profile import ComputeTimes, GroupSums
from planner.scenario.scenario import Scenario
from traces.common.errors import InputError


@dataclass(frozen=True, slots=True)
class Interconnect:
    """The slowest connection between neighbours in the ring of a group's devices."""

    devices: int
    rate_bps: float
    latency_s: float

    def sums_s(self, sums: GroupSums, samples: int) -> float:
        """Return the seconds of the all-reduces of one pass for ``samples`` samples."""
        rounds, part = 2 * (self.devices - 1), 1 / self.devices
        return rounds * (sums.count * self.latency_s + part * 8 * samples * sums.sample_bytes / self.rate_bps)

    def broadcast_s(self, size_bytes: int) -> float:
        """Return the seconds of a broadcast from the first device along the ring, pipelined in small parts."""
        return (self.devices - 1) * self.latency_s + 8 * size_bytes / self.rate_bps


@lru_cache(maxsize=1024)
def interconnect(scenario: Scenario, devices: tuple[str, ...]) -> Interconnect:
    """Return the interconnect of a group of two devices or more.

    Raises:
        InputError: No link leads from one of the devices to the next.
    """
    paths = [scenario.cluster.path(*pair) for pair in pairwise((*devices, devices[0]))]
    return Interconnect(
        len(devices),
        min(link.bandwidth_bps for path in paths for link in path),
        max(sum(link.latency_s for link in path) for path in paths),
    )


@lru_cache(maxsize=1024)
def slowest_group(scenario: Scenario, kind: str, degree: int) -> Interconnect:
    """Return the slowest interconnect of hosts that have ``degree`` devices of a kind, which costs by kind assume.

    Raises:
        InputError: There is no such host, or no link inside it.
    """
    hosts: defaultdict[str, list[str]] = defaultdict(list)
    for device in scenario.cluster.devices:
        if device.kind == kind:
            hosts[device.machine].append(device.name)
    found = [interconnect(scenario, tuple(names[:degree])) for names in hosts.values() if len(names) >= degree]
    if not found:
        raise InputError(f"no host has {degree} devices of kind '{kind}'", valid="choose a smaller group")
    return min(found, key=lambda each: (each.rate_bps, -each.latency_s))


def with_group_sums(
    times: ComputeTimes, scenario: Scenario, layers: range, samples: int, group: Interconnect
) -> ComputeTimes:
    """Return the times of consecutive layers on one device of a group, with the sums over the group added."""
    forward, backward = scenario.model.at_degree(group.devices).group_sums(layers.start, layers.stop)
    return replace(
        times,
        forward_s=times.forward_s + group.sums_s(forward, samples),
        backward_input_s=times.backward_input_s + group.sums_s(backward, samples),
    )


def with_received(times: ComputeTimes, group: Interconnect, input_bytes: int, gradient_bytes: int) -> ComputeTimes:
    """Return the times of a stage on a group, with the broadcast of what its first device receives added.

    These are ``input_bytes`` in the forward and ``gradient_bytes`` in the input gradient; 0 if nothing is received.
    """

    def broadcast_s(size_bytes: int) -> float:
        return group.broadcast_s(size_bytes) if size_bytes else 0.0

    return replace(
        times,
        forward_s=times.forward_s + broadcast_s(input_bytes),
        backward_input_s=times.backward_input_s + broadcast_s(gradient_bytes),
    )
