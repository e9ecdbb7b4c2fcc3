"""Megatron-style uniform pipelines (Narayanan et al., 2021), the baseline of most papers in this field.

Layers are cut into equal numbers, devices are taken in the order in which the cluster names them, 1F1B with its
own depths. As many stages as devices allow; what remains is data parallel over whole pipelines. It knows nothing
of device speeds, memory or links. Assumed: the number of stages is the largest divisor of the number of devices
that does not exceed the number of layers (Megatron leaves it to its user), and every pipeline needs a sample.
"""

from planner.cost.in_flight import plain_depths
from planner.plan.microbatches import even_microbatches
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.scenario.scenario import Scenario
from traces.common.errors import InputError


def megatron(scenario: Scenario) -> Plan:
    """Return uniform pipelines over all devices.

    Raises:
        InputError: There are more pipelines than samples.
    """
    devices = [device.name for device in scenario.cluster.devices]
    layers = len(scenario.model.layers)
    batch = scenario.training.global_batch
    count = max(n for n in range(1, layers + 1) if len(devices) % n == 0)
    copies = len(devices) // count
    if copies > batch:
        raise InputError(
            f"a global batch of {batch} cannot be split over {copies} pipelines of {count} stages",
            where="training.global_batch",
            valid=f"give each pipeline a sample: a batch of {copies} or more, fewer devices, or more layers",
        )
    pipelines = []
    for copy in range(copies):
        samples = batch * (copy + 1) // copies - batch * copy // copies
        microbatches = even_microbatches(scenario, samples, count)
        stages = tuple(
            Stage(
                first_layer=layers * index // count,
                end_layer=layers * (index + 1) // count,
                replicas=(Replica(devices[copy * count + index]),),
                in_flight=depth,
            )
            for index, depth in enumerate(plain_depths(count))
        )
        pipelines.append(Pipeline(stages, microbatches))
    return Plan(scenario.name, scenario.model.name, "megatron", "1f1b", tuple(pipelines))
