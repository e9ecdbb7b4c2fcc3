"""A step whose sums of gradients overlap with backward, for those who time it.

Actions in which sums begin are cut where they do, and each device that takes part in sums has a second actor, its lane,
which carries them out. Messages of no bytes say when a lane may begin a sum, and when it has done all of them.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from planner.cost.allreduce import GradientSync
from planner.step.graph import Ints
from planner.step.plan_workers import starts
from planner.step.releases import AT_ONCE, BucketReady
from planner.step.sync import SyncSpan, no_actions, sync_actions
from planner.step.tables import Actions, Messages, join_actions


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
    return join_actions(sums, closing), _messages(exchanged, shift, told), spans


def _messages(exchanged: Messages, shift: int, told: Sequence[tuple[int, int]]) -> Messages:
    sender, receiver = np.array(told, np.int64).reshape(-1, 2).T
    none = np.zeros(len(told), np.int64)
    news = Messages(sender, receiver, none, none, none)
    return Messages._make(np.concatenate(pair) for pair in zip(news, exchanged.later(shift), strict=True))
