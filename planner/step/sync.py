"""Sums of gradients as actions that take no time themselves, and messages between them.

Where sums overlap with backward, each action during which a bucket of gradients becomes ready is split there into
segments, and each device that takes part in sums has a second actor, its communication stream, which exchanges the
buckets. Messages of no bytes tell a stream that it may begin a sum, and its device that all sums are done.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from planner.cost.stage import replica_times
from planner.cost.synchronisation import GradientSync, holders
from planner.plan.plan import Plan, Replica, Stage
from planner.scenario.faults import Absence
from planner.scenario.scenario import Scenario
from planner.schedules.kernel.problem import BACKWARD, BACKWARD_WEIGHT
from planner.step.build import starts
from planner.step.graph import Ints
from planner.step.tables import SYNC, Actions, Messages, join_actions

# The action of a bucket on a device that has no samples of the stage: its sum need not wait.
AT_ONCE = -1


@dataclass(frozen=True, slots=True)
class SyncSpan:
    """One actor's part in one sum of gradients: consecutive actions.

    Attributes:
        sync: Sum that the actions belong to.
        actor: Index of the actor.
        first_action: Index of the first action.
        end_action: Index after the last action.
        sent_bytes: Bytes that the actor sends in all of them.
    """

    sync: GradientSync
    actor: int
    first_action: int
    end_action: int
    sent_bytes: int

    def moved(self, numbers: Ints) -> "SyncSpan":
        """Return the span with the new numbers of its actions."""
        first = int(numbers[self.first_action])
        return replace(self, first_action=first, end_action=first + self.end_action - self.first_action)


def sync_actions(
    syncs: Sequence[GradientSync], actors: Mapping[str, int], element_bytes: int
) -> tuple[Actions, Messages, list[SyncSpan]]:
    """Return the actions and messages of all sums, actor by actor.

    An exchange sends at once and then waits, so that what it waits for is received by the action after it: an actor has
    one action more than exchanges.

    Args:
        syncs: Sums of the plan.
        actors: Actor that takes part in sums for each device, by the device's name.
        element_bytes: Bytes of one gradient.
    """
    acting: list[int] = []
    sent: list[tuple[int, tuple[int, int, int, int], int]] = []
    waiting: dict[tuple[int, int, int, int], int] = {}
    spans = []
    for device, actor in actors.items():
        for sync in (each for each in syncs if device in each.devices):
            exchanges = sync.exchanges(device)
            first = len(acting)
            for action, exchange in enumerate(exchanges, start=first):
                if exchange.send_to is not None:
                    key = (sync.first_layer, exchange.round, actor, actors[sync.devices[exchange.send_to]])
                    sent.append((action, key, exchange.send_elements * element_bytes))
                if exchange.receive_from is not None:
                    source = actors[sync.devices[exchange.receive_from]]
                    waiting[sync.first_layer, exchange.round, source, actor] = action + 1
            acting += [actor] * (len(exchanges) + 1)
            sent_bytes = sum(exchange.send_elements for exchange in exchanges) * element_bytes
            spans.append(SyncSpan(sync, actor, first, len(acting), sent_bytes))
    return _waiting_actions(acting), _messages([(action, waiting[key], size) for action, key, size in sent]), spans


def _waiting_actions(acting: Sequence[int]) -> Actions:
    """One action that takes no time for each of these actors."""
    count = len(acting)
    none, zero = np.full(count, -1, np.int64), np.zeros(count, np.int64)
    kind = np.full(count, SYNC, np.int8)
    return Actions(np.array(acting, np.int64), kind, zero, none, none, zero, zero, np.zeros(count))


def _messages(sent: Sequence[tuple[int, int, int]]) -> Messages:
    """Messages from triples of sender, receiver and bytes."""
    sender, receiver, size_bytes = np.array(sent, np.int64).reshape(-1, 3).T
    zero = np.zeros(len(sent), np.int64)
    return Messages(sender, receiver, size_bytes, zero, zero)


@dataclass(frozen=True, slots=True)
class BucketReady:
    """When a device's gradients of a sum are complete.

    Attributes:
        actor: Index of the device's actor.
        sync: Index of the sum in the plan's sums.
        action: Index of the action during which they become complete, or `AT_ONCE`.
        after_s: Time from the start of that action until then, by its profile, seconds.
    """

    actor: int
    sync: int
    action: int
    after_s: float


def ready_buckets(
    syncs: Sequence[GradientSync], actions: Actions, actors: Sequence[str], plan: Plan, scenario: Scenario
) -> list[BucketReady]:
    """Return when each actor's sums may begin, actor by actor, in the order of the sums.

    Args:
        syncs: Sums of the plan.
        actions: Actions of the step without overlap.
        actors: Names of the actors' devices.
        plan: Plan that the step carries out.
        scenario: Gives times and faults.
    """
    number = {name: actor for actor, name in enumerate(actors)}
    # On devices that leave, a bucket is ready at the end of its action: all of an interrupted action is lost.
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
    return sorted(found, key=lambda bucket: (bucket.actor, bucket.sync))


def _last_backwards(actions: Actions) -> Mapping[tuple[int, int, int], int]:
    """Return the last action that adds to gradients, by actor, pipeline and stage."""
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
    samples = int(actions.stop_sample[action] - actions.start_sample[action])
    times = replica_times(scenario, below, replica, samples)
    rest_s = times.backward_s if actions.kind[action] == BACKWARD else times.backward_weight_s
    return max(0.0, duration_s - rest_s)


def split_actions(actions: Actions, buckets: Sequence[BucketReady]) -> tuple[Actions, Ints]:
    """Split actions into segments: one that ends with each bucket that becomes ready, and one for the rest.

    Returns:
        The segments, and the first segment of each action with the number of segments at the end, [actions + 1].
    """
    counts = np.ones(len(actions.actor), np.int64)
    cuts_s = {}
    ordered = sorted(buckets, key=lambda each: (each.action, each.sync))
    for action, group in groupby(ordered, lambda each: each.action):
        if action != AT_ONCE:
            cuts_s[action] = [0.0, *(each.after_s for each in group), float(actions.duration_s[action])]
            counts[action] = len(cuts_s[action]) - 1
    first_segment = starts(counts.tolist())
    segments = Actions._make(np.repeat(column, counts) for column in actions)
    for action, times_s in cuts_s.items():
        segments.duration_s[first_segment[action] : first_segment[action + 1]] = np.diff(times_s)
    return segments, first_segment


def communication_streams(buckets: Sequence[BucketReady], actors: int) -> dict[int, int]:
    """Return the communication stream of each actor that has one; the streams' numbers follow those of the actors."""
    return {actor: actors + stream for stream, actor in enumerate(dict.fromkeys(each.actor for each in buckets))}


def stream_actions(
    syncs: Sequence[GradientSync],
    buckets: Sequence[BucketReady],
    streams: Mapping[int, int],
    actors: Sequence[str],
    first_segment: Ints,
    element_bytes: int,
) -> tuple[Actions, Messages, list[SyncSpan]]:
    """Return the sums as actions of communication streams, and the messages between devices and their streams.

    In the messages these actions are numbered after the segments.

    Args:
        syncs: Sums of the plan.
        buckets: When each device's gradients are complete, from `ready_buckets`.
        streams: Communication stream of each actor, from `communication_streams`.
        actors: Names of the actors' devices.
        first_segment: First segment of each action, from `split_actions`.
        element_bytes: Bytes of one gradient.
    """
    shift = int(first_segment[-1])
    of_device = {actors[actor]: stream for actor, stream in streams.items()}
    sums, exchanged, spans = sync_actions(syncs, of_device, element_bytes)
    signals: list[tuple[int, int, int]] = []
    ends: dict[int, int] = {}
    next_segment = first_segment.copy()
    # Both are sorted by actor, and then by sum.
    for bucket, span in zip(buckets, spans, strict=True):
        ends[bucket.actor] = shift + span.end_action - 1
        if bucket.action != AT_ONCE:
            signals.append((int(next_segment[bucket.action]), shift + span.first_action, 0))
            next_segment[bucket.action] += 1
    # A last action on each device waits for its stream.
    signals += [(ends[actor], shift + len(sums.actor) + number, 0) for number, actor in enumerate(streams)]
    pairs = zip(_messages(signals), exchanged.later(shift), strict=True)
    messages = Messages._make(np.concatenate(pair) for pair in pairs)
    return join_actions(sums, _waiting_actions(list(streams))), messages, spans
