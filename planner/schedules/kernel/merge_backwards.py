"""B in place of I and W where that costs no time: a backward that is not split needs no store for what W waits for."""

import numpy as np
from numba import njit

from planner.schedules.kernel.arrays import NOTHING, Ints, Tables, decode, encode
from planner.schedules.kernel.problem import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, Orders
from planner.schedules.kernel.timing import trace

# Makespans this close, relative, are the same.
_SAME = 1e-9


def split_backwards(orders: Orders) -> Orders:
    """Return the orders with I and W, one after the other, in place of each B; they take no longer."""
    times = np.where(orders.kind == BACKWARD, 2, 1)
    ends = np.cumsum(times)
    kind = np.repeat(np.where(orders.kind == BACKWARD, BACKWARD_INPUT, orders.kind), times)
    kind[ends[orders.kind == BACKWARD] - 1] = BACKWARD_WEIGHT
    first_action = np.concatenate([[0], ends])[orders.first_action]
    stage, microbatch = np.repeat(orders.stage, times), np.repeat(orders.microbatch, times)
    return Orders(first_action.astype(np.int64), kind.astype(np.int8), stage, microbatch)


@njit(cache=True)
def join_backwards(tables: Tables, first: Ints, sequence: Ints, makespan_s: float, trials: int) -> None:
    """Replace an I and the W behind it by B and `NOTHING` in place, wherever the makespan stays what it is.

    Args:
        tables: The problem.
        first: Where each worker's actions begin, [workers + 1].
        sequence: Actions as numbers, [actions].
        makespan_s: Of the sequence, seconds.
        trials: How many orders to time, about; pairs are joined several at once where there are more.
    """
    starts_s, causes = np.empty(len(sequence)), np.empty(len(sequence), np.int64)
    places = _pairs(first, sequence)
    together = max(1, len(places) // max(1, trials))
    for begin in range(0, len(places), together):
        group = places[begin : begin + together]
        _join(sequence, group)
        if trace(tables, first, sequence, makespan_s * (1 + _SAME), starts_s, causes)[0] == np.inf:
            _part(sequence, group)


@njit(cache=True)
def _pairs(first: Ints, sequence: Ints) -> Ints:
    """The positions of each I that its W follows."""
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
