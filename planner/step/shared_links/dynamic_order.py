"""The dynamic order in a step whose messages share links: the rule of `planner.schedules.dynamic`, in compiled code.

An actor chooses when it becomes free and, if it can do nothing then, when the next input arrives.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from planner.schedules.dynamic import SAME_MOMENT_S
from planner.schedules.kernel.arrays import inner
from planner.schedules.kernel.problem import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from planner.step.graph import Flags, Floats, Ints, StepGraph
from planner.step.shared_links.choices import FORWARDS, GRADIENTS, LANES, NO_ACTION, WEIGHTS, Choices


class Progress(NamedTuple):
    """What actors have chosen so far.

    Attributes:
        begun: Whether each action has begun, [actions].
        first: First entry of each lane that may not have begun in the actor's current step, [slots * 3].
        live: Microbatches between the start of F and the end of I or B, [slots].
        pending: Weight gradients that wait behind their I, [slots].
        held_bytes: Bytes that each slot holds, [slots].
        left: Number of actions that each actor still chooses from in its current step, [actors].
        choose_s: Time at which each actor chooses next, seconds, infinite if nothing is known to come, [actors].
    """

    begun: Flags
    first: Ints
    live: Ints
    pending: Ints
    held_bytes: Floats
    left: Ints
    choose_s: Floats


@njit(cache=True)
def new_progress(choices: Choices) -> Progress:  # pragma: no cover
    """Return the progress before the first step."""
    slots, actors = len(choices.in_flight), len(choices.choosable)
    return Progress(
        np.zeros(len(choices.chosen), np.bool_),
        np.zeros(len(choices.first_member) - 1, np.int64),
        np.zeros(slots, np.int64),
        np.zeros(slots, np.int64),
        np.zeros(slots),
        np.zeros(actors, np.int64),
        np.full(actors, np.inf),
    )


@inner
def begin_choices(choices: Choices, progress: Progress, actor: int, now_s: float) -> None:  # pragma: no cover
    """Let an actor choose among the actions of its next step from ``now_s`` on."""
    for slot in range(choices.first_slot[actor], choices.first_slot[actor + 1]):
        for lane in range(slot * LANES, (slot + 1) * LANES):
            progress.first[lane] = choices.first_member[lane]
        progress.live[slot] = progress.pending[slot] = 0
        progress.held_bytes[slot] = 0.0
    progress.left[actor] = choices.choosable[actor]
    progress.choose_s[actor] = now_s


@inner
def choose(
    choices: Choices, progress: Progress, graph: StepGraph, arrival_s: Floats, actor: int, step: int, now_s: float
) -> int:  # pragma: no cover
    """Return the action of the current step that an actor begins now; -1 if there is none.

    Then ``choose_s`` becomes the time of the next arrival that is known.
    """
    gradient, forward, weight, later_s = NO_ACTION, NO_ACTION, NO_ACTION, np.inf
    number = choices.number[step]
    for slot in range(choices.first_slot[actor], choices.first_slot[actor + 1]):
        if progress.pending[slot]:
            lane = slot * LANES + WEIGHTS
            for entry in range(_first(choices, progress, number, lane), choices.first_member[lane + 1]):
                action = choices.members[entry]
                if not progress.begun[number[action]] and _follows(choices, progress, number, action):
                    weight = _better(choices, action, weight)
                    break
        lane, seen = slot * LANES + GRADIENTS, 0
        for entry in range(_first(choices, progress, number, lane), choices.first_member[lane + 1]):
            if seen == progress.live[slot]:
                break
            action = choices.members[entry]
            if progress.begun[number[action]] or not progress.begun[number[choices.needs[action, 0]]]:
                continue
            seen += 1
            there_s = _there_s(choices, progress, number, graph, arrival_s, action)
            if there_s <= now_s + SAME_MOMENT_S:
                gradient = _better(choices, action, gradient)
                break
            later_s = min(later_s, there_s)
        lane, earlier, earlier_bytes = slot * LANES + FORWARDS, 0, 0.0
        for entry in range(_first(choices, progress, number, lane), choices.first_member[lane + 1]):
            if progress.live[slot] + earlier >= choices.in_flight[slot]:
                break
            action = choices.members[entry]
            if progress.begun[number[action]]:
                continue
            if _fits(choices, progress, actor, slot, action, earlier_bytes):
                there_s = _there_s(choices, progress, number, graph, arrival_s, action)
                if there_s <= now_s + SAME_MOMENT_S:
                    forward = _better(choices, action, forward)
                    break
                later_s = min(later_s, there_s)
            earlier += 1
            earlier_bytes += choices.saved_bytes[action]
    if gradient != NO_ACTION and weight != NO_ACTION and not _has_room(choices, progress, actor, gradient):
        return int(number[weight])
    for action in (gradient, forward, weight):
        if action != NO_ACTION:
            return int(number[action])
    progress.choose_s[actor] = later_s
    return NO_ACTION


@inner
def record_choice(choices: Choices, progress: Progress, actor: int, action: int) -> None:  # pragma: no cover
    """Record that an actor begins an action; it chooses again when the action ends."""
    progress.begun[action] = True
    progress.left[actor] -= 1
    own = choices.compiled[action]
    slot, kind = choices.slot[own], choices.kind[own]
    if kind == FORWARD:
        progress.live[slot] += 1
        progress.held_bytes[slot] += choices.saved_bytes[own]
    elif kind == BACKWARD_WEIGHT:
        progress.pending[slot] -= 1
        progress.held_bytes[slot] -= choices.weight_bytes[own]
    else:
        progress.live[slot] -= 1
        staying_bytes = 0.0
        if kind == BACKWARD_INPUT:
            progress.pending[slot] += 1
            staying_bytes = choices.weight_bytes[own]
        progress.held_bytes[slot] -= choices.saved_bytes[own] - staying_bytes


@inner
def _first(choices: Choices, progress: Progress, number: Ints, lane: int) -> int:
    """Return the first entry of a lane that has not begun, and keep it."""
    entry = progress.first[lane]
    while entry < choices.first_member[lane + 1] and progress.begun[number[choices.members[entry]]]:
        entry += 1
    progress.first[lane] = entry
    return int(entry)


@inner
def _follows(choices: Choices, progress: Progress, number: Ints, action: int) -> bool:
    """Return whether the actor's own actions that come before an action have begun, and so ended."""
    for place in range(2):
        before = choices.needs[action, place]
        if before != NO_ACTION and not progress.begun[number[before]]:
            return False
    return True


@inner
def _there_s(
    choices: Choices, progress: Progress, number: Ints, graph: StepGraph, arrival_s: Floats, action: int
) -> float:
    """Return when all inputs of an action are there, seconds; infinite if that is not known."""
    if not _follows(choices, progress, number, action):
        return np.inf
    there_s, own = 0.0, number[action]
    for place in range(graph.first_received[own], graph.first_received[own + 1]):
        each_s = arrival_s[graph.received[place]]
        if np.isnan(each_s):
            return np.inf
        there_s = max(there_s, each_s)
    return there_s


@inner
def _better(choices: Choices, action: int, other: int) -> int:
    """Return the action of the lower microbatch or, of the same, of the later stage."""
    if other == NO_ACTION:
        return action
    one, two = choices.microbatch[action], choices.microbatch[other]
    return action if one < two or (one == two and choices.stage[action] > choices.stage[other]) else other


@inner
def _fits(choices: Choices, progress: Progress, actor: int, slot: int, action: int, earlier_bytes: float) -> bool:
    """Return whether an F fits into memory beside what `planner.schedules.dynamic` keeps free."""
    room_bytes = choices.capacity_bytes[actor] - choices.reserve_bytes[actor]
    for other in range(choices.first_slot[actor], choices.first_slot[actor + 1]):
        largest_bytes = choices.largest_bytes[other] if other > slot else 0.0
        room_bytes -= max(progress.held_bytes[other], largest_bytes)
    return bool(choices.saved_bytes[action] <= room_bytes - earlier_bytes)


@inner
def _has_room(choices: Choices, progress: Progress, actor: int, action: int) -> bool:
    """Return whether the activations that an I recomputes fit into memory."""
    if not choices.reserve_bytes[actor]:
        return True
    held_bytes = 0.0
    for slot in range(choices.first_slot[actor], choices.first_slot[actor + 1]):
        held_bytes += progress.held_bytes[slot]
    return bool(choices.recomputed_bytes[action] <= choices.capacity_bytes[actor] - held_bytes)
