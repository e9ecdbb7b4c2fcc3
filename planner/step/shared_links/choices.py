"""The dynamic order in a step whose messages share links: actors choose among the actions whose inputs are there.

The rule is that of `planner.schedules.dynamic`, in compiled code. Gradient sums and parameter updates keep their order.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from planner.cost.stage import scheduling_problems
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.schedules.kernel.arrays import inner
from planner.schedules.kernel.problem import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from planner.step.compile import CompiledStep
from planner.step.graph import Flags, Floats, Ints
from planner.step.tables import SYNC

# Lanes of a slot: its forwards, its backwards (I or B), and its weight gradients, each by microbatch.
_FORWARDS, _GRADIENTS, _WEIGHTS = 0, 1, 2
_LANES = 3

_NONE = -1


class Choices(NamedTuple):
    """The actions that actors choose from, in steps in a row. A slot is a stage on an actor.

    Columns of shape [compiled] belong to the actions of `CompiledStep`, which each of the steps repeats.

    Attributes:
        actors: Actors that choose; empty if the plan's order is fixed.
        chosen: Whether an actor chooses the action, [actions].
        awaited: Whether an action that an actor chooses waits for the message, [messages].
        compiled: Action of the compiled step that each action repeats, [actions].
        step: Step of each action, [actions].
        number: Each compiled action in each step, [steps, compiled].
        kind: Constant of `planner.schedules.kernel.problem`, [compiled].
        stage: Index of the stage in its pipeline, [compiled].
        microbatch: Index of the microbatch, [compiled].
        slot: Slot of each action, [compiled].
        needs: Actions of the same actor that come before, -1 for none, [compiled, 2].
        count: Number of actions that each actor chooses from in a step, [actors].
        first_slot: First slot of each actor, whose stages rise; last the number of slots, [actors + 1].
        first_member: First entry of each lane in ``members``; last the number of entries, [slots * 3 + 1].
        members: Compiled actions, grouped by lane.
        in_flight: Limit on the microbatches between the start of F and the end of I or B, [slots].
        largest_bytes: Largest ``saved_bytes`` of any microbatch, [slots].
        saved_bytes: Bytes that the action's stage holds for its microbatch from F to the end of I or B, [compiled].
        weight_bytes: Bytes held from the end of I to the end of W, [compiled].
        recomputed_bytes: Bytes that its backward recomputes, [compiled].
        capacity_bytes: Memory for activations, [actors].
        reserve_bytes: Largest number of bytes that one backward recomputes, [actors].
    """

    actors: Ints
    chosen: Flags
    awaited: Flags
    compiled: Ints
    step: Ints
    number: Ints
    kind: Ints
    stage: Ints
    microbatch: Ints
    slot: Ints
    needs: Ints
    count: Ints
    first_slot: Ints
    first_member: Ints
    members: Ints
    in_flight: Ints
    largest_bytes: Floats
    saved_bytes: Floats
    weight_bytes: Floats
    recomputed_bytes: Floats
    capacity_bytes: Floats
    reserve_bytes: Floats


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


def choices_of(
    step: CompiledStep, plan: Plan, scenario: Scenario, compiled: Ints, message: Ints, number: Ints
) -> Choices:
    """Return the choices of a plan's actors in steps in a row; there are none if the plan's order is fixed.

    Args:
        step: One step of the plan.
        plan: Plan that passes `planner.check`.
        scenario: Scenario of the plan.
        compiled: Action of ``step`` that each action of the steps repeats, [actions].
        message: Message of ``step`` that each message of the steps repeats, [messages].
        number: Step of each action, [actions].
    """
    own, actors, count = step.actions, len(step.actors), len(step.actions.kind)
    is_chosen = (own.kind < SYNC) & (plan.order == "dynamic")
    actions = np.flatnonzero(is_chosen)
    kind, actor = own.kind.astype(np.int64), own.actor.astype(np.int64)
    lane = np.where(kind == FORWARD, _FORWARDS, np.where(kind == BACKWARD_WEIGHT, _WEIGHTS, _GRADIENTS))
    # Slots are sorted by actor, then by stage; there is a gap behind the last stage of each actor.
    stages = int(own.stage.max(initial=0)) + 2
    keys, slot_of_chosen = np.unique(actor[actions] * stages + own.stage[actions], return_inverse=True)
    slot = np.full(count, _NONE, np.int64)
    slot[actions] = slot_of_chosen
    members = actions[np.lexsort((own.microbatch[actions], lane[actions], slot[actions]))]
    sizes = np.bincount(slot[actions] * _LANES + lane[actions], minlength=len(keys) * _LANES)
    place = np.full((len(keys), _LANES, own.microbatch.max(initial=0) + 1), _NONE, np.int64)
    place[slot[actions], lane[actions], own.microbatch[actions]] = actions
    needs = np.full((count, 2), _NONE, np.int64)
    needs[actions, 0] = np.where(
        lane[actions] == _FORWARDS,
        _of_neighbour(keys, place, slot[actions], _FORWARDS, own.microbatch[actions], -1),
        place[slot[actions], np.maximum(lane[actions] - 1, 0), own.microbatch[actions]],
    )
    needs[actions, 1] = np.where(
        lane[actions] == _GRADIENTS,
        _of_neighbour(keys, place, slot[actions], _GRADIENTS, own.microbatch[actions], 1),
        _NONE,
    )
    numbers = np.empty((int(number.max(initial=0)) + 1, count), np.int64)
    numbers[number, compiled] = np.arange(len(compiled))
    of_action, of_slot, of_actor = _limits(step, plan, scenario, actions, slot, keys, stages)
    return Choices(
        np.unique(actor[actions]),
        is_chosen[compiled],
        is_chosen[step.messages.receiver][message],
        compiled,
        number,
        numbers,
        kind,
        own.stage.astype(np.int64),
        own.microbatch.astype(np.int64),
        slot,
        needs,
        np.bincount(actor[actions], minlength=actors),
        np.searchsorted(keys, np.arange(actors + 1) * stages),
        np.concatenate(([0], np.cumsum(sizes))).astype(np.int64),
        members,
        *of_slot,
        *of_action,
        *of_actor,
    )


def _of_neighbour(keys: Ints, place: Ints, slot: Ints, lane: int, microbatch: Ints, by: int) -> Ints:
    """Return the action of the same actor in the next or previous stage, -1 for none; arrays are [chosen actions]."""
    if not len(keys):
        return np.empty(0, np.int64)
    beside = np.clip(slot + by, 0, len(keys) - 1)
    is_neighbour = keys[beside] == keys[slot] + by
    found: Ints = np.where(is_neighbour, place[beside, lane, microbatch], _NONE)
    return found


def _limits(
    step: CompiledStep, plan: Plan, scenario: Scenario, actions: Ints, slot: Ints, keys: Ints, stages: int
) -> tuple[tuple[Floats, ...], tuple[Ints, Floats], tuple[Floats, Floats]]:
    """Return the last columns of `Choices`: of actions, of slots and of actors."""
    own = step.actions
    of_action = tuple(np.zeros(len(own.kind)) for _ in range(3))
    in_flight, largest_bytes = np.zeros(len(keys), np.int64), np.zeros(len(keys))
    capacity_bytes, reserve_bytes = np.zeros(len(step.actors)), np.zeros(len(step.actors))
    for index, problem in enumerate(scheduling_problems(plan, scenario) if len(actions) else ()):
        mine = actions[own.pipeline[actions] == index]
        for column, table in zip(
            of_action, (problem.activation_bytes, problem.weight_bytes, problem.recomputed_bytes), strict=True
        ):
            column[mine] = table[own.stage[mine], own.microbatch[mine]]
        in_flight[slot[mine]] = np.array(problem.in_flight)[own.stage[mine]]
        largest_bytes[slot[mine]] = problem.activation_bytes.max(axis=1)[own.stage[mine]]
        worker = np.array(problem.workers)[own.stage[mine]]
        capacity_bytes[own.actor[mine]] = problem.capacity_bytes[worker]
        reserve_bytes[own.actor[mine]] = problem.reserve_bytes[worker]
    return of_action, (in_flight, largest_bytes), (capacity_bytes, reserve_bytes)


@njit(cache=True)
def new_progress(choices: Choices) -> Progress:  # pragma: no cover
    """Return the progress before the first step."""
    slots, actors = len(choices.in_flight), len(choices.count)
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
        for lane in range(slot * _LANES, (slot + 1) * _LANES):
            progress.first[lane] = choices.first_member[lane]
        progress.live[slot] = progress.pending[slot] = 0
        progress.held_bytes[slot] = 0.0
    progress.left[actor] = choices.count[actor]
    progress.choose_s[actor] = now_s


@inner
def choose(
    choices: Choices,
    progress: Progress,
    first_received: Ints,
    received: Ints,
    arrival_s: Floats,
    actor: int,
    step: int,
    now_s: float,
) -> int:  # pragma: no cover
    """Return the action of the current step that an actor begins now; -1 if there is none.

    Then ``choose_s`` becomes the time of the next arrival that is known.
    """
    gradient, forward, weight, later_s = _NONE, _NONE, _NONE, np.inf
    number = choices.number[step]
    for slot in range(choices.first_slot[actor], choices.first_slot[actor + 1]):
        if progress.pending[slot]:
            lane = slot * _LANES + _WEIGHTS
            for entry in range(_first(choices, progress, number, lane), choices.first_member[lane + 1]):
                action = choices.members[entry]
                if not progress.begun[number[action]] and _follows(choices, progress, number, action):
                    weight = _better(choices, action, weight)
                    break
        lane, seen = slot * _LANES + _GRADIENTS, 0
        for entry in range(_first(choices, progress, number, lane), choices.first_member[lane + 1]):
            if seen == progress.live[slot]:
                break
            action = choices.members[entry]
            if progress.begun[number[action]] or not progress.begun[number[choices.needs[action, 0]]]:
                continue
            seen += 1
            there_s = _there_s(choices, progress, number, first_received, received, arrival_s, action)
            if there_s <= now_s:
                gradient = _better(choices, action, gradient)
                break
            later_s = min(later_s, there_s)
        lane, earlier, earlier_bytes = slot * _LANES + _FORWARDS, 0, 0.0
        for entry in range(_first(choices, progress, number, lane), choices.first_member[lane + 1]):
            if progress.live[slot] + earlier >= choices.in_flight[slot]:
                break
            action = choices.members[entry]
            if progress.begun[number[action]]:
                continue
            if _fits(choices, progress, actor, slot, action, earlier_bytes):
                there_s = _there_s(choices, progress, number, first_received, received, arrival_s, action)
                if there_s <= now_s:
                    forward = _better(choices, action, forward)
                    break
                later_s = min(later_s, there_s)
            earlier += 1
            earlier_bytes += choices.saved_bytes[action]
    if gradient != _NONE and weight != _NONE and not _has_room(choices, progress, actor, gradient):
        return int(number[weight])
    for action in (gradient, forward, weight):
        if action != _NONE:
            return int(number[action])
    progress.choose_s[actor] = later_s
    return _NONE


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
        if before != _NONE and not progress.begun[number[before]]:
            return False
    return True


@inner
def _there_s(
    choices: Choices,
    progress: Progress,
    number: Ints,
    first_received: Ints,
    received: Ints,
    arrival_s: Floats,
    action: int,
) -> float:
    """Return when all inputs of an action are there, seconds; infinite if that is not known."""
    if not _follows(choices, progress, number, action):
        return np.inf
    there_s, own = 0.0, number[action]
    for place in range(first_received[own], first_received[own + 1]):
        each_s = arrival_s[received[place]]
        if np.isnan(each_s):
            return np.inf
        there_s = max(there_s, each_s)
    return there_s


@inner
def _better(choices: Choices, action: int, other: int) -> int:
    """Return the action of the lower microbatch or, of the same, of the later stage."""
    if other == _NONE:
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
