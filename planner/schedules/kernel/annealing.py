"""Local search on orders: simulated annealing along the critical path, and B in place of I and W.

Actions are F (forward), B (backward), I (input gradient) and W (weight gradient). The critical path consists of blocks;
a block is a sequence of actions that one worker runs without waiting. The makespan gets shorter only if a block begins
or ends with another action. So most moves take an action of a block to the block's border, or the action at the border
into the block (as in job-shop scheduling: Nowicki and Smutnicki, 1996, move N5; Balas and Vazacopoulos, 1998). Orders
that exceed memory or ``in_flight``, or break the order F, I, W of a microbatch, are not timed; an order that deadlocks
has an infinite makespan.
"""

import numpy as np
from numba import njit
from numpy.random import Generator

from planner.schedules.kernel.arrays import MICROBATCH_BITS, NOTHING, Tables, decode, encode, inner
from planner.schedules.kernel.problem import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Ints, Orders
from planner.schedules.kernel.timing import trace

# First and last temperature of the annealing, as multiples of the mean duration of an action.
_HOT, _COLD = 1.0, 0.1

# Share of moves that shift an action by a few positions (`_FARTHEST` at most) instead of to the border of its block;
# each further position has probability `_FARTHER_SHARE`.
_NEAR_SHARE = 0.1
_FARTHER_SHARE = 0.6
_FARTHEST = 8

# Limit on the average number of moves that are proposed for each order that is timed.
_MOVES_PER_TRIAL = 20

# Relative difference up to which two makespans count as equal.
_SAME = 1e-12


@njit(cache=True)
def anneal(tables: Tables, first: Ints, sequence: Ints, trials: int, goal_s: float, random: Generator) -> float:
    """Improve a sequence of F, I and W in place; return its makespan, seconds.

    Args:
        tables: Arrays of the problem.
        first: Index of each worker's first action, [workers + 1].
        sequence: Actions as integers, [actions], in an order that does not deadlock and respects the limits.
        trials: Number of orders to time.
        goal_s: Makespan at which the search ends early, seconds: a lower bound.
        random: Random generator that chooses the moves.
    """
    actions = int(first[-1])
    starts_s, causes, new_causes = np.empty(actions), np.empty(actions, np.int64), np.empty(actions, np.int64)
    path, block_first, block_last = np.empty((3, actions), np.int64)
    current_s, last = trace(tables, first, sequence, np.inf, starts_s, causes)
    best_s, best = current_s, sequence.copy()
    mean_s = np.sum(tables.load_s) / actions
    temperature_s, cooling = _HOT * mean_s, (_COLD / _HOT) ** (1 / max(1, trials))
    moved, length, trial = True, 0, 0
    for _ in range(trials * _MOVES_PER_TRIAL):
        if trial == trials or best_s <= goal_s * (1 + _SAME):
            break
        if moved:
            length = _critical_path(tables, sequence, causes, last, path, block_first, block_last)
            moved = False
        origin, target = _propose(path, block_first, block_last, length, random)
        worker = _worker_of(tables, sequence[origin])
        if not first[worker] <= target < first[worker + 1] or not _shift(
            sequence, origin, target, tables.equal_microbatches
        ):
            continue
        if not _is_feasible(tables, first, sequence, worker):
            _shift(sequence, target, origin, tables.equal_microbatches)
            continue
        limit_s = (current_s - temperature_s * np.log(1 - random.random())) * (1 + _SAME)
        makespan_s, new_last = trace(tables, first, sequence, float(limit_s), starts_s, new_causes)
        trial, temperature_s = trial + 1, temperature_s * cooling
        if makespan_s > limit_s:
            _shift(sequence, target, origin, tables.equal_microbatches)
            continue
        current_s, last, moved = makespan_s, new_last, True
        causes, new_causes = new_causes, causes
        if current_s < best_s * (1 - _SAME):
            best_s = current_s
            best[:] = sequence
    sequence[:] = best
    return best_s


@inner
def _critical_path(
    tables: Tables, sequence: Ints, causes: Ints, last: int, path: Ints, block_first: Ints, block_last: Ints
) -> int:
    """Fill ``path`` with the positions of the actions on a critical path, last action first; return their number.

    For each of these actions, ``block_first`` and ``block_last`` are filled with the first and last position of its
    block.
    """
    length = 0
    begin = 0
    while last >= 0:
        path[length] = last
        block_last[length] = last if length == begin else block_last[begin]
        earlier = causes[last]
        goes_on = earlier == last - 1 and _worker_of(tables, sequence[last]) == _worker_of(tables, sequence[earlier])
        length += 1
        if not goes_on:
            block_first[begin:length] = last
            begin = length
        last = earlier
    return length


@njit(cache=True)
def _propose(path: Ints, block_first: Ints, block_last: Ints, length: int, random: Generator) -> tuple[int, int]:
    """Return the position of a random action and the position to which it should move."""
    place = random.integers(0, length)
    here = path[place]
    if random.random() < _NEAR_SHARE:
        distance = 1
        while distance < _FARTHEST and random.random() < _FARTHER_SHARE:
            distance += 1
        return here, here + distance if random.random() < 0.5 else here - distance
    border = block_first[place] if random.random() < 0.5 else block_last[place]
    return (here, border) if random.random() < 0.5 else (border, here)


@inner
def _worker_of(tables: Tables, number: int) -> int:
    return int(tables.worker[decode(number)[0]])


@inner
def _shift(sequence: Ints, origin: int, target: int, equal: bool) -> bool:
    """Move an action past other actions of its worker; return whether the sequence changed.

    Nothing changes if the action would pass another action of its own stage and microbatch. Equal microbatches keep
    their order: where the action reaches another action of its own stage and kind, the other one moves on instead.
    """
    step = 1 if target > origin else -1
    moving, changes = sequence[origin], False
    for place in range(origin + step, target + step, step):
        passed = sequence[place]
        if equal and passed >> MICROBATCH_BITS == moving >> MICROBATCH_BITS:
            moving = passed
            continue
        changes = True
        stage, _, microbatch = decode(passed)
        moving_stage, _, moving_microbatch = decode(moving)
        if stage == moving_stage and microbatch == moving_microbatch:
            return False
    if not changes:
        return False
    moving = sequence[origin]
    for place in range(origin, target, step):
        passed = sequence[place + step]
        if equal and passed >> MICROBATCH_BITS == moving >> MICROBATCH_BITS:
            sequence[place], moving = moving, passed
        else:
            sequence[place] = passed
    sequence[target] = moving
    return True


@njit(cache=True, forceinline=True)
def _is_feasible(tables: Tables, first: Ints, sequence: Ints, worker: int) -> bool:
    """Return whether a worker's actions respect the worker's memory and the ``in_flight`` of its stages."""
    live = np.zeros(len(tables.worker), np.int64)
    held_bytes = 0.0
    for place in range(first[worker], first[worker + 1]):
        stage, kind, microbatch = decode(sequence[place])
        if kind == FORWARD:
            live[stage] += 1
            held_bytes += tables.activation_bytes[stage, microbatch]
            if held_bytes > tables.capacity_bytes[worker] or live[stage] > tables.in_flight[stage]:
                return False
        elif kind == BACKWARD_WEIGHT:
            held_bytes -= tables.weight_bytes[stage, microbatch]
        else:
            live[stage] -= 1
            held_bytes -= tables.activation_bytes[stage, microbatch]
            if kind == BACKWARD_INPUT:
                held_bytes += tables.weight_bytes[stage, microbatch]
                if held_bytes > tables.capacity_bytes[worker]:
                    return False
    return True


# Relative increase of the makespan up to which joining I and W counts as free.
_EQUAL_MAKESPANS = 1e-9


def split_backwards(orders: Orders) -> Orders:
    """Return the orders with I and W in place of each B; the makespan does not get longer."""
    times = np.where(orders.kind == BACKWARD, 2, 1)
    ends = np.cumsum(times)
    kind = np.repeat(np.where(orders.kind == BACKWARD, BACKWARD_INPUT, orders.kind), times)
    kind[ends[orders.kind == BACKWARD] - 1] = BACKWARD_WEIGHT
    first_action = np.concatenate([[0], ends])[orders.first_action]
    stage, microbatch = np.repeat(orders.stage, times), np.repeat(orders.microbatch, times)
    return Orders(first_action.astype(np.int64), kind.astype(np.int8), stage, microbatch)


@njit(cache=True)
def join_backwards(tables: Tables, first: Ints, sequence: Ints, makespan_s: float, trials: int) -> None:
    """Replace each I that its own W follows by B and `NOTHING`, in place, wherever the makespan stays the same.

    The reason: an unsplit backward holds no activations between I and W.

    Args:
        tables: Arrays of the problem.
        first: Index of each worker's first action, [workers + 1].
        sequence: Actions as integers, [actions].
        makespan_s: Makespan of the sequence, seconds.
        trials: Approximate number of orders to time; if there are more pairs of I and W, several are joined at once.
    """
    starts_s, causes = np.empty(len(sequence)), np.empty(len(sequence), np.int64)
    places = _pairs(first, sequence)
    together = max(1, len(places) // max(1, trials))
    for begin in range(0, len(places), together):
        group = places[begin : begin + together]
        _join(sequence, group)
        if trace(tables, first, sequence, makespan_s * (1 + _EQUAL_MAKESPANS), starts_s, causes)[0] == np.inf:
            _part(sequence, group)


@njit(cache=True)
def _pairs(first: Ints, sequence: Ints) -> Ints:
    """Return the positions of every I that is directly followed by the W of its stage and microbatch."""
    places, count = np.empty(len(sequence), np.int64), 0
    for worker in range(len(first) - 1):
        for place in range(first[worker], first[worker + 1] - 1):
            stage, kind, microbatch = decode(sequence[place])
            if kind == BACKWARD_INPUT and sequence[place + 1] == encode(stage, BACKWARD_WEIGHT, microbatch):
                places[count] = place
                count += 1
    return places[:count]


@njit(cache=True)
def _join(sequence: Ints, places: Ints) -> None:
    for place in places:
        stage, _, microbatch = decode(sequence[place])
        sequence[place], sequence[place + 1] = encode(stage, BACKWARD, microbatch), NOTHING


@njit(cache=True)
def _part(sequence: Ints, places: Ints) -> None:
    for place in places:
        stage, _, microbatch = decode(sequence[place])
        sequence[place] = encode(stage, BACKWARD_INPUT, microbatch)
        sequence[place + 1] = encode(stage, BACKWARD_WEIGHT, microbatch)
