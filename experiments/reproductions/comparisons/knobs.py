"""The knobs that every contender of a comparison may turn: devices, their order, and the size of microbatches."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, permutations

from planner.scenario.cluster import Cluster, Device
from planner.scenario.scenario import Scenario
from planner.systems.asteroid.strategy import by_memory

# Most microbatches of a step, as in DeepCEE's search.
MOST_MICROBATCHES = 64


def subsets(scenario: Scenario) -> Iterator[tuple[Device, ...]]:
    """Yield the sets of devices to choose from, smallest first, in the cluster's order.

    With several regions these are the devices of every set of regions; with one region, the fastest n devices for
    every n, by the time of the model for one sample and for the whole batch.
    """
    devices, regions = scenario.cluster.devices, scenario.cluster.regions
    if len(regions) > 1:
        for count in range(1, len(regions) + 1):
            for chosen in combinations(regions, count):
                yield tuple(device for device in devices if device.region in chosen)
        return

    def fastest(samples: int) -> list[Device]:
        layers = len(scenario.model.layers)
        return sorted(devices, key=lambda device: scenario.model.times(0, layers, device.kind, samples).total_s)

    orders = [fastest(samples) for samples in (1, scenario.training.global_batch)]
    for count in range(1, len(devices) + 1):
        sets = (tuple(device for device in devices if device in order[:count]) for order in orders)
        yield from dict.fromkeys(sets)


def arrangements(scenario: Scenario) -> Iterator[tuple[Device, ...]]:
    """Yield every set of devices in every order of its regions; within a region, devices keep the cluster's order."""
    for devices in subsets(scenario):
        regions = dict.fromkeys(device.region for device in devices)
        for order in permutations(regions):
            yield tuple(device for region in order for device in devices if device.region == region)


def memory_orders(scenario: Scenario) -> Iterator[tuple[Device, ...]]:
    """Yield every set of devices, sorted by memory, largest first."""
    for devices in subsets(scenario):
        yield by_memory(devices)


def microbatch_sizes(scenario: Scenario, fewest: int = 1) -> list[int]:
    """Return the sizes of microbatches to try: divisors of the batch that are powers of two, and the scenario's own.

    There are ``fewest`` to `MOST_MICROBATCHES` microbatches of each size in a step.
    """
    batch = scenario.training.global_batch
    sizes = {2**power for power in range(batch.bit_length())} | {scenario.training.microbatch or 1}
    most = max(1, batch // fewest)
    return [size for size in sorted(sizes) if size <= most and batch % size == 0 and batch // size <= MOST_MICROBATCHES]


def arranged(scenario: Scenario, devices: Sequence[Device], microbatch: int = 0) -> Scenario:
    """Return the scenario with these devices alone, in this order, and with microbatches of a size; 0 for any size."""
    left_out = {device.region for device in scenario.cluster.devices} - {device.region for device in devices}
    names = {device.name for device in scenario.cluster.devices} - {device.name for device in devices}
    links = tuple(link for link in scenario.cluster.links if not {link.source, link.target} & (left_out | names))
    training = replace(scenario.training, microbatch=microbatch)
    return replace(scenario, cluster=Cluster(tuple(devices), links), training=training)
