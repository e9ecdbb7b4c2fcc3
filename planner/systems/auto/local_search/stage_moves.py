"""Moves that change how many stages a pipeline has, or how many devices: for few devices, which may all be unlike."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from planner.plan.microbatches import even_cut
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.scenario.cluster import Device


def stage_moves(plan: Plan, devices: Sequence[Device]) -> Iterator[Plan]:
    """Give the plans in which a stage is split in two, two become one, or a device that has no part takes one.

    The depths stay as they are; who takes such a plan fits them.

    Args:
        plan: To change.
        devices: That may be used.
    """
    idle = [device.name for device in devices if device.name not in plan.devices]
    for number, pipeline in enumerate(plan.pipelines):
        for stages in (*_split(pipeline.stages), *_merged(pipeline.stages), *_joined(pipeline, idle)):
            for sizes in _cuts(pipeline, len(stages)):
                changed = Pipeline(stages, sizes)
                yield replace(plan, pipelines=(*plan.pipelines[:number], changed, *plan.pipelines[number + 1 :]))


def _split(stages: Sequence[Stage]) -> Iterator[tuple[Stage, ...]]:
    """One replica of a stage takes its first or its last layers for itself."""
    for at, stage in enumerate(stages):
        if len(stage.replicas) < 2:
            continue
        for index, replica in enumerate(stage.replicas):
            others = (*stage.replicas[:index], *stage.replicas[index + 1 :])
            if not sum(each.share for each in others):
                continue
            for cut in range(stage.first_layer + 1, stage.end_layer):
                for front, back in (((replica,), others), (others, (replica,))):
                    pair = (
                        replace(stage, end_layer=cut, replicas=front),
                        replace(stage, first_layer=cut, replicas=back),
                    )
                    yield (*stages[:at], *pair, *stages[at + 1 :])


def _merged(stages: Sequence[Stage]) -> Iterator[tuple[Stage, ...]]:
    """Two stages that follow each other share their layers and their work."""
    for at in range(len(stages) - 1):
        one, other = stages[at], stages[at + 1]
        if one.replicas[0].tensor_parallel == other.replicas[0].tensor_parallel:
            whole = replace(one, end_layer=other.end_layer, replicas=(*one.replicas, *other.replicas))
            yield (*stages[:at], whole, *stages[at + 2 :])


def _joined(pipeline: Pipeline, idle: Sequence[str]) -> Iterator[tuple[Stage, ...]]:
    """A device becomes a replica, with one sample of the largest microbatch or a part like the others'."""
    largest = max(pipeline.microbatches)
    for at, stage in enumerate(pipeline.stages):
        given = [float(end - first) for first, end in stage.intervals(largest)]
        if any(replica.partners for replica in stage.replicas):
            continue
        for name in idle:
            for share in sorted({1.0, sum(given) / len(given)}):
                left = list(given)
                left[left.index(max(left))] -= share
                kept = [
                    replace(replica, share=part) for replica, part in zip(stage.replicas, left, strict=True) if part > 0
                ]
                joined = replace(stage, replicas=(*kept, Replica(name, share)))
                yield (*pipeline.stages[:at], joined, *pipeline.stages[at + 1 :])


def _cuts(pipeline: Pipeline, stages: int) -> list[tuple[int, ...]]:
    """Microbatches as before, and where the number of stages changes other numbers of them."""
    count, most = len(pipeline.microbatches), pipeline.samples
    if stages == len(pipeline.stages):
        return [pipeline.microbatches]
    counts = sorted({count, min(most, 2 * count), -(-count // 2)})
    return [even_cut(most, each) for each in counts]
