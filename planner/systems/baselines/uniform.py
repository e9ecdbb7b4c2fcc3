"""Baselines that divide the model or the batch evenly, whatever the devices are: DDP, Megatron, GPipe and ZB-H1.

Devices are taken in the cluster's order, without regard to their speeds or links.

``ddp`` is data parallelism as in PyTorch: every device holds the whole model and takes an equal share. The batch is one
microbatch where memory allows it, otherwise the fewest equal ones that fit (gradient accumulation). ``megatron`` makes
equal pipelines of as many stages as divide the devices; ``gpipe`` and ``zb-h1-equal`` (Qi et al., Zero Bubble Pipeline
Parallelism, 2024) make one pipeline. Assumed: with more devices than layers, GPipe leaves devices out, and with ZB-H1
neighbours share a stage as equal replicas.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from planner.cost.in_flight import fitting_depths, no_split_fits, plain_depths
from planner.plan.microbatches import even_cut, even_groups, even_microbatches
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.scenario.cluster import Device
from planner.scenario.scenario import Scenario
from traces.common.errors import InputError


def megatron(scenario: Scenario) -> Plan:
    """Return uniform pipelines over all devices.

    Raises:
        InputError: There are more pipelines than samples.
    """
    devices = scenario.cluster.devices
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
        own = [[device] for device in devices[copy * count : (copy + 1) * count]]
        stages = _even_stages(own, layers, plain_depths(count))
        pipelines.append(Pipeline(stages, even_microbatches(scenario, samples, count)))
    return Plan(scenario.name, scenario.model.name, "megatron", "1f1b", tuple(pipelines))


def _even_stages(groups: Sequence[Sequence[Device]], layers: int, depths: Sequence[int]) -> tuple[Stage, ...]:
    """Return a stage for each group of devices, with equal numbers of layers."""
    count = len(groups)
    return tuple(
        Stage(
            layers * index // count, layers * (index + 1) // count, tuple(Replica(each.name) for each in group), depth
        )
        for index, (group, depth) in enumerate(zip(groups, depths, strict=True))
    )


def gpipe(scenario: Scenario) -> Plan:
    """Return one uniform pipeline.

    Raises:
        InputError: A stage does not fit into memory, even if it recomputes.
    """
    layers = len(scenario.model.layers)
    devices = scenario.cluster.devices[:layers]
    microbatches = even_microbatches(scenario, scenario.training.global_batch, len(devices))
    depths = (len(microbatches),) * len(devices)
    plain = _even_stages([[device] for device in devices], layers, depths)
    for stages in (plain, tuple(replace(stage, recompute=True) for stage in plain)):
        if fitting_depths(depths, stages, scenario, microbatches) == depths:
            pipeline = Pipeline(stages, microbatches)
            return Plan(scenario.name, scenario.model.name, "gpipe", "gpipe", (pipeline,))
    raise no_split_fits(scenario, "gpipe", devices)


def zb_equal(scenario: Scenario) -> Plan:
    """Return one uniform pipeline over all devices."""
    devices, layers = scenario.cluster.devices, len(scenario.model.layers)
    count = min(len(devices), layers)
    stages = _even_stages(even_groups(devices, count), layers, plain_depths(count))
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
