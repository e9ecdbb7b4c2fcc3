"""Local search: improves a plan by small changes until none lowers its score or the limit of evaluations is reached."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice

from planner.plan.microbatches import even_cut
from planner.plan.plan import Pipeline, Plan, Stage, equivalent_pipelines, replace_pipelines
from planner.scenario.scenario import Scenario
from planner.systems.auto.candidates.build import on_devices, places_of, with_hiding_depths
from planner.systems.auto.local_search.device_moves import FEW_DEVICES, device_moves, stage_moves


def neighbours(plan: Plan, scenario: Scenario) -> Iterator[Plan]:
    """Yield the plans that differ from ``plan`` by one change and fit into memory.

    A change divides stages into two with half of the replicas each, moves the boundary between two stages by one
    layer, changes the number of microbatches, switches one stage's recomputation on or off, moves samples to other
    pipelines, or leaves out a stage, a replica or a pipeline.
    Equivalent pipelines change together; a boundary also moves in all pipelines at once that divide the layers alike,
    since their sums of gradients get slower if only some of them change. For few devices,
    `planner.systems.auto.local_search.device_moves` adds further changes.
    """
    groups = equivalent_pipelines(plan, scenario)
    yield from _with_common_cut_shifted(plan, scenario, groups)
    for group in groups:
        first = plan.pipelines[group[0]]
        yield from _with_other_devices(plan, scenario, group, _with_halved_stages)
        for changed in (*_with_shifted_cut(first), *_with_other_count(first), *_with_other_recompute(first)):
            fitted = with_hiding_depths(changed, scenario)
            if fitted is not None:
                yield _in_all(plan, group, fitted)
        yield from _with_other_devices(plan, scenario, group, _with_fewer_devices)
    devices = scenario.cluster.devices
    for moved in (*device_moves(plan), *(stage_moves(plan, devices) if len(devices) <= FEW_DEVICES else ())):
        refitted = [with_hiding_depths(pipeline, scenario) for pipeline in moved.pipelines]
        able = tuple(pipeline for pipeline in refitted if pipeline is not None)
        if len(able) == len(refitted):
            yield replace(moved, pipelines=able)
    for giver in groups:
        for taker in groups:
            if giver is not taker:
                yield from _with_moved_samples(plan, scenario, giver, taker)
    if len(plan.pipelines) > 1:
        for group in groups:
            yield from _with_fewer_pipelines(plan, scenario, group[-1])


def _with_other_devices(
    plan: Plan, scenario: Scenario, group: Sequence[int], change: Callable[[Pipeline], Iterator[Pipeline]]
) -> Iterator[Plan]:
    """Yield the plans in which a group of equivalent pipelines changes alike, each with devices of its own."""
    for changed in zip(*(change(plan.pipelines[index]) for index in group), strict=True):
        fitted = with_hiding_depths(changed[0], scenario)
        if fitted is not None:
            depths = [stage.in_flight for stage in fitted.stages]
            yield replace_pipelines(plan, group, [each.with_depths(depths) for each in changed])


def _in_all(plan: Plan, group: Sequence[int], changed: Pipeline) -> Plan:
    """Return the plan with each pipeline of a group replaced by a copy of ``changed`` on its own devices."""
    return replace_pipelines(plan, group, [on_devices(changed, places_of(plan.pipelines[index])) for index in group])


def _with_halved_stages(pipeline: Pipeline) -> Iterator[Pipeline]:
    """Yield the pipelines in which one stage, or each that can, becomes two with half of its layers and replicas."""
    halves = {at: pair for at, stage in enumerate(pipeline.stages) if (pair := _halves(stage)) is not None}
    for chosen in dict.fromkeys((tuple(halves), *((at,) for at in halves))):
        if chosen:
            parts = (halves[at] if at in chosen else (stage,) for at, stage in enumerate(pipeline.stages))
            yield replace(pipeline, stages=tuple(chain.from_iterable(parts)))


def _halves(stage: Stage) -> tuple[Stage, Stage] | None:
    """Return two stages with half of a stage's layers and replicas each; None if these are few or unlike."""
    replicas, layers = stage.replicas, stage.end_layer - stage.first_layer
    if len(replicas) % 2 or layers < 2 or len({replica.share for replica in replicas}) > 1:
        return None
    cut, middle = stage.first_layer + (layers + 1) // 2, len(replicas) // 2
    front = replace(stage, end_layer=cut, replicas=replicas[:middle])
    return front, replace(stage, first_layer=cut, replicas=replicas[middle:])


def _with_shifted_cut(pipeline: Pipeline) -> Iterator[Pipeline]:
    """Yield the pipelines in which one boundary between two stages is moved by one layer."""
    stages = pipeline.stages
    for cut in range(len(stages) - 1):
        left, right = stages[cut], stages[cut + 1]
        for place in (left.end_layer - 1, left.end_layer + 1):
            if left.first_layer < place < right.end_layer:
                pair = (replace(left, end_layer=place), replace(right, first_layer=place))
                yield replace(pipeline, stages=(*stages[:cut], *pair, *stages[cut + 2 :]))


def _with_common_cut_shifted(plan: Plan, scenario: Scenario, groups: Sequence[Sequence[int]]) -> Iterator[Plan]:
    """Yield the plans in which a boundary moves by a layer in all groups of pipelines that divide the layers alike."""
    alike: defaultdict[tuple[int, ...], list[Sequence[int]]] = defaultdict(list)
    for group in groups:
        alike[tuple(stage.end_layer for stage in plan.pipelines[group[0]].stages)].append(group)
    for own in (each for each in alike.values() if len(each) > 1):
        for shifted in zip(*(_with_shifted_cut(plan.pipelines[group[0]]) for group in own), strict=True):
            changed = plan
            for group, pipeline in zip(own, shifted, strict=True):
                fitted = with_hiding_depths(pipeline, scenario)
                if fitted is None:
                    break
                changed = _in_all(changed, group, fitted)
            else:
                yield changed


def _with_other_count(pipeline: Pipeline) -> Iterator[Pipeline]:
    """Yield the pipelines with one microbatch more or less, or with 1/2, 2, 3/4 or 4/3 times as many."""
    count, most = len(pipeline.microbatches), pipeline.samples
    for other in sorted({count - 1, count + 1, count // 2, count * 2, count * 3 // 4, count * 4 // 3} - {count}):
        if 1 <= other <= most:
            yield replace(pipeline, microbatches=even_cut(pipeline.samples, other))


def _with_other_recompute(pipeline: Pipeline) -> Iterator[Pipeline]:
    """Yield the pipelines in which one stage starts or stops to recompute activations."""
    for index, stage in enumerate(pipeline.stages):
        other = replace(stage, recompute=not stage.recompute)
        yield replace(pipeline, stages=(*pipeline.stages[:index], other, *pipeline.stages[index + 1 :]))


def _with_fewer_devices(pipeline: Pipeline) -> Iterator[Pipeline]:
    """Yield the pipelines without one stage, or without the first or the last replica of a stage.

    The layers of a stage that is left out go to the stage before or after it.
    """
    stages = pipeline.stages
    for at, gone in enumerate(stages):
        if at:
            taker = replace(stages[at - 1], end_layer=gone.end_layer)
            yield replace(pipeline, stages=(*stages[: at - 1], taker, *stages[at + 1 :]))
        if at + 1 < len(stages):
            taker = replace(stages[at + 1], first_layer=gone.first_layer)
            yield replace(pipeline, stages=(*stages[:at], taker, *stages[at + 2 :]))
    for at, stage in enumerate(stages):
        for replicas in dict.fromkeys((stage.replicas[1:], stage.replicas[:-1])):
            if sum(replica.share for replica in replicas) > 0:
                yield replace(pipeline, stages=(*stages[:at], replace(stage, replicas=replicas), *stages[at + 1 :]))


def _with_fewer_pipelines(plan: Plan, scenario: Scenario, gone: int) -> Iterator[Plan]:
    """Yield the plans without one pipeline, each with its samples given to another group of equivalent pipelines."""
    rest = replace(plan, pipelines=(*plan.pipelines[:gone], *plan.pipelines[gone + 1 :]))
    for taker in equivalent_pipelines(rest, scenario):
        samples = sum(rest.pipelines[index].samples for index in taker) + plan.pipelines[gone].samples
        changed = _with_samples(rest, scenario, taker, samples)
        if changed is not None:
            yield changed


def _with_moved_samples(plan: Plan, scenario: Scenario, giver: Sequence[int], taker: Sequence[int]) -> Iterator[Plan]:
    """Yield the plans in which one group of equivalent pipelines gives samples to another group.

    The number of samples is one, or a quarter of a microbatch or a whole microbatch of each giving pipeline.
    """
    samples = max(plan.pipelines[giver[0]].microbatches) * len(giver)
    for part in sorted({1, max(1, samples // 4), samples}):
        left = sum(plan.pipelines[index].samples for index in giver) - part
        right = sum(plan.pipelines[index].samples for index in taker) + part
        if left < len(giver):
            continue
        changed: Plan | None = plan
        for group, total in ((giver, left), (taker, right)):
            changed = _with_samples(changed, scenario, group, total) if changed is not None else None
        if changed is not None:
            yield changed


def _with_samples(plan: Plan, scenario: Scenario, group: Sequence[int], samples: int) -> Plan | None:
    """Return the plan in which a group's pipelines take ``samples`` in total; None if a pipeline does not fit."""
    shares = even_cut(samples, len(group))
    for share in set(shares):
        own = [index for index, part in zip(group, shares, strict=True) if part == share]
        first = plan.pipelines[own[0]]
        # Microbatches keep about their old size.
        count = max(1, round(share / max(first.microbatches)))
        fitted = with_hiding_depths(replace(first, microbatches=even_cut(share, min(count, share))), scenario)
        if fitted is None:
            return None
        plan = _in_all(plan, own, fitted)
    return plan


# Share by which a change must lower the score, so that rounding errors do not count as improvements.
LEAST_GAIN = 1e-4


def improve(plan: Plan, scenario: Scenario, score: Callable[[Plan], float], evaluations: int) -> tuple[Plan, float]:
    """Return a plan and its score after repeatedly taking the first neighbour with a lower score.

    Args:
        plan: Plan to start from.
        scenario: Scenario that the plan is for.
        score: Function from a plan to the quantity to minimise.
        evaluations: Most calls of ``score``.
    """
    best, best_score = plan, score(plan)
    left = evaluations - 1
    while left > 0:
        for other in islice(neighbours(best, scenario), left):
            other_score = score(other)
            left -= 1
            if other_score < best_score * (1 - LEAST_GAIN):
                best, best_score = other, other_score
                break
        else:
            break
    return best, best_score
