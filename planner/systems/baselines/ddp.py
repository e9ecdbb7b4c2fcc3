"""Data parallelism: every device holds the whole model, gradients are summed (PyTorch DDP).

Equal shares whatever the devices are. The batch is one microbatch where memory allows it, otherwise the fewest
equal ones that fit (gradient accumulation).
"""

from math import ceil

from planner.cost.in_flight import fitting_depths
from planner.plan.microbatches import even_cut
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.scenario.scenario import Scenario


def ddp(scenario: Scenario) -> Plan:
    """Return one stage with every device as a replica."""
    replicas = tuple(Replica(device.name) for device in scenario.cluster.devices)
    stage = Stage(0, len(scenario.model.layers), replicas, in_flight=1)
    batch = scenario.training.global_batch
    # One sample per device and microbatch is the finest cut; if even that does not fit, the plan's check says so.
    finest = ceil(batch / len(replicas))
    microbatches = next(
        (
            even
            for count in range(1, finest)
            if fitting_depths((1,), (stage,), scenario, even := even_cut(batch, count))
        ),
        even_cut(batch, finest),
    )
    pipeline = Pipeline((stage,), microbatches)
    return Plan(scenario.name, scenario.model.name, "ddp", "1f1b", (pipeline,))
