"""Changes of devices, samples and stages that the local search tries in small clusters, where every device may differ.

The changed plans keep their old depths (microbatches in flight); the caller fits them into memory.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, permutations, product

from planner.plan.microbatches import even_cut
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.scenario.cluster import Device

# Most devices of a plan for which changes of single devices are tried; larger plans have many interchangeable devices.
FEW_DEVICES = 8


def device_moves(plan: Plan) -> Iterator[Plan]:
    """Yield plans in which stages, devices or replicas change places, or a sample moves from one replica to another.

    For plans of more than `FEW_DEVICES` devices, nothing is yielded.
    """
    if len(plan.devices) > FEW_DEVICES:
        return
    for number, pipeline in enumerate(plan.pipelines):
        for changed in (
            *_with_turned_stages(pipeline),
            *_with_swapped_stages(pipeline),
            *_with_swapped_replicas(pipeline),
            *_with_moved_sample(pipeline),
        ):
            yield replace(plan, pipelines=(*plan.pipelines[:number], changed, *plan.pipelines[number + 1 :]))
    yield from _with_moved_devices(plan)


def _with_turned_stages(pipeline: Pipeline) -> Iterator[Pipeline]:
    """Yield pipelines whose replicas go from one end to the other, or stand in reverse order.

    Stages between the ends keep their neighbours, which swaps of two stages would part.
    """
    stages = pipeline.stages
    if len(stages) < 3:
        return
    for order in (range(1, len(stages) + 1), range(-1, len(stages) - 1), range(len(stages) - 1, -1, -1)):
        replicas = (stages[at % len(stages)].replicas for at in order)
        turned = (replace(stage, replicas=own) for stage, own in zip(stages, replicas, strict=True))
        yield replace(pipeline, stages=tuple(turned))


def _with_swapped_stages(pipeline: Pipeline) -> Iterator[Pipeline]:
    """Yield pipelines in which two stages exchange all their replicas, and neighbours also their numbers of layers."""
    for one, other in combinations(range(len(pipeline.stages)), 2):
        stages = list(pipeline.stages)
        left, right = stages[one], stages[other]
        stages[one] = replace(left, replicas=right.replicas)
        stages[other] = replace(right, replicas=left.replicas)
        yield replace(pipeline, stages=tuple(stages))
        cut = left.first_layer + right.end_layer - right.first_layer
        if other == one + 1 and cut != left.end_layer:
            stages[one] = replace(stages[one], end_layer=cut)
            stages[other] = replace(stages[other], first_layer=cut)
            yield replace(pipeline, stages=tuple(stages))


def _with_swapped_replicas(pipeline: Pipeline) -> Iterator[Pipeline]:
    """Yield pipelines in which two of at least three replicas of a stage change places, in the ring of their sums."""
    for at, stage in enumerate(pipeline.stages):
        for one, other in combinations(range(len(stage.replicas)), 2) if len(stage.replicas) > 2 else ():
            replicas = list(stage.replicas)
            replicas[one], replicas[other] = replicas[other], replicas[one]
            changed = replace(stage, replicas=tuple(replicas))
            yield replace(pipeline, stages=(*pipeline.stages[:at], changed, *pipeline.stages[at + 1 :]))


def _with_moved_sample(pipeline: Pipeline) -> Iterator[Pipeline]:
    """Yield pipelines in which one sample of the largest microbatch moves to another replica of the same stage."""
    for index, stage in enumerate(pipeline.stages):
        given = [end - first for first, end in stage.intervals(max(pipeline.microbatches))]
        for giver, taker in permutations(range(len(given)), 2):
            if given[giver]:
                shares = [share + (at == taker) - (at == giver) for at, share in enumerate(given)]
                replicas = tuple(
                    replace(replica, share=float(share))
                    for replica, share in zip(stage.replicas, shares, strict=True)
                    if share
                )
                changed = replace(stage, replicas=replicas)
                yield replace(pipeline, stages=(*pipeline.stages[:index], changed, *pipeline.stages[index + 1 :]))


def _with_moved_devices(plan: Plan) -> Iterator[Plan]:
    """Yield plans in which two replicas of different stages change places, or a replica moves to another stage."""
    places = [(number, at) for number, pipeline in enumerate(plan.pipelines) for at in range(len(pipeline.stages))]
    for one, other in permutations(places, 2):
        ours, theirs = (plan.pipelines[number].stages[at].replicas for number, at in (one, other))
        for index, replica in enumerate(ours):
            left = (*ours[:index], *ours[index + 1 :])
            if sum(each.share for each in left) > 0:
                share = sum(each.share for each in theirs) / len(theirs)
                yield _with_replicas(plan, {one: left, other: (*theirs, replace(replica, share=share))})
            # Swaps of two stages of one pipeline with a single replica each come from `_with_swapped_stages`.
            if one < other and (one[0] != other[0] or len(ours) + len(theirs) > 2):
                for there, taken in enumerate(theirs):
                    swapped = {
                        one: (*ours[:index], replace(taken, share=replica.share), *ours[index + 1 :]),
                        other: (*theirs[:there], replace(replica, share=taken.share), *theirs[there + 1 :]),
                    }
                    yield _with_replicas(plan, swapped)


def _with_replicas(plan: Plan, replicas: Mapping[tuple[int, int], tuple[Replica, ...]]) -> Plan:
    """Return the plan with other replicas in the stages that are keys, (index of the pipeline, index of the stage)."""
    pipelines = [
        replace(
            pipeline,
            stages=tuple(
                replace(stage, replicas=replicas.get((number, at), stage.replicas))
                for at, stage in enumerate(pipeline.stages)
            ),
        )
        for number, pipeline in enumerate(plan.pipelines)
    ]
    return replace(plan, pipelines=tuple(pipelines))


def stage_moves(plan: Plan, devices: Sequence[Device]) -> Iterator[Plan]:
    """Yield plans in which one stage is split, two are merged, or an unused device becomes a replica or a stage.

    Args:
        plan: Plan to change.
        devices: All devices of the cluster.
    """
    idle = [device.name for device in devices if device.name not in plan.devices]
    for number, pipeline in enumerate(plan.pipelines):
        split_or_merged = (*_split(pipeline.stages), *_merged(pipeline.stages))
        for stages in (*split_or_merged, *_joined(pipeline, idle), *_inserted(pipeline.stages, idle)):
            for sizes in _microbatches(pipeline, len(stages)):
                changed = Pipeline(stages, sizes)
                yield replace(plan, pipelines=(*plan.pipelines[:number], changed, *plan.pipelines[number + 1 :]))


def _split(stages: Sequence[Stage]) -> Iterator[tuple[Stage, ...]]:
    """Yield the stages with the layers and replicas of one stage divided in two; one part has a single replica."""
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
    """Yield the stages with two consecutive ones merged into one with the replicas of both."""
    for at in range(len(stages) - 1):
        one, other = stages[at], stages[at + 1]
        if one.replicas[0].tensor_parallel == other.replicas[0].tensor_parallel:
            whole = replace(one, end_layer=other.end_layer, replicas=(*one.replicas, *other.replicas))
            yield (*stages[:at], whole, *stages[at + 2 :])


def _joined(pipeline: Pipeline, idle: Sequence[str]) -> Iterator[tuple[Stage, ...]]:
    """Yield the stages with an unused device as a new replica, which takes one sample or as many as other replicas."""
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


def _inserted(stages: Sequence[Stage], idle: Sequence[str]) -> Iterator[tuple[Stage, ...]]:
    """Yield the stages with an unused device as a new stage, which takes one layer or half of a stage's, at an end."""
    for at, stage in enumerate(stages):
        layers = stage.end_layer - stage.first_layer
        for name, taken in product(idle, sorted({1, layers // 2} - {0, layers})):
            first, last = stage.first_layer + taken, stage.end_layer - taken
            front = (Stage(stage.first_layer, first, (Replica(name),), 1), replace(stage, first_layer=first))
            back = (replace(stage, end_layer=last), Stage(last, stage.end_layer, (Replica(name),), 1))
            yield (*stages[:at], *front, *stages[at + 1 :])
            yield (*stages[:at], *back, *stages[at + 1 :])


def _microbatches(pipeline: Pipeline, stages: int) -> list[tuple[int, ...]]:
    """Return the microbatch sizes to try: the old ones and, for another number of stages, smaller and larger ones."""
    count, most = len(pipeline.microbatches), pipeline.samples
    if stages == len(pipeline.stages):
        return [pipeline.microbatches]
    counts = sorted({count, min(most, 2 * count), -(-count // 2)})
    return [even_cut(most, each) for each in counts]
