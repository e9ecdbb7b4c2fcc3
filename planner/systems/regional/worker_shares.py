"""Which workers of a plan with outer steps train, with how many samples: the part of policies that all of these need.

Workers train separately between exchanges, so that those that are there can go on with the batch of all. A replica that
is away leaves its stage to the other ones; without its first replica, which exchanges the layers, a worker is left out
until it is back.

All wait for the slowest worker when they exchange. Samples are shared out in proportion to those of the first plan and
to the measured speeds: a worker is as slow as its slowest device. As the weights of the mean are samples, the change of
a share is a barrier between the workers; it is made if it has saved enough for some steps in a row.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from planner.adapt.observation import Observation
from planner.adapt.worker_moves import devices_of, keeps_workers
from planner.check import check_plan
from planner.plan.plan import Pipeline, Plan, Stage
from planner.scenario.scenario import Scenario
from planner.step.evaluate import step_time_s
from traces.common.errors import InputError

# Share of a step that other shares of the samples must save, and in how many steps in a row: twice as many after each
# change, up to a limit, so that changes which the next ones undo become rare.
LEAST_SAVED, HELD_STEPS, MOST_HELD_STEPS = 0.1, 5, 80


class WorkerShares:
    """Chooses workers and their samples; each run needs an object of its own.

    The plan with which the run began has all workers.
    """

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._whole: Plan | None = None
        self._held, self._least_held = 0, HELD_STEPS

    def decide(
        self,
        observation: Observation,
        plan: Plan,
        slowdown: Mapping[str, float],
        left_out: frozenset[str] = frozenset(),
    ) -> Plan | None:
        """Return the plan with the workers that take part and their samples; None if it stays.

        Args:
            observation: What was measured in a step.
            plan: The plan of the last decision.
            slowdown: The factor on a device's profiled compute times, by device.
            left_out: Devices of workers that do not take part, unless nobody else is there.
        """
        self._whole = self._whole or observation.first_plan or plan
        away = observation.missing
        if not observation.gone and observation.plan.pipelines != plan.pipelines:
            # The plan is about to change.
            return None
        proposed = self.without(plan, away | left_out, slowdown)
        if proposed is None and left_out:
            proposed = self.without(plan, away, slowdown)
        if proposed is not None and not all(keeps_workers(each, proposed) for each in (observation.plan, plan)):
            # Nobody is there who could give the present parameters.
            proposed = None
        if proposed is None or proposed.pipelines == plan.pipelines:
            self._held = 0
            return None
        if proposed.devices != plan.devices:
            return proposed
        before_s, after_s = (step_time_s(each, self._scenario, slowdown=slowdown) for each in (plan, proposed))
        self._held = self._held + 1 if after_s <= (1 - LEAST_SAVED) * before_s else 0
        if self._held < self._least_held:
            return None
        self._held, self._least_held = 0, min(2 * self._least_held, MOST_HELD_STEPS)
        return proposed

    def without(self, plan: Plan, away: Collection[str], slowdown: Mapping[str, float]) -> Plan | None:
        """Return a plan with all workers but those on some devices; None if there is none, or if they cannot go on.

        ``slowdown`` is the factor on a device's profiled compute times, by device.
        """
        whole = self._whole or plan
        there = [left for each in whole.pipelines if (left := _without(each, away))]
        if not there:
            return None
        weights = [each.samples / max(slowdown.get(name, 1.0) for name in devices_of(each)) for each in there]
        shares = shared_out(plan.global_batch, weights)
        pipelines = tuple(_with_samples(each, count) for each, count in zip(there, shares, strict=True))
        proposed = replace(plan, pipelines=pipelines)
        try:
            check_plan(proposed, self._scenario)
        except InputError:
            # Too few samples for each worker or replica, or too many for its memory.
            return None
        return proposed


def shared_out(samples: int, weights: Sequence[float]) -> list[int]:
    """Return whole numbers of samples in proportion to weights, by largest remainders, but one at least.

    >>> shared_out(8, [2, 1])
    [5, 3]
    """
    exact = [samples * weight / sum(weights) for weight in weights]
    shares = [int(each) for each in exact]
    by_remainder = sorted(range(len(exact)), key=lambda number: shares[number] - exact[number])
    for number in by_remainder[: samples - sum(shares)]:
        shares[number] += 1
    for number in range(len(shares)):
        if not shares[number] and max(shares) > 1:
            shares[shares.index(max(shares))] -= 1
            shares[number] = 1
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
    if samples == pipeline.samples:
        return pipeline
    most, before = max(pipeline.microbatches), len(pipeline.microbatches)
    count = max(min(before, samples), -(-samples // most))
    return replace(pipeline, microbatches=tuple(shared_out(samples, [1] * count)))
