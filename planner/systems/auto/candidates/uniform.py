"""Skeletons of plans: alike pipelines side by side, each a chain of stages over the pools, judged by a closed form.

    step = (M - 1) * slowest stage or link + one microbatch there and back + slowest sum of gradients

Every number of pipelines that divides some pool differently is tried, with every microbatch size worth a try and every
order of few pools; what cannot be better than the best so far is cut off by its bound.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from math import gcd, inf

import numpy as np

from planner.scenario.scenario import Scenario
from planner.systems.auto.candidates.chain_split import Chain, best_chain
from planner.systems.auto.candidates.device_classes import DeviceClass, StageOption
from planner.systems.auto.candidates.stage_options import class_ring_s, lower_bounds_s, option_costs, stage_options


@dataclass(frozen=True, slots=True)
class TemplateStage:
    """Layers on a part of a pool, in every one of the pipelines.

    Attributes:
        pool: Where.
        degree: Devices that share each layer.
        width: Replicas in a pipeline.
        first_layer: Index of the first.
        end_layer: Index after the last.
        recompute: Whether only its input is kept.
    """

    device_class: DeviceClass
    degree: int
    width: int
    first_layer: int
    end_layer: int
    recompute: bool


@dataclass(frozen=True, slots=True)
class PipelineTemplate:
    """Alike pipelines.

    Attributes:
        pipelines: How many.
        samples: Of all of them in a step.
        microbatch: Samples.
        stages: Of each pipeline.
        bottleneck_s: Time of the slowest stage or link for a microbatch, seconds.
        round_trip_s: Time of one microbatch there and back, seconds.
        sum_s: Time of the slowest sum of gradients, seconds.
    """

    pipelines: int
    samples: int
    microbatch: int
    stages: tuple[TemplateStage, ...]
    bottleneck_s: float
    round_trip_s: float
    sum_s: float

    @property
    def chain_s(self) -> float:
        """Seconds of a step without sums of gradients; microbatches that came out smaller take less in proportion."""
        share = -(-self.samples // self.pipelines)
        microbatches = -(-share // self.microbatch)
        filled = -(-share // microbatches) / self.microbatch
        return ((microbatches - 1) * self.bottleneck_s + self.round_trip_s) * filled

    @property
    def step_s(self) -> float:
        """Seconds of a step by the closed form."""
        return self.chain_s + self.sum_s


# Of the best skeletons so many are judged by the evaluator, if they are within this factor of the best.
KEPT = 12
SLACK = 1.03

MOST_STAGES = 16

# All orders of so many pools are tried; of more, the given one and its reverse.
MOST_PERMUTED = 3

# Chains are sought for sums of any length, then for sums of this share of what was found, so many times; not where sums
# take less than that share of a step.
_SUM_BOUNDS = 3
_LESS_SUM = 0.6
_SHORT_SUM = 0.1

# Sizes in between are tried with the cuts that these lead to.
_MICROBATCHES = (1, 2, 4, 8, 16, 32, 64)


def find_templates(
    device_classes: Sequence[DeviceClass],
    scenario: Scenario,
    samples: int,
    holders_each: float = 1.0,
    limit_s: float = inf,
) -> list[PipelineTemplate]:
    """Return the best skeletons over some pools, the best first; none if nothing fits.

    Args:
        device_classes: What may be used, all or part of it.
        scenario: Gives model and links.
        samples: Of a step.
        holders_each: For each device that holds a layer here so many do altogether, with the other pools' pipelines.
        limit_s: Longer steps are of no use.
    """
    for recompute in (False, True):
        found: list[PipelineTemplate] = []
        for shape in sorted(_shapes(device_classes, scenario, samples, recompute), key=lambda each: each.least_s):
            most_s = min(limit_s, SLACK * found[0].step_s if found else inf)
            if shape.least_s > most_s:
                break
            found = _best([*found, *_chains(shape, scenario, samples, holders_each, most_s)])
        if found:
            return found
    return []


def _best(found: Sequence[PipelineTemplate]) -> list[PipelineTemplate]:
    # Equals differ by no more than what their microbatches were rounded to: the first one stays.
    unlike = {(each.pipelines, each.microbatch, each.stages): each for each in reversed(found)}
    ranked = sorted(unlike.values(), key=lambda each: each.step_s)[:KEPT]
    return [each for each in ranked if each.step_s <= SLACK * ranked[0].step_s]


def _orders(count: int) -> Iterator[Sequence[int]]:
    """The place of each pool in the chain."""
    if count <= MOST_PERMUTED:
        yield from permutations(range(count))
    else:
        yield range(count)
        yield range(count)[::-1]


@dataclass(frozen=True, eq=False, slots=True)
class _Shape:
    """A number of pipelines and a microbatch size, with the ways in which such pipelines may use the pools.

    ``bottleneck_s`` is a lower bound of the slowest stage's time for a microbatch, ``least_s`` of a step.
    """

    pipelines: int
    microbatch: int
    microbatches: int
    options: Sequence[StageOption]
    bottleneck_s: float
    least_s: float


def _shapes(
    device_classes: Sequence[DeviceClass], scenario: Scenario, samples: int, recompute: bool
) -> Iterator[_Shape]:
    counts = {device_class.size // part for device_class in device_classes for part in range(1, device_class.size + 1)}
    for pipelines in (count for count in counts if count <= samples):
        share = -(-samples // pipelines)
        for microbatch in (*(size for size in _MICROBATCHES if size < share), share):
            options = stage_options(device_classes, scenario, pipelines, microbatch, recompute)
            if options:
                microbatches = -(-share // microbatch)
                bottleneck_s, alone_s = lower_bounds_s(options, scenario, pipelines, microbatch)
                least_s = (microbatches - 1) * bottleneck_s + alone_s
                yield _Shape(pipelines, microbatch, microbatches, options, bottleneck_s, least_s)


def _chains(
    shape: _Shape, scenario: Scenario, samples: int, holders_each: float, limit_s: float
) -> Iterator[PipelineTemplate]:
    """The best chains of each order of the pools, where their steps are within the limit."""
    options = option_costs(shape.options, scenario, shape.pipelines, shape.microbatch, holders_each)
    limit_s = min(limit_s, _serial_s(options.compute_s.max(), shape.microbatches))
    layers = len(scenario.model.layers)
    for order in _orders(int(options.pool.max()) + 1):
        placed = options._replace(pool=np.array(order)[options.pool])
        most_sum_s = inf
        for _ in range(_SUM_BOUNDS):
            chain = best_chain(
                placed, shape.microbatches, min(MOST_STAGES, layers), shape.bottleneck_s, limit_s, most_sum_s
            )
            if not chain.option.size:
                break
            stages = tuple(_stages(chain, shape.options, layers))
            holders = shape.pipelines * holders_each
            sum_s = max(sum_of_gradients_s(stage, scenario, round(holders * stage.width)) for stage in stages)
            yield _narrowed(
                PipelineTemplate(
                    shape.pipelines, samples, shape.microbatch, stages, chain.bottleneck_s, chain.round_trip_s, sum_s
                )
            )
            # Fewer parameters on a device make shorter sums, for which a longer chain may be worth it.
            most_sum_s = _LESS_SUM * sum_s
            if sum_s < _SHORT_SUM * limit_s:
                break


def _narrowed(template: PipelineTemplate) -> PipelineTemplate:
    """The same with more pipelines in place of replicas that all stages have, so that equals look equal."""
    times = gcd(*(stage.width for stage in template.stages))
    if times == 1 or template.microbatch % times or template.pipelines * times > template.samples:
        return template
    stages = tuple(replace(stage, width=stage.width // times) for stage in template.stages)
    return replace(
        template, pipelines=template.pipelines * times, microbatch=template.microbatch // times, stages=stages
    )


def _stages(chain: Chain, options: Sequence[StageOption], layers: int) -> Iterator[TemplateStage]:
    ends = [*chain.first_layer[1:].tolist(), layers]
    for option, first, end in zip(chain.option.tolist(), chain.first_layer.tolist(), ends, strict=True):
        option = options[option]
        yield TemplateStage(option.device_class, option.degree, option.width, first, end, option.recompute)


def _serial_s(slowest_s: float, microbatches: int) -> float:
    """No chain takes longer than all layers on the slowest device, but for its links."""
    return 4 * slowest_s * microbatches


def sum_of_gradients_s(stage: TemplateStage, scenario: Scenario, holders: int) -> float:
    """Return how long a ring takes to sum the gradients of a stage over so many devices like its own, seconds."""
    model = scenario.model.at_degree(stage.degree)
    return class_ring_s(
        scenario, stage.device_class, model.parameter_bytes(stage.first_layer, stage.end_layer), holders
    )
