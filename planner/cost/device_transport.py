"""Which transport carries tensors between two devices, NCCL or gloo, and how long copies between GPU and host take.

gloo carries messages from host memory to host memory: a GPU's copy engine first copies them to its host, and the
receiver's copies them to its GPU. A device has an engine each way, each of which makes one copy at a time, beside the
kernels that compute. NCCL needs no such copies.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

from planner.plan.plan import Plan
from planner.scenario.datasheet import has_nccl, host_link_bps, is_gpu
from planner.scenario.scenario import Scenario

NCCL, GLOO = "nccl", "gloo"


def boundary_transport(plan: Plan, scenario: Scenario, source: str, target: str) -> str:
    """Return `NCCL` or `GLOO`: what carries the messages between stages from one device of a plan to another.

    NCCL does if both devices are of kinds that have it, in one region, and in no tensor-parallel group: groups use NCCL
    themselves, and kernels of two communicators that wait for each other on one GPU can block it for ever.
    """
    grouped = _grouped(plan)
    if source in grouped or target in grouped:
        return GLOO
    return _between(scenario, (source, target))


def group_transport(scenario: Scenario, devices: Sequence[str]) -> str:
    """Return `NCCL` or `GLOO`: what carries the messages inside a tensor-parallel group."""
    return _between(scenario, devices)


def _between(scenario: Scenario, devices: Sequence[str]) -> str:
    found = [scenario.cluster.by_name[name] for name in devices]
    together = len({device.region for device in found}) == 1
    usable = together and all(has_nccl(device.kind) for device in found)
    return NCCL if usable and scenario.effects.transport.nccl else GLOO


# Cached, because a run asks for each pair of devices of a plan.
@lru_cache(maxsize=32)
def _grouped(plan: Plan) -> frozenset[str]:
    return frozenset(device for replica in plan.replicas if replica.partners for device in replica.devices)


def copy_seconds_per_byte(plan: Plan, scenario: Scenario, source: str, target: str) -> tuple[float, float]:
    """Return how long a byte of a message between stages is copied, from source to its host and from host to target.

    Raises:
        InputError: The datasheet does not contain a device's kind, and the scenario gives no rate of copies.
    """
    if boundary_transport(plan, scenario, source, target) == NCCL:
        return 0.0, 0.0
    return 8 / _copy_bps(scenario, source), 8 / _copy_bps(scenario, target)


def _copy_bps(scenario: Scenario, device: str) -> float:
    effects, kind = scenario.effects.transport, scenario.cluster.by_name[device].kind
    if not effects.copies or not is_gpu(kind):
        return math.inf
    return host_link_bps(kind) if effects.copy_bps is None else effects.copy_bps
