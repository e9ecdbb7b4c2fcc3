"""What actors choose from in a step with the dynamic order, in arrays, for `planner.step.shared_links.dynamic_order`.

Gradient sums and parameter updates keep their order.
"""

from typing import NamedTuple

import numpy as np

from planner.cost.stage import scheduling_problems
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.schedules.kernel.problem import BACKWARD_WEIGHT, FORWARD
from planner.step.build import starts
from planner.step.compile import CompiledStep
from planner.step.graph import Flags, Floats, Ints
from planner.step.tables import SYNC

# Lanes of a slot: its forwards, its backwards (I or B), and its weight gradients, each by microbatch.
FORWARDS, GRADIENTS, WEIGHTS = 0, 1, 2
LANES = 3

NO_ACTION = -1


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
        choosable: Number of actions that each actor chooses from in a step, [actors].
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
    choosable: Ints
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
    every, actors = step.actions, len(step.actors)
    is_chosen = (every.kind < SYNC) & (plan.order == "dynamic")
    # Here and below, columns of the actions that are chosen.
    own = np.flatnonzero(is_chosen)
    kind, actor, stage, microbatch = every.kind[own], every.actor[own], every.stage[own], every.microbatch[own]
    lane = np.where(kind == FORWARD, FORWARDS, np.where(kind == BACKWARD_WEIGHT, WEIGHTS, GRADIENTS))
    # Slots are sorted by actor, then by stage; there is a gap behind the last stage of each actor.
    stride = int(stage.max(initial=0)) + 2
    keys, slot = np.unique(actor * stride + stage, return_inverse=True)
    slot = slot.astype(np.int64)
    members = own[np.lexsort((microbatch, lane, slot))]
    sizes = np.bincount(slot * LANES + lane, minlength=len(keys) * LANES)
    numbers = np.empty((int(number.max(initial=0)) + 1, len(every.kind)), np.int64)
    numbers[number, compiled] = np.arange(len(compiled))
    slots = np.full(len(every.kind), NO_ACTION, np.int64)
    slots[own] = slot
    needs = np.full((len(every.kind), 2), NO_ACTION, np.int64)
    needs[own] = _needs(own, keys, slot, lane, microbatch)
    return Choices(
        np.unique(actor).astype(np.int64),
        is_chosen[compiled],
        is_chosen[step.messages.receiver][message],
        compiled,
        number,
        numbers,
        every.kind.astype(np.int64),
        every.stage.astype(np.int64),
        every.microbatch.astype(np.int64),
        slots,
        needs,
        np.bincount(actor, minlength=actors),
        np.searchsorted(keys, np.arange(actors + 1) * stride),
        starts(sizes.tolist()),
        members,
        *_limits(step, plan, scenario, own, slot, len(keys)),
    )


def no_choices(actors: int, actions: int, messages: int) -> Choices:
    """Return the choices of actors that run their actions in the graph's order, in one step."""
    none, numbers, no_bytes = np.zeros(actions, np.int64), np.empty(0, np.int64), np.empty(0)
    of_actors = np.zeros(actors)
    return Choices(
        numbers,
        np.zeros(actions, np.bool_),
        np.zeros(messages, np.bool_),
        none,
        none,
        none.reshape(1, -1),
        none,
        none,
        none,
        none,
        np.full((actions, 2), NO_ACTION, np.int64),
        np.zeros(actors, np.int64),
        np.zeros(actors + 1, np.int64),
        np.zeros(1, np.int64),
        numbers,
        numbers,
        no_bytes,
        of_actors,
        of_actors,
        of_actors,
        of_actors,
        of_actors,
    )


def _needs(own: Ints, keys: Ints, slot: Ints, lane: Ints, microbatch: Ints) -> Ints:
    """Return the actions of the same actor that come before each chosen action, [chosen actions, 2].

    A backward needs its own forward and, like a forward, the output of the neighbouring stage on the same actor; a
    weight gradient needs its own input gradient.
    """
    place = np.full((len(keys), LANES, int(microbatch.max(initial=0)) + 1), NO_ACTION, np.int64)
    place[slot, lane, microbatch] = own
    needs = np.full((len(own), 2), NO_ACTION, np.int64)
    for at, (each, by) in enumerate(((FORWARDS, -1), (GRADIENTS, 1))):
        beside = np.clip(slot + by, 0, len(keys) - 1)
        is_needed = (lane == each) & (keys[beside] == keys[slot] + by)
        needs[is_needed, at] = place[beside, each, microbatch][is_needed]
    later = lane != FORWARDS
    needs[later, 0] = place[slot, lane - 1, microbatch][later]
    return needs


def _limits(
    step: CompiledStep, plan: Plan, scenario: Scenario, own: Ints, slot: Ints, slots: int
) -> tuple[Ints, Floats, Floats, Floats, Floats, Floats, Floats]:
    """Return the columns of `Choices` from ``in_flight`` on."""
    every = step.actions
    in_flight, largest_bytes = np.zeros(slots, np.int64), np.zeros(slots)
    saved_bytes, weight_bytes, recomputed_bytes = (np.zeros(len(every.kind)) for _ in range(3))
    capacity_bytes, reserve_bytes = np.zeros(len(step.actors)), np.zeros(len(step.actors))
    for index, problem in enumerate(scheduling_problems(plan, scenario) if len(own) else ()):
        mine = every.pipeline[own] == index
        actions, stage = own[mine], every.stage[own[mine]]
        cell = stage, every.microbatch[actions]
        saved_bytes[actions] = problem.activation_bytes[cell]
        weight_bytes[actions] = problem.weight_bytes[cell]
        recomputed_bytes[actions] = problem.recomputed_bytes[cell]
        in_flight[slot[mine]] = np.array(problem.in_flight)[stage]
        largest_bytes[slot[mine]] = problem.activation_bytes.max(axis=1)[stage]
        worker = np.array(problem.workers)[stage]
        capacity_bytes[every.actor[actions]] = problem.capacity_bytes[worker]
        reserve_bytes[every.actor[actions]] = problem.reserve_bytes[worker]
    return in_flight, largest_bytes, saved_bytes, weight_bytes, recomputed_bytes, capacity_bytes, reserve_bytes
