"""DAPPLE-like hybrid pipelines (Fan et al., PPoPP 2021): groups are stages, but devices count as equal.

As Asteroid's comparison describes it [second-hand]: the mean of the devices' speeds, even shares inside a group, depths
K = P - p. Assumed: the round is judged by the same closed form and searched in the same way as Asteroid's, which is
exact, so that the two differ in these three things alone; devices come in the cluster's order; shares are even as far
as memory allows.
"""

from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.systems.asteroid.hybrid_pipeline import HybridRules, hybrid_plan, plain_depth
from planner.systems.asteroid.stage_costs import levelled


def dapple(scenario: Scenario) -> Plan:
    """Return one pipeline of groups, planned for mean devices.

    Raises:
        InputError: No split fits into memory.
    """
    return hybrid_plan(levelled(scenario), scenario.cluster.devices, "dapple", HybridRules(depth=plain_depth))
