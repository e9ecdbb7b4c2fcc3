"""Sums of gradients (all-reduces) as actions of duration zero and messages between them.

If sums overlap with backward, an action is split into segments at each moment at which a bucket of gradients becomes
complete. Each device that takes part in sums has a second actor, its communication stream, which exchanges the buckets.
Messages of 0 bytes start the stream when a bucket is complete, and let the device continue when all sums are done.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from planner.cost.stage import replica_times
from planner.cost.synchronisation import GradientSync, holders
from planner.plan.plan import Plan, Replica, Stage
from planner.scenario.faults import Absence, Hang
from planner.scenario.scenario import Scenario
from planner.schedules.kernel.problem import BACKWARD, BACKWARD_WEIGHT
from planner.step.build import starts
from planner.step.graph import Ints
from planner.step.tables import SYNC, Actions, Messages, join_actions

# Stands for the action of a bucket on a device that takes no samples of the stage, where the sum can begin at once.
AT_ONCE = -1


@dataclass(frozen=True, slots=True)
class SyncSpan:
    """Actions ``first_action`` to ``end_action - 1`` of one actor, which exchange the gradients of one sum.

    ``sent_bytes`` is the sum of the bytes that these actions send.
    """

    sync: GradientSync
    actor: int
    first_action: int
    end_action: int
    sent_bytes: int

    def moved(self, numbers: Ints) -> "SyncSpan":
        """Return the span after its action n has got the number ``numbers[n]``."""
        first = int(numbers[self.first_action])
        end = first + self.end_action - self.first_action
        return SyncSpan(self.sync, self.actor, first, end, self.sent_bytes)


def sync_actions(syncs: Sequence[GradientSync], actors: Mapping[str, int]) -> tuple[Actions, Messages, list[SyncSpan]]:
    """Return the actions and messages of all sums, actor by actor.

    Action i of an actor sends the message of exchange i, and waits for the message that exchange i - 1 receives.
    Therefore an actor has one action more than exchanges. ``actors`` gives the index of the actor that exchanges
    gradients for a device, by device name.
    """
    acting: list[int] = []
    sent: list[tuple[int, tuple[int, int, int, int], int, int]] = []
    waiting: dict[tuple[int, int, int, int], int] = {}
    spans = []
    for device, actor in actors.items():
        for sync in (each for each in syncs if device in each.devices):
            exchanges = sync.exchanges(device)
            first, sent_bytes = len(acting), 0
            for action, exchange in enumerate(exchanges, start=first):
                if exchange.send_to is not None:
                    key = (sync.key, exchange.round, actor, actors[sync.devices[exchange.send_to]])
                    sent.append((action, key, size_bytes := sync.sent_bytes(exchange), sync.shards))
                    sent_bytes += size_bytes
                if exchange.receive_from is not None:
                    source = actors[sync.devices[exchange.receive_from]]
                    waiting[sync.key, exchange.round, source, actor] = action + 1
            acting += [actor] * (len(exchanges) + 1)
            spans.append(SyncSpan(sync, actor, first, len(acting), sent_bytes))
    return _waiting_actions(acting), _messages([(action, waiting[key], *size) for action, key, *size in sent]), spans


def _waiting_actions(acting: Sequence[int]) -> Actions:
    """Return one action of duration zero for each of these actors."""
    count = len(acting)
    none, zero = np.full(count, -1, np.int64), np.zeros(count, np.int64)
    kind = np.full(count, SYNC, np.int8)
    return Actions(np.array(acting, np.int64), kind, zero, none, none, zero, zero, np.zeros(count))


def _messages(sent: Sequence[tuple[int, ...]]) -> Messages:
    """Return messages from (sending action, receiving action, bytes, flows)."""
    sender, receiver, size_bytes, flows = np.array(sent, np.int64).reshape(-1, 4).T
    zero = np.zeros(len(sent), np.int64)
    return Messages(sender, receiver, size_bytes, flows, zero, zero, zero.astype(np.float64), zero.astype(np.float64))


@dataclass(frozen=True, slots=True)
class BucketReady:
    """The moment at which a device's gradients of one sum are complete.

    Attributes:
        sync: Index of the sum among the plan's sums.
        action: Index of the action during which the gradients become complete, or `AT_ONCE`.
        after_s: Profiled seconds from the start of that action to the moment.
    """

    actor: int
    sync: int
    action: int
    after_s: float


def ready_buckets(
    syncs: Sequence[GradientSync], actions: Actions, actors: Sequence[str], plan: Plan, scenario: Scenario
) -> list[BucketReady]:
    """Return the moments at which sums may begin on each actor, sorted by actor and sum.

    ``actions`` are those of the step without overlap; ``actors`` are the names of the actors' devices.
    """
    number = {name: actor for actor, name in enumerate(actors)}
    # On a device that leaves, a bucket is ready only at the end of its action, since an interrupted action is repeated.
    # A process that hangs may be ended, and its action repeated too.
    leaving = {fault.device for fault in scenario.faults if isinstance(fault, Absence | Hang)}
    last = _last_backwards(actions)
    found: list[BucketReady] = []
    for sync, each in enumerate(syncs):
        ready: dict[int, BucketReady] = {}
        for layer in scenario.model.tied_layers if each.tied else (each.first_layer,):
            for pipeline, index, stage, replica in holders(plan.pipelines, layer):
                actor = number[replica.device]
                action = last.get((actor, pipeline, index), AT_ONCE)
                if action == AT_ONCE:
                    after_s = 0.0
                elif replica.device in leaving or each.tied:
                    after_s = float(actions.duration_s[action])
                else:
                    after_s = _after_s(each, stage, replica, action, actions, scenario)
                bucket = BucketReady(actor, sync, action, after_s)
                # A device's copies of tied parameters are complete when the last of them is.
                ready[actor] = max(ready.get(actor, bucket), bucket, key=lambda moment: moment.action)
        found += ready.values()
    return sorted(found, key=lambda bucket: (bucket.actor, bucket.sync))


def _last_backwards(actions: Actions) -> Mapping[tuple[int, int, int], int]:
    """Return the last action that adds to weight gradients, for each (actor, pipeline, stage)."""
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
    # Recomputation happens at the start of the backward, before the bucket is ready.
    below = replace(stage, end_layer=sync.first_layer, recompute=False)
    samples = int(actions.stop_sample[action] - actions.start_sample[action])
    times = replica_times(scenario, below, replica, samples)
    rest_s = times.backward_s if actions.kind[action] == BACKWARD else times.backward_weight_s
    return max(0.0, duration_s - rest_s)


def split_actions(actions: Actions, buckets: Sequence[BucketReady]) -> tuple[Actions, Ints]:
    """Split actions into segments: one that ends when each bucket becomes ready, and one for the remaining time.

    Returns:
        The segments; and the first segment of each action, last the number of segments, [actions + 1].
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
    """Return the index of each actor's communication stream, by actor index; streams are numbered after the actors."""
    return {actor: actors + stream for stream, actor in enumerate(dict.fromkeys(each.actor for each in buckets))}


def stream_actions(
    syncs: Sequence[GradientSync],
    buckets: Sequence[BucketReady],
    streams: Mapping[int, int],
    actors: Sequence[str],
    first_segment: Ints,
) -> tuple[Actions, Messages, list[SyncSpan]]:
    """Return the sums as actions of communication streams, and the messages between devices and their streams.

    Messages refer to these actions by indices that follow the indices of the segments. The arguments ``buckets``,
    ``streams`` and ``first_segment`` are the results of `ready_buckets`, `communication_streams` and `split_actions`.
    """
    shift = int(first_segment[-1])
    of_device = {actors[actor]: stream for actor, stream in streams.items()}
    sums, exchanged, spans = sync_actions(syncs, of_device)
    signals: list[tuple[int, ...]] = []
    ends: dict[int, int] = {}
    next_segment = first_segment.copy()
    # Buckets and spans are both sorted by actor and sum.
    for bucket, span in zip(buckets, spans, strict=True):
        ends[bucket.actor] = shift + span.end_action - 1
        if bucket.action != AT_ONCE:
            signals.append((int(next_segment[bucket.action]), shift + span.first_action, 0, 1))
            next_segment[bucket.action] += 1
    # A last action on each device waits for its stream.
    signals += [(ends[actor], shift + len(sums.actor) + number, 0, 1) for number, actor in enumerate(streams)]
    pairs = zip(_messages(signals), exchanged.later(shift), strict=True)
    messages = Messages._make(np.concatenate(pair) for pair in pairs)
    return join_actions(sums, _waiting_actions(list(streams))), messages, spans
