"""AdaptDL (Pollux, OSDI'21): data parallelism with even shares of a batch that follows the goodput.

AdaptDL takes all devices for equal, and raises the batch as the gradient gets noisier. A plan keeps the scenario's
global batch, so as a strategy this is even shares; `planner.systems.cannikin.goodput` chooses batches where a
reproduction lets them grow.

Assumed: the same buckets and microbatches as `planner.systems.cannikin.strategy`, so that the division is all that
differs.
"""

from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.systems.cannikin.data_parallel import balanced_plan, even_plan


def cannikin(scenario: Scenario) -> Plan:
    """Return one stage whose replicas have the samples with which they end together, sums included.

    Raises:
        InputError: Not even one sample fits into the memory of any device.
    """
    return balanced_plan(scenario, "cannikin", with_sums=True)


def lb_bsp(scenario: Scenario) -> Plan:
    """Return one stage whose replicas have the samples with which they compute equally long.

    Raises:
        InputError: Not even one sample fits into the memory of any device.
    """
    return balanced_plan(scenario, "lb-bsp", with_sums=False)


def adaptdl(scenario: Scenario) -> Plan:
    """Return one stage whose replicas have the same share.

    Raises:
        InputError: Not even one sample fits into the memory of any device.
    """
    return even_plan(scenario, "adaptdl")
