"""Goes on without workers whose devices are away, and takes them back: the part of policies that all outer steps need.

Workers that take outer steps train separately, so that the others can go on with the batch of all. Each takes a share
of the samples in proportion to that in the first plan, in microbatches that are not larger than there. A replica that
is away leaves its stage to the other ones; without its first replica, which exchanges the layers, a worker waits.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from planner.adapt.observation import Observation
from planner.adapt.worker_moves import devices_of
from planner.check import check_plan
from planner.plan.plan import Pipeline, Plan, Stage
from planner.scenario.scenario import Scenario
from traces.common.errors import InputError


class PresentWorkers:
    """Chooses the workers of a plan with outer steps by which devices are there; each run needs an object of its own.

    The first plan that it is shown has all workers.
    """

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._whole: Plan | None = None

    def decide(self, observation: Observation, plan: Plan) -> Plan | None:
        """Return the plan with the workers that are there; None if it has these, or if they cannot go on."""
        whole = self._whole = self._whole or plan
        away = {*observation.gone, *observation.away}
        if not observation.gone and observation.plan.devices != plan.devices:
            # The plan is about to change.
            return None
        there = [(number, left) for number, each in enumerate(whole.pipelines) if (left := _without(each, away))]
        if not there or [devices_of(each) for _, each in there] == [devices_of(each) for each in plan.pipelines]:
            return None
        if len(there) == len(whole.pipelines) and plan.global_batch == whole.global_batch:
            pipelines = tuple(each for _, each in there)
        else:
            shares = shared_out(plan.global_batch, [whole.pipelines[number].samples for number, _ in there])
            pipelines = tuple(_with_samples(each, count) for (_, each), count in zip(there, shares, strict=True))
        proposed = replace(plan, pipelines=pipelines)
        try:
            check_plan(proposed, self._scenario)
        except InputError:
            # Too few samples for each worker or replica, or too many for its memory.
            return None
        return proposed


def shared_out(samples: int, weights: Sequence[int]) -> list[int]:
    """Return whole numbers of samples in proportion to weights, by largest remainders.

    >>> shared_out(8, [2, 1])
    [5, 3]
    """
    exact = [samples * weight / sum(weights) for weight in weights]
    shares = [int(each) for each in exact]
    by_remainder = sorted(range(len(exact)), key=lambda number: shares[number] - exact[number])
    for number in by_remainder[: samples - sum(shares)]:
        shares[number] += 1
    return shares


def _without(pipeline: Pipeline, away: Collection[str]) -> Pipeline | None:
    """Return a pipeline without the replicas that are away; None if a first replica is."""
    stages: list[Stage] = []
    for stage in pipeline.stages:
        if not {*stage.replicas[0].devices}.isdisjoint(away):
            return None
        left = tuple(replica for replica in stage.replicas if {*replica.devices}.isdisjoint(away))
        stages.append(replace(stage, replicas=left))
    return replace(pipeline, stages=tuple(stages))


def _with_samples(pipeline: Pipeline, samples: int) -> Pipeline:
    """Return a pipeline with so many samples, in as many microbatches as before, or more so that none is larger."""
    most, before = max(pipeline.microbatches), len(pipeline.microbatches)
    count = max(min(before, samples), -(-samples // most))
    return replace(pipeline, microbatches=tuple(shared_out(samples, [1] * count)))
