"""Which device each rank of a job is."""

from executor.core.job import RunConfig
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario


def rank_devices(scenario: Scenario, plan: Plan, orders: RunConfig) -> tuple[str, ...]:
    """Return the devices in rank order: those of the first plan, then those that a later one may take up.

    Only plans whose pipelines wait for each other can be set up anew, so only these need the rest of the cluster. On
    several machines the order is the cluster's: what runs where must not change with the plan that a run goes on with.
    """
    devices = [device.name for device in scenario.cluster.devices]
    spare: list[str] = []
    if orders.adapts and plan.synchronisation.method == "allreduce":
        spare = [device for device in devices if device not in plan.devices]
    found = (*plan.devices, *spare)
    return tuple(sorted(found, key=devices.index)) if orders.spread else found
