"""Which device each rank of a job is."""

from executor.job import Orders
from planner.plan import Plan
from planner.scenario import Scenario


def rank_devices(scenario: Scenario, plan: Plan, orders: Orders) -> tuple[str, ...]:
    """Return the devices in rank order: those of the first plan, then those that a later one may take up.

    Only plans whose pipelines wait for each other can be set up anew, so only these need the rest of the cluster.
    """
    if not orders.adapts or plan.synchronisation.method != "allreduce":
        return plan.devices
    spare = (device.name for device in scenario.cluster.devices if device.name not in plan.devices)
    return (*plan.devices, *spare)
