"""The number of microbatches of a skeleton: its cut stays, its times are taken anew for each size."""

from dataclasses import replace
from functools import lru_cache

import numpy as np

from planner.scenario.scenario import Scenario
from planner.systems.auto.candidates.chain_split import Floats
from planner.systems.auto.candidates.device_classes import StageOption
from planner.systems.auto.candidates.stage_options import boundary_costs, layer_costs
from planner.systems.auto.candidates.uniform import PipelineTemplate, TemplateStage

# Sizes up to so many times that for which the skeleton was found, and down to that part of it.
_WIDEST = 2.0

# Of what does not fit; finite, since no time times it is no time.
INFEASIBLE_S = 1e30


def retimed(template: PipelineTemplate, scenario: Scenario, samples: int) -> PipelineTemplate:
    """Return the skeleton for so many samples of a step, with the microbatch size that makes its chain shortest."""
    if samples < template.pipelines:
        return replace(template, samples=samples, bottleneck_s=INFEASIBLE_S, round_trip_s=INFEASIBLE_S)
    share = -(-samples // template.pipelines)
    least = max(1, int(share / (template.microbatch * _WIDEST)))
    most = min(share, int(share / template.microbatch * _WIDEST) + 1)
    widest = max(stage.width for stage in template.stages)
    tried = [_sized(template, scenario, samples, -(-share // count)) for count in range(least, most + 1)]
    able = [each for each in tried if each.microbatch >= widest]
    return min(able or [_sized(template, scenario, samples, share)], key=lambda each: each.chain_s)


def _sized(template: PipelineTemplate, scenario: Scenario, samples: int, microbatch: int) -> PipelineTemplate:
    """The skeleton with microbatches of so many samples."""
    microbatches = -(-samples // (template.pipelines * microbatch))
    bottleneck_s, round_trip_s = _times_s(template.stages, scenario, template.pipelines, microbatch, microbatches)
    return replace(
        template, samples=samples, microbatch=microbatch, bottleneck_s=bottleneck_s, round_trip_s=round_trip_s
    )


@lru_cache(maxsize=65536)
def _times_s(
    stages: tuple[TemplateStage, ...], scenario: Scenario, pipelines: int, microbatch: int, microbatches: int
) -> tuple[float, float]:
    """Seconds of the slowest stage or link for a microbatch, and of its round trip; or `INFEASIBLE_S`, twice."""
    options = [StageOption(stage.device_class, stage.degree, stage.width, stage.recompute, 1) for stage in stages]
    busy_s, way_s = boundary_costs(options, scenario, pipelines, microbatch)
    templates = scenario.effects.compute.transfers_block
    bottleneck_s = round_trip_s = 0.0
    for index, stage in enumerate(stages):
        costs = layer_costs(scenario, stage.device_class, stage.degree, -(-microbatch // stage.width), stage.recompute)
        depth = min(microbatches, len(stages) - index)
        own = (stage.first_layer, stage.end_layer)
        if _of(costs.state_bytes, *own) + depth * _of(costs.activation_bytes, *own) > costs.capacity_bytes:
            return INFEASIBLE_S, INFEASIBLE_S
        compute_s, blocked_s = _of(costs.compute_s, *own), 0.0
        if index + 1 < len(stages):
            crossing_s = float(way_s[index, index + 1, stage.end_layer - 1])
            blocked_s = 2 * crossing_s if templates else 0.0
            bottleneck_s = max(bottleneck_s, float(busy_s[index, index + 1, stage.end_layer - 1]))
            round_trip_s += 2 * crossing_s
        bottleneck_s, round_trip_s = max(bottleneck_s, compute_s + blocked_s), round_trip_s + compute_s
    return bottleneck_s, round_trip_s


def _of(until: Floats, first: int, end: int) -> float:
    return float(np.subtract(until[end], until[first]))
