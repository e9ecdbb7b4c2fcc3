"""List scheduling: simulate the workers, and let rules choose among the ready actions whenever a worker is free.

Actions are F (forward), B (backward), I (input gradient) and W (weight gradient). Times follow
`planner.schedules.kernel.problem.SchedulingProblem`, so that the makespan is exact. The rules for a worker may depend
on the transfers that are on their way to it, but not on what other workers will start.

The orders cannot deadlock: an F starts only if every later stage of its worker still has room for one microbatch, and
every stage may hold at least one. So the last stage can always continue, which lets the stage before it continue, and
so on. On workers that recompute, an F also leaves room for one backward, and an I waits for a W if memory is too small.
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from planner.schedules.kernel.arrays import DOWN, KIND_COUNT, UP, Tables, encode, inner
from planner.schedules.kernel.problem import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Floats, Ints
from planner.schedules.kernel.timing import arrive_s

_NONE = -1


class Rules(NamedTuple):
    """Rules by which a free worker chooses its next action.

    Attributes:
        split: Whether backwards are split into I and W; they are unsplit (B) otherwise.
        entry: Microbatches in the order in which they enter the pipeline, [microbatches].
        live: Limit on the microbatches between the start of F and the end of I or B, [stages].
        backward_first: Whether a ready I or B goes before a ready F, [stages].
        wait_share: A ready F waits for a gradient that arrives within this share of the F's duration, [stages].
        gap_share: A ready W runs if the worker would idle for at least this share of the W's duration, [stages].
        pending: Smallest number of ready W at which a W goes before a ready F, [stages].
    """

    split: bool
    entry: Ints
    live: Ints
    backward_first: NDArray[np.bool_]
    wait_share: Floats
    gap_share: Floats
    pending: Ints


class _State(NamedTuple):
    """State of the simulated pipeline.

    Attributes:
        done: Number of actions begun so far, [kind, stages]; B counts as I.
        ready_s: Arrival of the input of F (`DOWN`) and of I or B (`UP`), seconds, [direction, stages, microbatches];
            infinite while unknown.
        held_bytes: Bytes that each stage holds, [stages].
        sent_s: Departure and arrival of the last transfer on each channel, seconds, [2, channels].
        busy_s: End of each worker's current action, seconds, [workers].
        wake_s: Time at which each worker chooses next, seconds, [workers].
    """

    done: Ints
    ready_s: Floats
    held_bytes: Floats
    sent_s: Floats
    busy_s: Floats
    wake_s: Floats


@njit(cache=True)
def list_schedule(tables: Tables, rules: Rules, first: Ints, limit_s: float, sequence: Ints) -> float:
    """Fill ``sequence`` by the rules and return the makespan in seconds.

    The makespan is infinite, and ``sequence`` incomplete, if the makespan would exceed ``limit_s`` or a microbatch does
    not fit into memory.

    Args:
        tables: Arrays of the problem.
        rules: Rules by which workers choose.
        first: Index of each worker's first action, [workers + 1].
        limit_s: Makespan above which the simulation stops early, seconds.
        sequence: Output, filled with the actions as integers, [actions].
    """
    state = _begin(tables)
    position, remaining_s = first[:-1].copy(), tables.load_s.copy()
    makespan_s = 0.0
    for _ in range(first[-1]):
        kind, stage, worker = _NONE, _NONE, _NONE
        while kind == _NONE:
            worker = int(np.argmin(state.wake_s))
            now_s = state.wake_s[worker]
            if now_s + remaining_s[worker] > limit_s or now_s == np.inf:
                return np.inf
            kind, stage = _choose(tables, rules, state, worker, now_s)
        count = state.done[BACKWARD_INPUT if kind == BACKWARD else kind, stage]
        microbatch = rules.entry[count]
        duration_s = tables.duration_s[kind, stage, microbatch]
        _begin_action(tables, state, kind, stage, microbatch, state.wake_s[worker] + duration_s)
        remaining_s[worker] -= duration_s
        sequence[position[worker]] = encode(stage, kind, microbatch)
        position[worker] += 1
        makespan_s = max(makespan_s, state.busy_s[worker])
    return makespan_s


@njit(cache=True)
def _begin(tables: Tables) -> _State:
    stages, microbatches = tables.activation_bytes.shape
    workers = len(tables.capacity_bytes)
    ready_s = np.full((2, stages, microbatches), np.inf)
    ready_s[DOWN, 0] = 0.0
    return _State(
        np.zeros((KIND_COUNT, stages), np.int64),
        ready_s,
        np.zeros(stages),
        np.zeros((2, tables.channels)),
        np.zeros(workers),
        np.zeros(workers),
    )


@inner
def _choose(tables: Tables, rules: Rules, state: _State, worker: int, now_s: float) -> tuple[int, int]:
    """Return the kind and stage of the action that a worker starts now.

    If the worker starts none, return `_NONE` twice, and set ``wake_s`` to the time at which it chooses again.
    """
    backward, forward, weight = _NONE, _NONE, _NONE
    gradient_s, activation_s = np.inf, np.inf  # arrival of the next gradient and of the next activation
    done = state.done
    for index in range(tables.first_held[worker + 1] - 1, tables.first_held[worker] - 1, -1):
        stage = tables.held[index]
        begun, ended, weighed = done[FORWARD, stage], done[BACKWARD_INPUT, stage], done[BACKWARD_WEIGHT, stage]
        if ended < begun:
            there_s = state.ready_s[UP, stage, rules.entry[ended]]
            if there_s > now_s:
                gradient_s = min(gradient_s, there_s)
            elif backward == _NONE or ended < done[BACKWARD_INPUT, backward]:
                backward = stage
        if rules.split and weighed < ended and (weight == _NONE or weighed < done[BACKWARD_WEIGHT, weight]):
            weight = stage
        if begun < len(rules.entry) and begun - ended < rules.live[stage]:
            there_s = state.ready_s[DOWN, stage, rules.entry[begun]]
            if there_s < np.inf and _fits(tables, state, worker, stage, rules.entry[begun]):
                if there_s > now_s:
                    activation_s = min(activation_s, there_s)
                elif forward == _NONE or begun < done[FORWARD, forward]:
                    forward = stage
    if backward != _NONE and (forward == _NONE or rules.backward_first[backward]):
        next_one = rules.entry[done[BACKWARD_INPUT, backward]]
        if weight != _NONE and not _has_room(tables, state, worker, backward, next_one):
            return BACKWARD_WEIGHT, weight
        return (BACKWARD_INPUT if rules.split else BACKWARD), backward
    if forward != _NONE:
        if weight != _NONE and done[BACKWARD_INPUT, weight] - done[BACKWARD_WEIGHT, weight] >= rules.pending[weight]:
            return BACKWARD_WEIGHT, weight
        forward_s = tables.duration_s[FORWARD, forward, rules.entry[done[FORWARD, forward]]]
        if backward != _NONE or gradient_s - now_s >= rules.wait_share[forward] * forward_s:
            return FORWARD, forward
    next_s = min(gradient_s, activation_s)
    if weight != _NONE:
        weight_s = tables.duration_s[BACKWARD_WEIGHT, weight, rules.entry[done[BACKWARD_WEIGHT, weight]]]
        if next_s - now_s >= rules.gap_share[weight] * weight_s:
            return BACKWARD_WEIGHT, weight
    state.wake_s[worker] = next_s
    return _NONE, _NONE


@inner
def _fits(tables: Tables, state: _State, worker: int, stage: int, microbatch: int) -> bool:
    """Return whether an F fits into memory and leaves room for one backward and one microbatch of every later stage."""
    room_bytes = tables.capacity_bytes[worker] - tables.reserve_bytes[worker]
    for index in range(tables.first_held[worker], tables.first_held[worker + 1]):
        other = tables.held[index]
        saved_bytes = tables.largest_bytes[other] if other > stage else 0.0
        room_bytes -= max(state.held_bytes[other], saved_bytes)
    return bool(tables.activation_bytes[stage, microbatch] <= room_bytes)


@inner
def _has_room(tables: Tables, state: _State, worker: int, stage: int, microbatch: int) -> bool:
    """Return whether the activations that an I recomputes fit into memory."""
    if not tables.reserve_bytes[worker]:
        return True
    room_bytes = tables.capacity_bytes[worker]
    for index in range(tables.first_held[worker], tables.first_held[worker + 1]):
        room_bytes -= state.held_bytes[tables.held[index]]
    return bool(tables.weight_bytes[stage, microbatch] - tables.activation_bytes[stage, microbatch] <= room_bytes)


@inner
def _begin_action(tables: Tables, state: _State, kind: int, stage: int, microbatch: int, end_s: float) -> None:
    """Start an action that ends at ``end_s``: occupy its worker, update the bytes held, and send its output."""
    worker = tables.worker[stage]
    state.busy_s[worker] = state.wake_s[worker] = end_s
    if kind == BACKWARD_WEIGHT:
        state.done[BACKWARD_WEIGHT, stage] += 1
        state.held_bytes[stage] -= tables.weight_bytes[stage, microbatch]
    elif kind == FORWARD:
        state.done[FORWARD, stage] += 1
        state.held_bytes[stage] += tables.activation_bytes[stage, microbatch]
        if stage < len(tables.worker) - 1:
            _send(tables, state, DOWN, stage, stage + 1, microbatch, end_s)
        else:
            state.ready_s[UP, stage, microbatch] = end_s
    else:
        state.done[BACKWARD_INPUT, stage] += 1
        state.held_bytes[stage] -= tables.activation_bytes[stage, microbatch]
        if kind == BACKWARD_INPUT:
            state.held_bytes[stage] += tables.weight_bytes[stage, microbatch]
        if stage > 0:
            _send(tables, state, UP, stage, stage - 1, microbatch, end_s)


@inner
def _send(
    tables: Tables, state: _State, direction: int, stage: int, target: int, microbatch: int, end_s: float
) -> None:
    """Send the output of an action; its receiver chooses again at its arrival, or when the receiver is free."""
    there_s = arrive_s(tables, direction, stage, microbatch, end_s, state.sent_s)
    state.ready_s[direction, target, microbatch] = there_s
    receiver = tables.worker[target]
    state.wake_s[receiver] = min(state.wake_s[receiver], max(there_s, state.busy_s[receiver]))
