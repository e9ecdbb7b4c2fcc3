"""AdaptDL (Pollux, OSDI'21): data parallelism with even shares of a batch that follows the goodput.

AdaptDL takes all devices for equal, and raises the batch as the gradient gets noisier. A plan keeps the scenario's
global batch, so as a strategy this is even shares; `planner.systems.cannikin.goodput` chooses batches where a
reproduction lets them grow.

Assumed: the same buckets and microbatches as `planner.systems.cannikin.cannikin`, so that the division is all that
differs.
"""

from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.systems.cannikin.data_parallel import even_plan


def adaptdl(scenario: Scenario) -> Plan:
    """Return one stage whose replicas have the same share.

    Raises:
        InputError: Not even one sample fits into the memory of any device.
    """
    return even_plan(scenario, "adaptdl")
