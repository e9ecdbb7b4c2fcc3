"""LB-BSP (Semi-Dynamic Load Balancing, SoCC'20): data parallelism with shares that balance compute.

Every device computes equally long; what the sums of gradients take, and what of it backward hides, does not count.

Assumed: the same buckets and microbatches as `planner.systems.cannikin.cannikin`, so that the division is all that
differs.
"""

from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.systems.cannikin.data_parallel import balanced_plan


def lb_bsp(scenario: Scenario) -> Plan:
    """Return one stage whose replicas have the samples with which they compute equally long.

    Raises:
        InputError: Not even one sample fits into the memory of any device.
    """
    return balanced_plan(scenario, "lb-bsp", with_sums=False)
