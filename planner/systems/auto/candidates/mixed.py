"""Unlike pipelines side by side: pools in blocks, each with skeletons of its own, and samples shared by their speed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf

from planner.cost.network import nominal_path
from planner.cost.synchronisation import ring_s
from planner.scenario.scenario import Scenario
from planner.systems.auto.candidates.device_classes import DeviceClass
from planner.systems.auto.candidates.retiming import INFEASIBLE_S, retimed
from planner.systems.auto.candidates.uniform import KEPT, SLACK, PipelineTemplate, find_templates, sum_of_gradients_s

# All partitions of so many pools are tried; of more, only those into regions, into pools, and the whole; a chain may
# leave pools out.
MOST_PARTED = 4

# Of many pools the fastest two, three and so on are tried side by side.
MOST_FASTEST = 6

# Of more parts not every combination of their skeletons is tried.
MOST_COMBINED = 3

# Skeletons of each block that are combined with those of the others.
_OF_EACH = 3

# Layouts that the closed form says to take so many times as long as the best are not looked at.
WORST_KEPT = 1.3

# Samples of a block are sought within this share of those that its speed gives it.
_AROUND = 0.2

# A first share of the batch goes by the speeds that devices have with so many samples at once.
_SAMPLES = 4


@dataclass(frozen=True, eq=False, slots=True)
class PipelineMix:
    """Skeletons side by side, which together take every sample of a step.

    Attributes:
        blocks: On different pools.
        step_s: By the closed form, sums of gradients over all of them included.
    """

    templates: tuple[PipelineTemplate, ...]
    step_s: float


def find_mixes(device_classes: Sequence[DeviceClass], scenario: Scenario) -> list[PipelineMix]:
    """Return the best layouts, the best first; none if nothing fits."""
    batch = scenario.training.global_batch
    found: list[PipelineMix] = []
    for parts in sorted(_partitions(device_classes, scenario), key=len):
        limit_s = SLACK * min((each.step_s for each in found), default=inf)
        if len(parts) == 1:
            alone = [retimed(each, scenario, batch) for each in find_templates(parts[0], scenario, batch)]
            found += [PipelineMix((each,), each.step_s) for each in alone]
        elif len(parts) <= batch:
            found += _side_by_side(parts, scenario, limit_s)
    able = (each for each in found if each.step_s < INFEASIBLE_S)
    ranked = sorted(able, key=lambda each: each.step_s)[:KEPT]
    return [each for each in ranked if each.step_s <= WORST_KEPT * ranked[0].step_s]


def _partitions(device_classes: Sequence[DeviceClass], scenario: Scenario) -> Iterator[list[list[DeviceClass]]]:
    if len(device_classes) <= MOST_PARTED:
        yield from _all_partitions(list(device_classes))
        return
    yield [list(device_classes)]
    regions = {
        device_class.region: [other for other in device_classes if other.region == device_class.region]
        for device_class in device_classes
    }
    if 1 < len(regions) < len(device_classes):
        yield list(regions.values())
    yield [[device_class] for device_class in device_classes]
    fastest = sorted(device_classes, key=_speed_of(scenario), reverse=True)
    yield from (
        [[device_class] for device_class in fastest[:count]]
        for count in range(2, min(MOST_FASTEST, len(device_classes) - 1) + 1)
    )


def _all_partitions(device_classes: list[DeviceClass]) -> Iterator[list[list[DeviceClass]]]:
    if not device_classes:
        yield []
        return
    for rest in _all_partitions(device_classes[1:]):
        yield [[device_classes[0]], *rest]
        for index, part in enumerate(rest):
            yield [*rest[:index], [device_classes[0], *part], *rest[index + 1 :]]


def _side_by_side(parts: Sequence[Sequence[DeviceClass]], scenario: Scenario, limit_s: float) -> Iterator[PipelineMix]:
    """Layouts with a skeleton for each part; parts on which nothing fits are left out."""
    batch = scenario.training.global_batch
    shares = _shared(batch, [sum(map(_speed_of(scenario), part)) for part in parts])
    devices = sum(device_class.size for part in parts for device_class in part)
    each = [
        find_templates(part, scenario, share, devices / sum(device_class.size for device_class in part), limit_s)[
            :_OF_EACH
        ]
        for part, share in zip(parts, shares, strict=True)
    ]
    able = [found for found in each if found]
    if len(able) > 1:
        for templates in _combined(able):
            yield _balanced(templates, scenario)


def _combined(each: Sequence[Sequence[PipelineTemplate]]) -> Iterator[tuple[PipelineTemplate, ...]]:
    """All combinations of few parts' skeletons; of many parts the best of each, and one other at a time."""
    if len(each) <= MOST_COMBINED:
        yield from product(*each)
        return
    best = tuple(found[0] for found in each)
    yield best
    for index, found in enumerate(each):
        for other in found[1:]:
            yield (*best[:index], other, *best[index + 1 :])


def _speed_of(scenario: Scenario) -> Callable[[DeviceClass], float]:
    """How many samples a second a pool would do if every device were always busy."""
    layers = len(scenario.model.layers)

    def speed(device_class: DeviceClass) -> float:
        time_s = scenario.model.times(0, layers, device_class.kind, _SAMPLES).total_s
        return device_class.size * _SAMPLES / time_s if time_s else inf

    return speed


def _shared(samples: int, speeds: Sequence[float]) -> list[int]:
    """Samples in proportion to speeds, one at least for each."""
    total = sum(speeds)
    shares = [max(1, round(samples * speed / total)) for speed in speeds]
    largest = max(range(len(shares)), key=lambda index: shares[index])
    shares[largest] += samples - sum(shares)
    return shares


def _balanced(templates: Sequence[PipelineTemplate], scenario: Scenario) -> PipelineMix:
    """The skeletons with samples shared so that the slowest is quickest, as many for each of a block's pipelines.

    What remains goes to the last.
    """
    batch = scenario.training.global_batch
    shares = _shared(batch, [template.samples / template.chain_s for template in templates])
    best = _with_samples(templates, shares, scenario)
    for index, template in enumerate(templates[:-1]):
        step = template.pipelines
        around = [
            number * step for number in range(1, batch // step) if abs(number * step / shares[index] - 1) < _AROUND
        ]
        for samples in around:
            rest = batch - samples - sum(each.samples for at, each in enumerate(best[:-1]) if at != index)
            if rest >= templates[-1].pipelines:
                own = [each.samples for each in best]
                own[index], own[-1] = samples, rest
                best = min(best, _with_samples(templates, own, scenario), key=_slowest_s)
    return PipelineMix(best, _slowest_s(best) + _sum_over_blocks_s(best, scenario))


def _with_samples(
    templates: Sequence[PipelineTemplate], samples: Sequence[int], scenario: Scenario
) -> tuple[PipelineTemplate, ...]:
    return tuple(retimed(template, scenario, share) for template, share in zip(templates, samples, strict=True))


def _slowest_s(templates: Sequence[PipelineTemplate]) -> float:
    return max(template.chain_s for template in templates)


def _sum_over_blocks_s(templates: Sequence[PipelineTemplate], scenario: Scenario) -> float:
    """Seconds of the slowest sum: as if all holders of a stage's layers stood where the worst of them do."""
    holders = sum(template.pipelines * min(stage.width for stage in template.stages) for template in templates)
    slowest_s = max(sum_of_gradients_s(stage, scenario, holders) for template in templates for stage in template.stages)
    ends = [template.stages[0].device_class.ends[0] for template in templates]
    paths = [nominal_path(scenario, one, other) for one, other in zip(ends, [*ends[1:], ends[0]], strict=True)]
    largest = max(
        scenario.model.at_degree(stage.degree).parameter_bytes(stage.first_layer, stage.end_layer)
        for template in templates
        for stage in template.stages
    )
    return max(slowest_s, ring_s(paths, max(holders, largest), holders))
