"""Moves of single devices: of few, each of which may be unlike the others."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations, permutations

from planner.plan.plan import Pipeline, Plan, Replica

# Of more devices there are too many pairs; they are in pools, within which they are alike.
FEW_DEVICES = 8


def device_moves(plan: Plan) -> Iterator[Plan]:
    """Give the plans in which stages or devices change places, or samples go from one replica to another.

    The depths stay as they are; who takes such a plan fits them. None where there are many devices.
    """
    if len(plan.devices) > FEW_DEVICES:
        return
    for number, pipeline in enumerate(plan.pipelines):
        for changed in (*_swapped(pipeline), *_weighed(pipeline)):
            yield replace(plan, pipelines=(*plan.pipelines[:number], changed, *plan.pipelines[number + 1 :]))
    yield from _moved(plan)


def _swapped(pipeline: Pipeline) -> Iterator[Pipeline]:
    """The replicas of two stages change places."""
    for one, other in combinations(range(len(pipeline.stages)), 2):
        stages = list(pipeline.stages)
        stages[one] = replace(pipeline.stages[one], replicas=pipeline.stages[other].replicas)
        stages[other] = replace(pipeline.stages[other], replicas=pipeline.stages[one].replicas)
        yield replace(pipeline, stages=tuple(stages))


def _weighed(pipeline: Pipeline) -> Iterator[Pipeline]:
    """A sample of the largest microbatch goes from one replica of a stage to another; all of them leave none behind."""
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


def _moved(plan: Plan) -> Iterator[Plan]:
    """Two devices of different stages change places, or one goes to another stage, as a replica like those there."""
    places = [(number, at) for number, pipeline in enumerate(plan.pipelines) for at in range(len(pipeline.stages))]
    for one, other in permutations(places, 2):
        ours, theirs = (plan.pipelines[number].stages[at].replicas for number, at in (one, other))
        for index, replica in enumerate(ours):
            left = (*ours[:index], *ours[index + 1 :])
            if sum(each.share for each in left) > 0:
                share = sum(each.share for each in theirs) / len(theirs)
                yield _with_replicas(plan, {one: left, other: (*theirs, replace(replica, share=share))})
            # Stages of one device each are changed as a whole elsewhere, but for those of different pipelines.
            if one < other and (one[0] != other[0] or len(ours) + len(theirs) > 2):
                for there, taken in enumerate(theirs):
                    here = replace(taken, share=replica.share), replace(replica, share=taken.share)
                    yield _with_replicas(
                        plan,
                        {
                            one: (*ours[:index], here[0], *ours[index + 1 :]),
                            other: (*theirs[:there], here[1], *theirs[there + 1 :]),
                        },
                    )


def _with_replicas(plan: Plan, replicas: Mapping[tuple[int, int], tuple[Replica, ...]]) -> Plan:
    """The plan with other devices in some stages, which are given by pipeline and stage."""
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
