"""Asteroid: hybrid pipelines on unlike devices of limited memory (arXiv 2408.08015, MobiCom 2024).

Devices by memory, largest first; groups of neighbours in this order are stages; inside a group every microbatch is
shared out so that all are done at the same time (`planner.systems.asteroid.allocation`); the split with the least round
latency wins (`planner.systems.asteroid.hybrid_pipeline`, `planner.systems.asteroid.round_latency`) [all second-hand].
Stage p of P, counted from 0, keeps K_p = 2(P - p) - 1 microbatches in flight, as if communication were a stage of its
own.

Assumed: devices with equal memory stay in the cluster's order; a device that Algorithm 1 gives no sample is left out;
the size of microbatches, which the paper takes as given, is the scenario's.

``asteroid-duplex`` is ours: the same planner, which knows that links carry both directions at once.
"""

from planner.plan.plan import Plan
from planner.scenario.cluster import Device
from planner.scenario.scenario import Scenario
from planner.systems.asteroid.hybrid_pipeline import HybridRules, hybrid_plan


def asteroid(scenario: Scenario) -> Plan:
    """Return one pipeline of groups, as published.

    Raises:
        InputError: No split fits into memory.
    """
    return hybrid_plan(scenario, by_memory(scenario.cluster.devices), "asteroid", HybridRules())


def asteroid_duplex(scenario: Scenario) -> Plan:
    """Return one pipeline of groups, judged with the correction for full duplex.

    Raises:
        InputError: No split fits into memory.
    """
    return hybrid_plan(scenario, by_memory(scenario.cluster.devices), "asteroid-duplex", HybridRules(duplex=True))


def by_memory(devices: tuple[Device, ...]) -> tuple[Device, ...]:
    """Return the devices with the largest memory first."""
    return tuple(sorted(devices, key=lambda device: -device.memory_bytes))
