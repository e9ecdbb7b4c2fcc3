"""Sums of gradients as actions that take no time themselves, and the messages between them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

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


@dataclass(frozen=True, slots=True)
class SyncSpan:
    """One actor's part in one sum of gradients: consecutive actions.

    Attributes:
        sync: What is summed.
        actor: Who.
        first_action: The first of its actions.
        end_action: After the last one.
        sent_bytes: What it sends in all of them.
    """

    sync: GradientSync
    actor: int
    first_action: int
    end_action: int
    sent_bytes: int

    def moved(self, numbers: Ints) -> "SyncSpan":
        """Return the span under the new numbers of the actions."""
        first = int(numbers[self.first_action])
        return replace(self, first_action=first, end_action=first + self.end_action - self.first_action)


def sync_actions(
    syncs: Sequence[GradientSync], actors: Mapping[str, int], element_bytes: int
) -> tuple[Actions, Messages, list[SyncSpan]]:
    """Return the actions and messages of all sums, actor by actor; ``actors`` says which one sums for a device.

    An exchange hands its part over at once and then waits, so what it waits for is received by the action after it;
    an actor has one action more than exchanges.
    """
    of_device: dict[str, list[GradientSync]] = {device: [] for device in actors}
    for sync in syncs:
        for device in sync.devices:
            of_device[device].append(sync)
    acting: list[int] = []
    sent: list[tuple[int, tuple[int, int, int, int], int]] = []
    waiting: dict[tuple[int, int, int, int], int] = {}
    spans = []
    for device, actor in actors.items():
        for sync in of_device[device]:
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
    return no_actions(acting), _messages(sent, waiting), spans


def no_actions(acting: list[int]) -> Actions:
    """Return an action for each of these actors that takes no time."""
    count = len(acting)
    nothing = np.full(count, -1, np.int64)
    none = np.zeros(count, np.int64)
    return Actions(
        np.array(acting, np.int64), np.full(count, SYNC, np.int8), none, nothing, nothing, none, none, np.zeros(count)
    )


def _messages(
    sent: list[tuple[int, tuple[int, int, int, int], int]], waiting: dict[tuple[int, int, int, int], int]
) -> Messages:
    sender = np.array([action for action, _, _ in sent], np.int64)
    receiver = np.array([waiting[key] for _, key, _ in sent], np.int64)
    size_bytes = np.array([size for _, _, size in sent], np.int64)
    none = np.zeros(len(sent), np.int64)
    return Messages(sender, receiver, size_bytes, none, none)


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


class Cut(NamedTuple):
    """Actions cut into pieces.

    Attributes:
        actions: The pieces.
        first_piece: Of each action, and the number of pieces, [actions before + 1].
    """

    actions: Actions
    first_piece: Ints


def cut(actions: Actions, released: Sequence[BucketReady]) -> Cut:
    """Return the actions in pieces: one that ends with each release, and one for the rest."""
    pieces = np.ones(len(actions.actor), np.int64)
    cuts = {}
    for action, group in groupby(sorted(released, key=lambda each: (each.action, each.sync)), lambda each: each.action):
        if action != AT_ONCE:
            cuts[action] = [0.0, *(each.after_s for each in group), float(actions.duration_s[action])]
            pieces[action] = len(cuts[action]) - 1
    first_piece = starts(pieces.tolist())
    parts = Actions._make(np.repeat(column, pieces) for column in actions)
    for action, times_s in cuts.items():
        parts.duration_s[first_piece[action] : first_piece[action + 1]] = np.diff(times_s)
    return Cut(parts, first_piece)


def lanes_of(released: Sequence[BucketReady], actors: int) -> dict[int, int]:
    """Return the lane of each actor that has one: their numbers follow those of the actors."""
    return {actor: actors + lane for lane, actor in enumerate(dict.fromkeys(each.actor for each in released))}


def lane_actions(
    syncs: Sequence[GradientSync],
    released: Sequence[BucketReady],
    lanes: Mapping[int, int],
    actors: Sequence[str],
    pieces: Cut,
    element_bytes: int,
) -> tuple[Actions, Messages, list[SyncSpan]]:
    """Return the sums as actions of lanes, and what devices and lanes tell each other.

    Messages count the pieces first, then these actions.
    """
    shift = len(pieces.actions.actor)
    sums, exchanged, spans = sync_actions(syncs, {actors[actor]: lane for actor, lane in lanes.items()}, element_bytes)
    told = []
    ends: dict[int, int] = {}
    next_piece = pieces.first_piece.copy()
    # Both go from actor to actor, and each actor's from sum to sum.
    for each, span in zip(released, spans, strict=True):
        ends[each.actor] = shift + span.end_action - 1
        if each.action != AT_ONCE:
            told.append((int(next_piece[each.action]), shift + span.first_action))
            next_piece[each.action] += 1
    # Where a device waits for its lane, with nothing to do.
    closing = no_actions(list(lanes))
    told += [(ends[actor], shift + len(sums.actor) + number) for number, actor in enumerate(lanes)]
    return join_actions(sums, closing), _joined_messages(exchanged, shift, told), spans


def _joined_messages(exchanged: Messages, shift: int, told: Sequence[tuple[int, int]]) -> Messages:
    sender, receiver = np.array(told, np.int64).reshape(-1, 2).T
    none = np.zeros(len(told), np.int64)
    news = Messages(sender, receiver, none, none, none)
    return Messages._make(np.concatenate(pair) for pair in zip(news, exchanged.later(shift), strict=True))
