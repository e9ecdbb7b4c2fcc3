"""Equal numbers of layers with schedule ZB-H1 (Qi et al., Zero Bubble Pipeline Parallelism, 2024): a baseline.

Devices are taken in the order in which the cluster names them; it knows nothing of their speeds, memory or links.
Assumed: one pipeline; where there are more devices than layers, neighbours share a stage as equal replicas.
"""

from itertools import accumulate, pairwise

from planner.cost.in_flight import plain_depths
from planner.plan.microbatches import even_cut, even_microbatches
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.scenario.scenario import Scenario


def zb_equal(scenario: Scenario) -> Plan:
    """Return one uniform pipeline over all devices."""
    devices, layers = scenario.cluster.devices, len(scenario.model.layers)
    count = min(len(devices), layers)
    borders = list(pairwise(accumulate(even_cut(len(devices), count), initial=0)))
    stages = tuple(
        Stage(
            layers * index // count,
            layers * (index + 1) // count,
            tuple(Replica(device.name) for device in devices[borders[index][0] : borders[index][1]]),
            depth,
        )
        for index, depth in enumerate(plain_depths(count))
    )
    microbatches = even_microbatches(scenario, scenario.training.global_batch, count)
    return Plan(scenario.name, scenario.model.name, "zb-h1-equal", "zb-h1", (Pipeline(stages, microbatches),))
