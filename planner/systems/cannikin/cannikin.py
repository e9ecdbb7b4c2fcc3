"""Cannikin (arXiv 2402.05302): data parallelism with the shares of the batch that make a step shortest.

OptPerf (`planner.systems.cannikin.opt_perf`) is the division of a batch with which the last device ends soonest, sums
of gradients included; it needs each device's times as straight lines over samples
(`planner.systems.cannikin.node_speeds`), which are fitted to the profile here, and learned from steps by the policy of
the same name. Cannikin itself also chooses the global batch, by goodput; a plan keeps the scenario's, so that is left
to who writes the scenario: `planner.systems.cannikin.goodput` is the rule.

Assumed: gradients are summed in buckets of 25 MiB, as PyTorch's DistributedDataParallel does by default; a batch that
memory does not hold at once is cut into the fewest equal microbatches.
"""

from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.systems.cannikin.data_parallel import balanced_plan


def cannikin(scenario: Scenario) -> Plan:
    """Return one stage whose replicas have the samples with which they end together, sums included.

    Raises:
        InputError: Not even one sample fits into the memory of any device.
    """
    return balanced_plan(scenario, "cannikin", with_sums=True)
