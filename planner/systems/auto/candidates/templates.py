"""Pipeline templates: equal pipelines over device classes, timed by a closed form.

With M microbatches for each pipeline, the time of a step is::

    (M - 1) * slowest stage or link + round trip + slowest gradient sum

The first factor is the time that the slowest stage or link takes for one microbatch in both directions. The round trip
is the time from a microbatch's first forward to its last backward.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from planner.cost.layers import launches_s, range_memory
from planner.cost.synchronisation import group_bytes
from planner.scenario.scenario import Scenario
from planner.systems.auto.candidates.device_classes import StageOption
from planner.systems.auto.candidates.option_costs import boundary_costs, class_ring_s, option_table, ring_loads_s

# `retimed` tries microbatches that are smaller and larger than the template's by up to this factor.
_WIDEST = 2.0

# Time that stands for "does not fit into memory", seconds. It is finite because infinity times zero is NaN.
INFEASIBLE_S = 1e30


@dataclass(frozen=True, slots=True)
class TemplateStage:
    """A stage of each pipeline of a template: consecutive layers on devices of one class.

    Attributes:
        option: Device class that holds the layers, and the way in which they use it.
        first_layer: Index of the first layer.
        end_layer: Index after the last layer.
    """

    option: StageOption
    first_layer: int
    end_layer: int


@dataclass(frozen=True, slots=True)
class PipelineTemplate:
    """Equal pipelines side by side.

    Attributes:
        pipelines: Number of pipelines.
        samples: Samples of one step, over all pipelines.
        microbatch: Samples of a microbatch.
        stages: Stages of each pipeline, first to last.
        bottleneck_s: Time of the slowest stage or link for one microbatch, seconds.
        round_trip_s: Time from a microbatch's first forward to its last backward, seconds.
        sum_s: Time of the slowest gradient sum, seconds.
    """

    pipelines: int
    samples: int
    microbatch: int
    stages: tuple[TemplateStage, ...]
    bottleneck_s: float
    round_trip_s: float
    sum_s: float

    @property
    def pipeline_s(self) -> float:
        """Time of a step without gradient sums, seconds; assumed to be in proportion to the size of microbatches."""
        share = -(-self.samples // self.pipelines)
        microbatches = -(-share // self.microbatch)
        filled = -(-share // microbatches) / self.microbatch
        return ((microbatches - 1) * self.bottleneck_s + self.round_trip_s) * filled

    @property
    def step_s(self) -> float:
        """Time of a step with gradient sums, by the closed form, seconds."""
        return self.pipeline_s + self.sum_s


def gradient_sum_s(stage: TemplateStage, scenario: Scenario, holders: int) -> float:
    """Return the time of a ring all-reduce of a stage's gradients over ``holders`` devices of its class, seconds."""
    size_bytes = stage_group_bytes(stage, scenario)
    return class_ring_s(scenario, stage.option.device_class, size_bytes, holders, stage.option.degree)


def gradient_sums_s(stages: Sequence[TemplateStage], scenario: Scenario, pipelines: float) -> tuple[float, float]:
    """Return the times of the gradient sums of stages that ``pipelines`` pipelines hold, seconds.

    Sums of different stages begin together. The first time is that of the slowest one, the second the time for which
    all of them keep the network of a region busy.
    """
    slowest_s, loads_s = 0.0, dict.fromkeys((stage.option.device_class.region for stage in stages), 0.0)
    for stage in stages:
        option, holders = stage.option, round(pipelines * stage.option.width)
        slowest_s = max(slowest_s, gradient_sum_s(stage, scenario, holders))
        _, region_s = ring_loads_s(scenario, option.device_class, holders, option.degree)
        loads_s[option.device_class.region] += region_s * stage_group_bytes(stage, scenario)
    return slowest_s, max(loads_s.values())


def stage_group_bytes(stage: TemplateStage, scenario: Scenario) -> int:
    """Return the bytes of a stage's gradients on all devices that share a replica by tensor parallelism."""
    return group_bytes(scenario, stage.first_layer, stage.end_layer, stage.option.degree)


def retimed(template: PipelineTemplate, scenario: Scenario, samples: int) -> PipelineTemplate:
    """Return the template with ``samples`` samples per step and the microbatch size of the shortest `pipeline_s`.

    Stages and ``sum_s`` are unchanged. If no microbatch fits into memory, the times are `INFEASIBLE_S`.
    """
    if samples < template.pipelines:
        return replace(template, samples=samples, bottleneck_s=INFEASIBLE_S, round_trip_s=INFEASIBLE_S)
    share = -(-samples // template.pipelines)
    least = max(1, int(share / (template.microbatch * _WIDEST)))
    most = min(share, int(share / template.microbatch * _WIDEST) + 1)
    widest = max(stage.option.width for stage in template.stages)
    tried = [_with_microbatch(template, scenario, samples, size) for size in _sizes(share, least, most)]
    able = [each for each in tried if each.microbatch >= widest]
    return min(able or [_with_microbatch(template, scenario, samples, share)], key=lambda each: each.pipeline_s)


def _sizes(share: int, least: int, most: int) -> Iterator[int]:
    """Yield each size of the largest microbatch once, if ``share`` samples are divided into least to most of them."""
    count = least
    while count <= most:
        size = -(-share // count)
        yield size
        count = -(-share // (size - 1)) if size > 1 else most + 1


def _with_microbatch(template: PipelineTemplate, scenario: Scenario, samples: int, microbatch: int) -> PipelineTemplate:
    microbatches = -(-samples // (template.pipelines * microbatch))
    bottleneck_s, round_trip_s = _times_s(template.stages, scenario, template.pipelines, microbatch, microbatches)
    return replace(
        template, samples=samples, microbatch=microbatch, bottleneck_s=bottleneck_s, round_trip_s=round_trip_s
    )


@lru_cache(maxsize=65536)
def _times_s(
    stages: tuple[TemplateStage, ...], scenario: Scenario, pipelines: int, microbatch: int, microbatches: int
) -> tuple[float, float]:
    """Return ``bottleneck_s`` and ``round_trip_s`` of a template, both `INFEASIBLE_S` if a stage exceeds memory."""
    options = [stage.option for stage in stages]
    busy_s, both_ways_s, _ = boundary_costs(options, scenario, pipelines, microbatch)
    blocks = scenario.effects.compute.transfers_block
    bottleneck_s = round_trip_s = 0.0
    for index, (stage, option) in enumerate(zip(stages, options, strict=True)):
        depth = min(microbatches, len(stages) - index)
        own = stage.first_layer, stage.end_layer
        memory = range_memory(scenario, option.samples(microbatch), option.degree, recompute=option.recompute)
        resident_bytes, saved_bytes = (each[own] for each in memory)
        if resident_bytes + depth * saved_bytes > option.device_class.memory_bytes:
            return INFEASIBLE_S, INFEASIBLE_S
        until_s = option_table(scenario, option, microbatch).compute_s
        compute_s, blocked_s = float(until_s[own[1]] - until_s[own[0]]) + launches_s(scenario), 0.0
        if index + 1 < len(stages):
            boundary = index, index + 1, stage.end_layer - 1
            transfer_s = float(both_ways_s[boundary])
            blocked_s = transfer_s if blocks else 0.0
            bottleneck_s = max(bottleneck_s, float(busy_s[boundary]))
            round_trip_s += transfer_s
        bottleneck_s, round_trip_s = max(bottleneck_s, compute_s + blocked_s), round_trip_s + compute_s
    return bottleneck_s, round_trip_s
