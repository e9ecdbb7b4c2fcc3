"""The local search: from a plan to better ones by small changes, until none helps or the budget is spent."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from planner.plan.microbatches import even_cut
from planner.plan.plan import (
    Pipeline,
    Plan,
    equivalent_pipelines,
    replace_pipelines,
)
from planner.scenario.scenario import Scenario
from planner.systems.auto.candidates.build import on_devices, places_of, with_hiding_depths
from planner.systems.auto.device_moves import FEW_DEVICES, device_moves, stage_moves


def neighbours(plan: Plan, scenario: Scenario) -> Iterator[Plan]:
    """Give the plans that differ in one cut, microbatch count, recomputing stage, share of the batch or device.

    Equivalent pipelines change together. In small clusters single devices and samples move as well, and stages are
    split and merged.
    """
    groups = equivalent_pipelines(plan, scenario)
    for group in groups:
        first = plan.pipelines[group[0]]
        for changed in (*_with_shifted_cut(first), *_with_other_count(first), *_with_other_recompute(first)):
            fitted = with_hiding_depths(changed, scenario)
            if fitted is not None:
                yield _in_all(plan, group, fitted)
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


def _in_all(plan: Plan, group: Sequence[int], changed: Pipeline) -> Plan:
    """Return the plan in which all pipelines of a group are like ``changed``, each on its own devices."""
    return replace_pipelines(plan, group, [on_devices(changed, places_of(plan.pipelines[index])) for index in group])


def _with_shifted_cut(pipeline: Pipeline) -> Iterator[Pipeline]:
    """Return the pipelines with one layer more or less before one cut."""
    stages = pipeline.stages
    for cut in range(len(stages) - 1):
        left, right = stages[cut], stages[cut + 1]
        for place in (left.end_layer - 1, left.end_layer + 1):
            if left.first_layer < place < right.end_layer:
                pair = (replace(left, end_layer=place), replace(right, first_layer=place))
                yield replace(pipeline, stages=(*stages[:cut], *pair, *stages[cut + 2 :]))


def _with_other_count(pipeline: Pipeline) -> Iterator[Pipeline]:
    """Return the pipelines with another number of microbatches."""
    count, most = len(pipeline.microbatches), pipeline.samples
    for other in sorted({count - 1, count + 1, count // 2, count * 2, count * 3 // 4, count * 4 // 3} - {count}):
        if 1 <= other <= most:
            yield replace(pipeline, microbatches=even_cut(pipeline.samples, other))


def _with_other_recompute(pipeline: Pipeline) -> Iterator[Pipeline]:
    """Return the pipelines in which one stage recomputes, or no longer does."""
    for index, stage in enumerate(pipeline.stages):
        other = replace(stage, recompute=not stage.recompute)
        yield replace(pipeline, stages=(*pipeline.stages[:index], other, *pipeline.stages[index + 1 :]))


def _with_moved_samples(plan: Plan, scenario: Scenario, giver: Sequence[int], taker: Sequence[int]) -> Iterator[Plan]:
    """Return the plans in which a microbatch of each pipeline of one group, or part of it, goes to another group."""
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
    """Return the plan with so many samples for all pipelines of a group together; None if they do not fit."""
    shares = even_cut(samples, len(group))
    for share in set(shares):
        own = [index for index, part in zip(group, shares, strict=True) if part == share]
        fitted = with_hiding_depths(_resized(plan.pipelines[own[0]], share), scenario)
        if fitted is None:
            return None
        plan = _in_all(plan, own, fitted)
    return plan


def _resized(pipeline: Pipeline, samples: int) -> Pipeline:
    """Return the pipeline with another number of samples in microbatches of about the same size."""
    count = max(1, round(samples / max(pipeline.microbatches)))
    return replace(pipeline, microbatches=even_cut(samples, min(count, samples)))


# Least share that a change must gain, so that the search does not wander on rounding errors.
LEAST_GAIN = 1e-4


def improve(plan: Plan, scenario: Scenario, score: Callable[[Plan], float], evaluations: int) -> tuple[Plan, float]:
    """Return the best plan that is found, and its score.

    Args:
        plan: Plan to start from.
        scenario: Scenario that the plan is for.
        score: Function that returns the quantity to minimise.
        evaluations: Most calls of ``score``.
    """
    best, best_score = plan, score(plan)
    left, improved = evaluations - 1, True
    while improved and left > 0:
        improved = False
        for other in neighbours(best, scenario):
            other_score = score(other)
            left -= 1
            if other_score < best_score * (1 - LEAST_GAIN):
                best, best_score, improved = other, other_score, True
                break
            if left <= 0:
                break
    return best, best_score
