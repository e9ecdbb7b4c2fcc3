"""Equal numbers of layers with schedule ZB-H1 (Qi et al., Zero Bubble Pipeline Parallelism, 2024): a baseline.

Devices are taken in the order in which the cluster names them; it knows nothing of their speeds, memory or links.
Assumed: one pipeline; where there are more devices than layers, neighbours share a stage as equal replicas.
"""

from dataclasses import replace
from itertools import accumulate, pairwise
from math import ceil

from planner.cost.in_flight import fitting_depths, no_split_fits, plain_depths
from planner.plan.microbatches import even_cut, even_microbatches
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


def gpipe(scenario: Scenario) -> Plan:
    """Return one uniform pipeline.

    Raises:
        InputError: A stage does not fit into memory, even if it recomputes.
    """
    layers = len(scenario.model.layers)
    devices = scenario.cluster.devices[:layers]
    count = len(devices)
    microbatches = even_microbatches(scenario, scenario.training.global_batch, count)
    held = len(microbatches)
    plain = tuple(
        Stage(layers * index // count, layers * (index + 1) // count, (Replica(device.name),), held)
        for index, device in enumerate(devices)
    )
    for stages in (plain, tuple(replace(stage, recompute=True) for stage in plain)):
        if fitting_depths((held,) * count, stages, scenario, microbatches) == (held,) * count:
            pipeline = Pipeline(stages, microbatches)
            return Plan(scenario.name, scenario.model.name, "gpipe", "gpipe", (pipeline,))
    raise no_split_fits(scenario, "gpipe", devices)


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
