"""Baseline strategies ``ddp``, ``megatron``, ``gpipe`` and ``zb-h1-equal``, which divide model or batch evenly.

None of them considers the speeds of devices and links. Devices are taken in the cluster's order.

- ``ddp`` is data parallelism as in PyTorch's DistributedDataParallel: every device holds the whole model and takes an
  equal share of the batch. The batch is divided into the fewest equal microbatches that fit into memory (gradient
  accumulation).
- ``megatron`` makes equal pipelines. The number of stages is the largest that divides the number of devices and is at
  most the number of layers.
- ``gpipe`` (Huang et al., NeurIPS 2019) makes one pipeline. Assumption: devices beyond the number of layers stay idle.
- ``zb-h1-equal`` (Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024) makes one pipeline. Assumption: with more
  devices than layers, neighbouring devices share a stage as equal replicas.
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
    """Return Megatron's plan: equal pipelines over all devices, with layers divided evenly among the stages.

    Raises:
        InputError: There are more pipelines than samples in the global batch.
    """
    return uniform_pipelines(scenario, megatron_stages(scenario)[-1])


def megatron_stages(scenario: Scenario) -> list[int]:
    """Return the numbers of stages that Megatron's equal pipelines can have, in increasing order."""
    devices, layers = len(scenario.cluster.devices), len(scenario.model.layers)
    return [count for count in range(1, layers + 1) if devices % count == 0]


def uniform_pipelines(scenario: Scenario, count: int) -> Plan:
    """Return Megatron's plan with pipelines of ``count`` stages, one of `megatron_stages`.

    Raises:
        InputError: There are more pipelines than samples in the global batch.
    """
    devices = scenario.cluster.devices
    layers = len(scenario.model.layers)
    batch = scenario.training.global_batch
    copies = len(devices) // count
    if copies > batch:
        raise InputError(
            f"a global batch of {batch} cannot be split over {copies} pipelines of {count} stages",
            where="training.global_batch",
            valid=f"each pipeline needs a sample: give a global batch of at least {copies}, or fewer devices",
        )
    pipelines = []
    for copy in range(copies):
        samples = batch * (copy + 1) // copies - batch * copy // copies
        own = [[device] for device in devices[copy * count : (copy + 1) * count]]
        stages = _even_stages(own, layers, plain_depths(count))
        pipelines.append(Pipeline(stages, even_microbatches(scenario, samples, count)))
    return Plan(scenario.name, scenario.model.name, "megatron", "1f1b", tuple(pipelines))


def _even_stages(groups: Sequence[Sequence[Device]], layers: int, depths: Sequence[int]) -> tuple[Stage, ...]:
    """Return one stage for each group of devices, all with equally many layers, up to rounding."""
    count = len(groups)
    return tuple(
        Stage(
            layers * index // count, layers * (index + 1) // count, tuple(Replica(each.name) for each in group), depth
        )
        for index, (group, depth) in enumerate(zip(groups, depths, strict=True))
    )


def gpipe(scenario: Scenario) -> Plan:
    """Return GPipe's plan: one pipeline with layers divided evenly, which recomputes activations if memory requires it.

    Raises:
        InputError: A stage does not fit into memory even with recomputation.
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
    """Return one pipeline over all devices with layers divided evenly and the schedule ``zb-h1``."""
    return equal_stages(scenario, min(len(scenario.cluster.devices), len(scenario.model.layers)))


def equal_stages(scenario: Scenario, count: int) -> Plan:
    """Return the plan of `zb_equal` with ``count`` stages, of which neighbouring devices share each as equal replicas.

    ``count`` is at most the number of devices, and of layers.
    """
    stages = _even_stages(even_groups(scenario.cluster.devices, count), len(scenario.model.layers), plain_depths(count))
    microbatches = even_microbatches(scenario, scenario.training.global_batch, count)
    return Plan(scenario.name, scenario.model.name, "zb-h1-equal", "zb-h1", (Pipeline(stages, microbatches),))


def ddp(scenario: Scenario) -> Plan:
    """Return DDP's plan: one stage that holds all layers, with every device as a replica."""
    replicas = tuple(Replica(device.name) for device in scenario.cluster.devices)
    stage = Stage(0, len(scenario.model.layers), replicas, in_flight=1)
    batch = scenario.training.global_batch
    # Microbatches have at least one sample per device. If these do not fit into memory, `check_plan` refuses the plan.
    finest = ceil(batch / len(replicas))
    fitting = (n for n in range(1, finest) if fitting_depths((1,), (stage,), scenario, even_cut(batch, n)))
    pipeline = Pipeline((stage,), even_cut(batch, next(fitting, finest)))
    return Plan(scenario.name, scenario.model.name, "ddp", "1f1b", (pipeline,))
