"""When the sums of gradients may begin that overlap with backward.

A bucket's gradients are complete in the last backward of its stage (the last weight gradient, where backward is split),
when that has come down to the bucket's first layer: backward goes from the last layer to the first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.cost.allreduce import GradientSync, holders
from planner.cost.stage import replica_times
from planner.plan.plan import Plan, Replica, Stage
from planner.scenario.faults import Absence
from planner.scenario.scenario import Scenario
from planner.schedules.kernel.orders import BACKWARD, BACKWARD_WEIGHT
from planner.step.tables import Actions

# Where a device has no samples of a stage, its sums need not wait for any of its actions.
AT_ONCE = -1


@dataclass(frozen=True, slots=True)
class BucketReady:
    """A device's part of a sum whose gradients are complete.

    Attributes:
        actor: Whose.
        sync: Which of the plan's sums.
        action: During which of the actor's actions, or `AT_ONCE`.
        after_s: How long after that action's beginning, by its profile, seconds.
    """

    actor: int
    sync: int
    action: int
    after_s: float


def releases(
    syncs: Sequence[GradientSync], actions: Actions, actors: Sequence[str], plan: Plan, scenario: Scenario
) -> list[BucketReady]:
    """Return when each actor's sums may begin, actor by actor, in the order of the sums.

    Args:
        syncs: The plan's sums.
        actions: Of the step without overlap.
        actors: Devices, in the order in which the actions count them.
        plan: What is carried out.
        scenario: What it is for.
    """
    number = {name: actor for actor, name in enumerate(actors)}
    # Of those the whole action counts, since all of it is lost when they leave.
    leaving = {fault.device for fault in scenario.faults if isinstance(fault, Absence)}
    last = _last_backwards(actions)
    found = []
    for sync, each in enumerate(syncs):
        for pipeline, index, stage, replica in holders(plan.pipelines, each.first_layer):
            actor = number[replica.device]
            action = last.get((actor, pipeline, index), AT_ONCE)
            if action == AT_ONCE:
                after_s = 0.0
            elif replica.device in leaving:
                after_s = float(actions.duration_s[action])
            else:
                after_s = _after_s(each, stage, replica, action, actions, scenario)
            found.append(BucketReady(actor, sync, action, after_s))
    return sorted(found, key=lambda release: (release.actor, release.sync))


def _last_backwards(actions: Actions) -> Mapping[tuple[int, int, int], int]:
    """The last action of each actor and stage that adds to gradients, by actor, pipeline and stage."""
    backward = np.flatnonzero((actions.kind == BACKWARD) | (actions.kind == BACKWARD_WEIGHT))
    columns = (actions.actor[backward], actions.pipeline[backward], actions.stage[backward])
    places = zip(*(column.tolist() for column in columns), strict=True)
    return dict(zip(places, backward.tolist(), strict=True))


def _after_s(
    sync: GradientSync, stage: Stage, replica: Replica, action: int, actions: Actions, scenario: Scenario
) -> float:
    duration_s = float(actions.duration_s[action])
    if sync.first_layer == stage.first_layer:
        return duration_s
    # What is recomputed comes before all of backward.
    below = replace(stage, end_layer=sync.first_layer, recompute=False)
    samples = int(actions.end_sample[action] - actions.first_sample[action])
    times = replica_times(scenario, below, replica, samples)
    rest_s = times.backward_s if actions.kind[action] == BACKWARD else times.backward_weight_s
    return max(0.0, duration_s - rest_s)
