"""The search for uniform plans: equal pipelines side by side, each over all or some of the device classes.

Every number of pipelines that divides some device class differently is tried, with every microbatch size worth a try
and every order of few classes; what its lower bound rules out is left out. Times are those of the closed form of
`planner.systems.auto.candidates.templates`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from math import gcd, inf

from planner.scenario.scenario import Scenario
from planner.systems.auto.candidates.device_classes import DeviceClass, StageOption, stage_options
from planner.systems.auto.candidates.option_costs import lower_bounds_s, next_contexts, option_costs
from planner.systems.auto.candidates.partition_dp import Partition, best_partition
from planner.systems.auto.candidates.templates import PipelineTemplate, TemplateStage, gradient_sum_s

# At most so many of the best templates go on to the evaluator, if they are within this factor of the best.
KEPT = 12
SLACK = 1.03

MOST_STAGES = 16

# All orders of at most so many device classes are tried; of more, the given one and its reverse.
MOST_PERMUTED = 3

# Pipelines are searched for without a limit on gradient sums, then with a limit of this share of the sum found, so many
# times in all; not where sums take less than the last share of the longest step of interest.
_SUM_BOUNDS = 3
_LESS_SUM = 0.6
_SHORT_SUM = 0.1

# Microbatch sizes for which pipelines are searched for; `retimed` tries sizes in between.
_MICROBATCHES = (1, 2, 4, 8, 16, 32, 64)


def find_templates(
    device_classes: Sequence[DeviceClass],
    scenario: Scenario,
    samples: int,
    holder_factor: float = 1.0,
    limit_s: float = inf,
) -> list[PipelineTemplate]:
    """Return the best templates over some device classes, the best first; none if nothing fits.

    Args:
        device_classes: Classes of which all or some devices are used.
        scenario: Scenario that gives model and links.
        samples: Samples per step.
        holder_factor: Devices that hold a layer in the whole plan, for each one that does in these pipelines.
        limit_s: Longest step of interest, seconds.
    """
    for recompute in (False, True):
        found: list[PipelineTemplate] = []
        shapes = _shapes(device_classes, scenario, samples, recompute)
        for shape in sorted(shapes, key=lambda each: each.least_s):
            most_s = min(limit_s, SLACK * found[0].step_s if found else inf)
            if shape.least_s > most_s:
                break
            found = _best([*found, *_templates(shape, scenario, samples, holder_factor, most_s)])
        if found:
            return found
    return []


def _best(found: Sequence[PipelineTemplate]) -> list[PipelineTemplate]:
    # Equal templates differ only in what their microbatches were rounded to: the first one is kept.
    distinct = {(each.pipelines, each.microbatch, each.stages): each for each in reversed(found)}
    ranked = sorted(distinct.values(), key=lambda each: each.step_s)[:KEPT]
    return [each for each in ranked if each.step_s <= SLACK * ranked[0].step_s]


@dataclass(frozen=True, eq=False, slots=True)
class _Shape:
    """A number of pipelines and a microbatch size.

    Attributes:
        pipelines: Number of equal pipelines.
        microbatch: Samples of a microbatch.
        microbatches: Microbatches of a pipeline.
        options: Options of each pipeline's stages.
        bottleneck_s: Lower bound of the slowest stage's time for a microbatch, seconds.
        least_s: Lower bound of the time of a step, seconds.
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
    counts = {each.size // part for each in device_classes for part in range(1, each.size + 1)}
    for pipelines in (count for count in counts if count <= samples):
        share = -(-samples // pipelines)
        for microbatch in (*(size for size in _MICROBATCHES if size < share), share):
            options = stage_options(device_classes, scenario, pipelines, microbatch, recompute)
            if options:
                microbatches = -(-share // microbatch)
                bottleneck_s, alone_s = lower_bounds_s(options, scenario, pipelines, microbatch)
                least_s = (microbatches - 1) * bottleneck_s + alone_s
                yield _Shape(pipelines, microbatch, microbatches, options, bottleneck_s, least_s)


def _templates(
    shape: _Shape, scenario: Scenario, samples: int, holder_factor: float, limit_s: float
) -> Iterator[PipelineTemplate]:
    """Return the best pipelines of each order of the device classes whose steps are within the limit."""
    costs = option_costs(shape.options, scenario, shape.pipelines, shape.microbatch, holder_factor)
    # But for its links, no pipeline takes longer than all layers on the slowest device.
    limit_s = min(limit_s, 4 * costs.compute_s.max() * shape.microbatches)
    layers = len(scenario.model.layers)
    for places in _orders(list(dict.fromkeys(option.device_class for option in shape.options))):
        ordered = costs._replace(next_context=next_contexts(shape.options, places))
        most_sum_s = inf
        for _ in range(_SUM_BOUNDS):
            found = best_partition(
                ordered, shape.microbatches, min(MOST_STAGES, layers), shape.bottleneck_s, limit_s, most_sum_s
            )
            if not found.option.size:
                break
            stages = tuple(_stages(found, shape.options, layers))
            holders = shape.pipelines * holder_factor
            sum_s = max(gradient_sum_s(stage, scenario, round(holders * stage.width)) for stage in stages)
            yield _without_common_width(
                PipelineTemplate(
                    shape.pipelines, samples, shape.microbatch, stages, found.bottleneck_s, found.round_trip_s, sum_s
                )
            )
            # Fewer parameters on a device make shorter sums, for which a longer pipeline may be worth it.
            most_sum_s = _LESS_SUM * sum_s
            if sum_s < _SHORT_SUM * limit_s:
                break


def _orders(device_classes: Sequence[DeviceClass]) -> Iterator[dict[DeviceClass, int]]:
    """Places of the device classes along a pipeline."""
    given = range(len(device_classes))
    for places in permutations(given) if len(device_classes) <= MOST_PERMUTED else (given, given[::-1]):
        yield dict(zip(device_classes, places, strict=True))


def _stages(found: Partition, options: Sequence[StageOption], layers: int) -> Iterator[TemplateStage]:
    first_layers = found.first_layer.tolist()
    for index, first, end in zip(found.option.tolist(), first_layers, [*first_layers[1:], layers], strict=True):
        option = options[index]
        yield TemplateStage(option.device_class, option.degree, option.width, first, end, option.recompute)


def _without_common_width(template: PipelineTemplate) -> PipelineTemplate:
    """Return the template with pipelines in place of replicas that all stages have: equal templates compare equal."""
    times = gcd(*(stage.width for stage in template.stages))
    if times == 1 or template.microbatch % times or template.pipelines * times > template.samples:
        return template
    stages = tuple(replace(stage, width=stage.width // times) for stage in template.stages)
    return replace(
        template, pipelines=template.pipelines * times, microbatch=template.microbatch // times, stages=stages
    )
