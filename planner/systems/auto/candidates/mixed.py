"""Search for pipeline mixes: different templates side by side, each on device classes of its own.

Each template of a mix takes a part of the batch.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from math import inf

from planner.cost.network import nominal_path
from planner.cost.synchronisation import ring_s
from planner.scenario.scenario import Scenario
from planner.systems.auto.candidates.device_classes import DeviceClass
from planner.systems.auto.candidates.templates import (
    INFEASIBLE_S,
    PipelineTemplate,
    gradient_sum_s,
    retimed,
    stage_group_bytes,
)
from planner.systems.auto.candidates.uniform import KEPT, MOST_IMPROVED, SLACK, find_templates

# A partition divides the device classes into parts, each of which gets a template. For up to this number of classes,
# all partitions are tried. For more classes, these are tried: one part, one for each class, and one for each of the
# fastest classes. In any case one part and one for each region are tried for all regions and, if there are up to
# `MOST_LEFT_OUT`, for each alone and for all but one.
MOST_PARTED, MOST_LEFT_OUT = 4, 6

# Most of the fastest classes that are tried as parts without the other classes.
MOST_FASTEST = 6

# Most devices of a cluster in which parts of classes in single hosts, and of the classes of a kind, are tried too.
MOST_OF_HOSTS = MOST_OF_KINDS = 64

# Most parts for which all combinations of templates are tried.
MOST_COMBINED = 3

# Number of templates of each part that are combined.
_PER_PART = 3

# Longest step of a mix that is kept, as a multiple of the shortest one, by the closed form; and that of the best mix of
# a partition, which is kept too, since the closed form does not know all links that flows share.
WORST_KEPT, WORST_OF_PARTITION = 1.3, 2.0

# Share by which the samples of a template are varied around the number that is in proportion to its speed.
_AROUND = 0.2

# Multiples of a template's pipelines up to the batch of which those around the number are tried.
_MOST_MULTIPLES = 512

# Microbatch size, in samples, at which the speeds of device classes are compared.
_SAMPLES = 4


@dataclass(frozen=True, eq=False, slots=True)
class PipelineMix:
    """Templates side by side that together take every sample of a step.

    Attributes:
        templates: Templates on disjoint device classes.
        step_s: Time of a step by the closed form of `planner.systems.auto.candidates.templates`, with gradient sums
            over all templates, seconds.
    """

    templates: tuple[PipelineTemplate, ...]
    step_s: float


def find_mixes(device_classes: Sequence[DeviceClass], scenario: Scenario) -> list[PipelineMix]:
    """Return up to `KEPT` mixes and the best mix of each partition, the one with the shortest step first.

    The list is empty if no mix fits into memory.
    """
    batch = scenario.training.global_batch
    found: list[PipelineMix] = []
    best: list[PipelineMix] = []
    for parts in sorted(_partitions(device_classes, scenario), key=len):
        limit_s = min((each.step_s for each in found), default=inf)
        mixes: list[PipelineMix] = []
        if len(parts) == 1:
            alone = find_templates(parts[0], scenario, batch, limit_s=WORST_OF_PARTITION * limit_s)
            mixes = [PipelineMix((each,), each.step_s) for each in (retimed(each, scenario, batch) for each in alone)]
        elif len(parts) <= batch:
            mixes = list(_side_by_side(parts, scenario, SLACK * limit_s))
        able = [each for each in mixes if each.step_s < INFEASIBLE_S]
        found += able
        best += sorted(able, key=lambda each: each.step_s)[:1]
    ranked = sorted(found, key=lambda each: each.step_s)
    kept = [each for each in ranked[:KEPT] if each.step_s <= WORST_KEPT * ranked[0].step_s]
    others = [each for each in best if each.step_s <= WORST_OF_PARTITION * ranked[0].step_s]
    return sorted(dict.fromkeys((*kept, *others)), key=lambda each: each.step_s)


def _partitions(device_classes: Sequence[DeviceClass], scenario: Scenario) -> Iterator[list[list[DeviceClass]]]:
    """Yield the partitions that are tried, each once."""
    seen: set[frozenset[frozenset[DeviceClass]]] = set()
    for parts in (
        *_partitions_by_class(device_classes, scenario),
        *_partitions_by_kind(device_classes, scenario),
        *_partitions_by_region(device_classes),
        *_partitions_by_host(device_classes, scenario),
    ):
        key = frozenset(map(frozenset, parts))
        if key not in seen:
            seen.add(key)
            yield parts


def _partitions_by_class(
    device_classes: Sequence[DeviceClass], scenario: Scenario
) -> Iterator[list[list[DeviceClass]]]:
    if len(device_classes) <= MOST_PARTED:
        yield from _all_partitions(list(device_classes))
        return
    yield [list(device_classes)]
    yield [[each] for each in device_classes]
    fastest = sorted(device_classes, key=_speed_of(scenario), reverse=True)
    for count in range(2, min(MOST_FASTEST, len(device_classes) - 1) + 1):
        yield [[each] for each in fastest[:count]]


def _partitions_by_region(device_classes: Sequence[DeviceClass]) -> Iterator[list[list[DeviceClass]]]:
    regions: dict[str, list[DeviceClass]] = {}
    for each in device_classes:
        regions.setdefault(each.region, []).append(each)
    chosen = [list(regions)]
    if 1 < len(regions) <= MOST_LEFT_OUT:
        chosen += [[region] for region in regions]
        chosen += [[each for each in regions if each != left] for left in regions]
    for some in chosen:
        yield [[each for region in some for each in regions[region]]]
        if len(some) > 1:
            yield [regions[region] for region in some]


def _partitions_by_kind(device_classes: Sequence[DeviceClass], scenario: Scenario) -> Iterator[list[list[DeviceClass]]]:
    """Yield partitions of a single part: all classes of a kind, and those of the fastest kinds.

    They differ in memory, network interface or region only.
    """
    if len(device_classes) <= MOST_PARTED or sum(each.size for each in device_classes) > MOST_OF_KINDS:
        return
    kinds = dict.fromkeys(each.kind for each in device_classes)
    of_kind = [[each for each in device_classes if each.kind == kind] for kind in kinds]
    of_kind.sort(key=lambda classes: sum(map(_speed_of(scenario), classes)), reverse=True)
    for count, classes in enumerate(of_kind[:MOST_FASTEST], 1):
        yield [classes]
        yield [list(chain.from_iterable(of_kind[:count]))]


def _partitions_by_host(device_classes: Sequence[DeviceClass], scenario: Scenario) -> Iterator[list[list[DeviceClass]]]:
    """Yield partitions in which the devices of a class in each host are a class: links inside hosts may be faster."""
    count = sum(len(each.hosts) for each in device_classes)
    if count == len(device_classes) or sum(each.size for each in device_classes) > MOST_OF_HOSTS:
        return
    hosts = [replace(each, hosts=(host,)) for each in device_classes for host in each.hosts]
    fastest = sorted(hosts, key=_speed_of(scenario), reverse=True)
    yield from ([[each]] for each in fastest[:MOST_FASTEST] if each.size > 1)
    for some in range(2, min(MOST_FASTEST, count) + 1):
        yield [[each] for each in fastest[:some]]
    yield [[each] for each in hosts]
    if count <= MOST_IMPROVED:
        yield [hosts]


def _all_partitions(device_classes: list[DeviceClass]) -> Iterator[list[list[DeviceClass]]]:
    if not device_classes:
        yield []
        return
    first, *others = device_classes
    for parts in _all_partitions(others):
        yield [[first], *parts]
        for index, part in enumerate(parts):
            yield [*parts[:index], [first, *part], *parts[index + 1 :]]


def _side_by_side(parts: Sequence[Sequence[DeviceClass]], scenario: Scenario, limit_s: float) -> Iterator[PipelineMix]:
    """Yield mixes with one template for each part; parts without a template that keeps the limits are left out."""
    batch = scenario.training.global_batch
    shares = _divided(batch, [sum(map(_speed_of(scenario), part)) for part in parts])
    sizes = [sum(each.size for each in part) for part in parts]
    found = [
        find_templates(part, scenario, share, sum(sizes) / size, limit_s)[:_PER_PART]
        for part, share, size in zip(parts, shares, sizes, strict=True)
    ]
    able = [each for each in found if each]
    if len(able) > 1:
        for templates in dict.fromkeys(each for chosen in _combinations(able) for each in _aligned(chosen, scenario)):
            yield _balanced(templates, scenario)


def _combinations(found: Sequence[Sequence[PipelineTemplate]]) -> Iterator[tuple[PipelineTemplate, ...]]:
    """Yield combinations of one template for each part: all of them if there are few parts.

    If there are many, at most one template of a combination is not the first of its part.
    """
    if len(found) <= MOST_COMBINED:
        yield from product(*found)
        return
    best = tuple(each[0] for each in found)
    yield best
    for index, each in enumerate(found):
        for other in each[1:]:
            yield (*best[:index], other, *best[index + 1 :])


def _aligned(templates: tuple[PipelineTemplate, ...], scenario: Scenario) -> Iterator[tuple[PipelineTemplate, ...]]:
    """Yield templates as they are, and each with the layers of all stages divided as in one of them, if that fits.

    Pipelines that divide the layers alike sum the gradients of each stage once. Otherwise there are more sums, each of
    which waits for the one before, because a device takes part in several.
    """
    yield templates
    if len({len(each.stages) for each in templates}) > 1:
        return
    for model in templates:
        bounds = [(stage.first_layer, stage.end_layer) for stage in model.stages]
        alike = tuple(retimed(_with_bounds(each, bounds), scenario, each.samples) for each in templates)
        if all(each.pipeline_s < INFEASIBLE_S for each in alike):
            yield alike


def _with_bounds(template: PipelineTemplate, bounds: Sequence[tuple[int, int]]) -> PipelineTemplate:
    stages = [
        replace(stage, first_layer=first, end_layer=end)
        for stage, (first, end) in zip(template.stages, bounds, strict=True)
    ]
    return replace(template, stages=tuple(stages))


def _speed_of(scenario: Scenario) -> Callable[[DeviceClass], float]:
    """Return a function from a device class to its throughput, samples per second, if every device is always busy."""
    layers = len(scenario.model.layers)

    def speed(device_class: DeviceClass) -> float:
        time_s = scenario.model.times(0, layers, device_class.kind, _SAMPLES).total_s
        return device_class.size * _SAMPLES / time_s if time_s else inf

    return speed


def _divided(samples: int, speeds: Sequence[float]) -> list[int]:
    """Return parts of ``samples`` in proportion to speeds, at least 1 each; the largest takes the rounding error.

    There are at most as many parts as samples.
    """
    total = sum(speeds)
    shares = [max(1, round(samples * speed / total)) for speed in speeds]
    largest = shares.index(max(shares))
    shares[largest] += samples - sum(shares)
    while shares[largest] < 1:
        # Many small parts were rounded up.
        shares[shares.index(max(shares))] -= 1
        shares[largest] += 1
    return shares


def _balanced(templates: Sequence[PipelineTemplate], scenario: Scenario) -> PipelineMix:
    """Return the mix of templates with the batch divided so that the slowest template is as fast as possible.

    The batch is first divided in proportion to speed. Then each template but the last is tried with every multiple of
    its number of pipelines that is close enough (`_AROUND`), in a large batch with `_MOST_MULTIPLES` of them; the last
    template takes the samples that remain.
    """
    batch = scenario.training.global_batch
    shares = _divided(batch, [each.samples / each.pipeline_s for each in templates])
    best = _with_samples(templates, shares, scenario)
    for index, template in enumerate(templates[:-1]):
        stride = template.pipelines * -(-batch // (template.pipelines * _MOST_MULTIPLES))
        multiples = range(template.pipelines, template.pipelines * (batch // template.pipelines), stride)
        for samples in (each for each in multiples if abs(each / shares[index] - 1) < _AROUND):
            rest = batch - samples - sum(each.samples for at, each in enumerate(best[:-1]) if at != index)
            if rest >= templates[-1].pipelines:
                tried = list(best)
                tried[index], tried[-1] = (
                    retimed(templates[at], scenario, share) for at, share in ((index, samples), (-1, rest))
                )
                best = min(best, tuple(tried), key=_slowest_s)
    return PipelineMix(best, _slowest_s(best) + _gradient_sum_s(best, scenario))


def _with_samples(
    templates: Sequence[PipelineTemplate], samples: Sequence[int], scenario: Scenario
) -> tuple[PipelineTemplate, ...]:
    return tuple(retimed(template, scenario, share) for template, share in zip(templates, samples, strict=True))


def _slowest_s(templates: Sequence[PipelineTemplate]) -> float:
    return max(template.pipeline_s for template in templates)


def _gradient_sum_s(templates: Sequence[PipelineTemplate], scenario: Scenario) -> float:
    """Return a high estimate of the slowest gradient sum, seconds: a ring over all replicas, on the slowest links."""
    holders = sum(each.pipelines * min(stage.option.width for stage in each.stages) for each in templates)
    stages = [stage for each in templates for stage in each.stages]
    slowest_s = max(gradient_sum_s(stage, scenario, holders) for stage in stages)
    ends = [each.stages[0].option.device_class.ends[0] for each in templates]
    paths = [nominal_path(scenario, one, other) for one, other in zip(ends, [*ends[1:], ends[0]], strict=True)]
    largest = {each: stage_group_bytes(each, scenario) for each in stages}
    around_s = (ring_s(paths, max(holders, size), holders, each.option.degree) for each, size in largest.items())
    return max(slowest_s, *around_s)
