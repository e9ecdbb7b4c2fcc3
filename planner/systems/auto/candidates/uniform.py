"""Search for templates: numbers of equal pipelines side by side, each over all or some of the given device classes.

The search combines numbers of pipelines, microbatch sizes and, for few classes, orders of the classes along a pipeline;
for each combination, `planner.systems.auto.candidates.partition_dp` divides the layers. A combination is skipped if a
lower bound of its step time exceeds the shortest step already found by more than a factor of `SLACK`. Times follow the
closed form of `planner.systems.auto.candidates.templates`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import permutations
from math import gcd, inf

import numpy as np

from planner.cost.network import nominal_path
from planner.scenario.scenario import Scenario
from planner.systems.auto.candidates.device_classes import DeviceClass, StageOption, stage_options
from planner.systems.auto.candidates.option_costs import lower_bounds_s, option_costs, option_table, with_class_order
from planner.systems.auto.candidates.partition_dp import Partition, best_partition
from planner.systems.auto.candidates.templates import PipelineTemplate, TemplateStage, gradient_sums_s
from planner.systems.deepcee.device_groups import best_order, nearest_from, path_cost

# Most templates that are kept, and the longest step of a kept template, as a multiple of the shortest one.
KEPT = 12
SLACK = 1.03

# Most stages of a pipeline.
MOST_STAGES = 16

# Most device classes for which all orders are tried, most for which orders inside regions are tried too, and most for
# which the order of the nearest neighbours is improved. For more than `MOST_PERMUTED` classes, the order in which
# neighbours are nearest and its reverse are tried.
MOST_PERMUTED, MOST_REORDERED, MOST_IMPROVED = 3, 9, 20

# The dynamic programme runs up to `_SUM_BOUNDS` times: first without a limit on the time of a gradient sum, then each
# time with a limit of `_LESS_SUM` times the longest sum of the previous result. It stops early if this sum is shorter
# than `_SHORT_SUM` times the longest step of interest.
_SUM_BOUNDS = 3
_LESS_SUM = 0.6
_SHORT_SUM = 0.1

# Microbatch sizes of the search, in samples; `retimed` tries sizes in between.
_MICROBATCHES = (1, 2, 4, 8, 16, 32, 64)


def find_templates(
    device_classes: Sequence[DeviceClass],
    scenario: Scenario,
    samples: int,
    holder_factor: float = 1.0,
    limit_s: float = inf,
) -> list[PipelineTemplate]:
    """Return up to `KEPT` templates over some device classes, the one with the shortest step first.

    Recomputation is tried only if no template without it fits into memory. The list is empty if no template fits, or if
    no step is within ``limit_s``.

    Args:
        device_classes: Classes of which all or some devices are used.
        scenario: Scenario that gives model and links.
        samples: Samples of one step, over all pipelines.
        holder_factor: Number of replicas of a layer in the whole plan divided by their number in these pipelines.
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
    # Different limits on gradient sums may give the same template several times.
    distinct = {(each.pipelines, each.microbatch, each.stages): each for each in reversed(found)}
    ranked = sorted(distinct.values(), key=lambda each: each.step_s)[:KEPT]
    return [each for each in ranked if each.step_s <= SLACK * ranked[0].step_s]


@dataclass(frozen=True, eq=False, slots=True)
class _Shape:
    """A number of pipelines and a microbatch size, for which templates are searched.

    Attributes:
        pipelines: Number of equal pipelines.
        microbatch: Samples of a microbatch.
        microbatches: Number of microbatches of a pipeline per step.
        options: Options of the stages on the device classes.
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
    """Yield the fastest template for each order of the classes and each limit on gradient sums.

    Steps without gradient sums take no longer than ``limit_s`` seconds.
    """
    # The bisection needs a finite limit: 4 times the compute time of all layers on the slowest option.
    alone_s = [float(option_table(scenario, each, shape.microbatch).compute_s[-1]) for each in shape.options]
    limit_s = min(limit_s, 4 * max(alone_s) * shape.microbatches)
    most_busy_s = limit_s / shape.microbatches
    costs = option_costs(shape.options, scenario, shape.pipelines, shape.microbatch, holder_factor, most_busy_s)
    layers = len(scenario.model.layers)
    for places in _orders(list(dict.fromkeys(option.device_class for option in shape.options)), scenario):
        ordered = with_class_order(costs, shape.options, places)
        most_sum_s = inf
        for _ in range(_SUM_BOUNDS):
            found = best_partition(
                ordered, shape.microbatches, min(MOST_STAGES, layers), shape.bottleneck_s, limit_s, most_sum_s
            )
            if not found.option.size:
                break
            stages = tuple(_stages(found, shape.options, layers))
            slowest_s, shared_s = gradient_sums_s(stages, scenario, shape.pipelines * holder_factor)
            sum_s = max(slowest_s, shared_s)
            yield _without_common_width(
                PipelineTemplate(
                    shape.pipelines, samples, shape.microbatch, stages, found.bottleneck_s, found.round_trip_s, sum_s
                )
            )
            # A longer pipeline has fewer parameters on each device, so shorter gradient sums may make its step shorter.
            # Those of all stages together take as long on a network that they share.
            most_sum_s = _LESS_SUM * slowest_s
            if slowest_s < _SHORT_SUM * limit_s or shared_s >= slowest_s:
                break


def _orders(device_classes: Sequence[DeviceClass], scenario: Scenario) -> Iterator[dict[DeviceClass, int]]:
    """Yield orders of the device classes along a pipeline, each as a mapping from a class to its index.

    A pipeline may leave classes out. For many classes, neighbours are near each other by the network. Where few regions
    have several classes, those with most memory also come first in a region, since earlier stages hold more
    microbatches.
    """
    count = len(device_classes)
    if count <= MOST_PERMUTED:
        orders = set(permutations(range(count)))
    else:
        nearest = _nearest_order(tuple(device_classes), scenario)
        orders = {nearest, nearest[::-1]}
        if count <= MOST_REORDERED:
            orders |= {_by_memory(nearest, device_classes), _by_memory(nearest[::-1], device_classes)}
    for order in sorted(orders):
        yield {device_classes[at]: place for place, at in enumerate(order)}


def _by_memory(order: Sequence[int], device_classes: Sequence[DeviceClass]) -> tuple[int, ...]:
    """Return the order with the classes of each region side by side, those with most memory first."""
    regions = list(dict.fromkeys(device_classes[at].region for at in order))

    def key(at: int) -> tuple[int, int]:
        return regions.index(device_classes[at].region), -device_classes[at].memory_bytes

    return tuple(sorted(order, key=key))


@lru_cache(maxsize=4096)
def _nearest_order(device_classes: tuple[DeviceClass, ...], scenario: Scenario) -> tuple[int, ...]:
    """Return the order of classes in which the slowest message between neighbours is fastest, in both directions."""
    size_bytes = max(layer.output_bytes for layer in scenario.model.layers)
    distance_s = np.zeros((len(device_classes), len(device_classes)))
    for one, first in enumerate(device_classes):
        for other, second in enumerate(device_classes[:one]):
            ends = (first.ends[0], second.ends[1])
            both_s = [nominal_path(scenario, *hop).delivery_s(size_bytes) for hop in (ends, ends[::-1])]
            distance_s[one, other] = distance_s[other, one] = max(both_s)
    if len(device_classes) <= MOST_IMPROVED:
        return best_order(distance_s)
    paths = (nearest_from(start, distance_s) for start in range(len(device_classes)))
    return min(paths, key=lambda path: path_cost(path, distance_s))


def _stages(found: Partition, options: Sequence[StageOption], layers: int) -> Iterator[TemplateStage]:
    first_layers = found.first_layer.tolist()
    for index, first, end in zip(found.option.tolist(), first_layers, [*first_layers[1:], layers], strict=True):
        yield TemplateStage(options[index], first, end)


def _without_common_width(template: PipelineTemplate) -> PipelineTemplate:
    """Return the equivalent template with the fewest replicas, so that equivalent templates compare equal.

    If the numbers of replicas of all stages have a common divisor, it is the number of pipelines that is multiplied.
    """
    times = gcd(*(stage.option.width for stage in template.stages))
    if times == 1 or template.microbatch % times or template.pipelines * times > template.samples:
        return template
    options = [replace(stage.option, width=stage.option.width // times) for stage in template.stages]
    stages = tuple(replace(stage, option=option) for stage, option in zip(template.stages, options, strict=True))
    return replace(
        template, pipelines=template.pipelines * times, microbatch=template.microbatch // times, stages=stages
    )
