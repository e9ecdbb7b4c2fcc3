"""Schedules ``compact-zb`` and ``portfolio``, whose orders result from a search."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from planner.schedules.dynamic import dynamic_orders, no_room
from planner.schedules.kernel.annealing import anneal, join_backwards, split_backwards
from planner.schedules.kernel.arrays import first_actions, tables_of, to_orders, to_sequence
from planner.schedules.kernel.bounds import lower_bound_s
from planner.schedules.kernel.problem import BACKWARD_WEIGHT, GRACE, Ints, Orders, SchedulingProblem, is_within_limits
from planner.schedules.kernel.rule_search import search_rules
from planner.schedules.kernel.timing import finish_s
from planner.schedules.one_f_one_b import gpipe, interleaved_one_f_one_b, one_f_one_b
from planner.schedules.zero_bubble import zb_h1, zb_h2, zb_v
from traces.common.errors import InputError

# Limits on the actions that each phase of the search schedules or times, so that the search takes tenths of a second.
_RULE_ACTIONS = 500_000
_MOVE_ACTIONS = 5_000_000
_MOST_MOVES = 8_000
_JOIN_ACTIONS = 1_000_000
_SEED = 0
_PUBLISHED = (one_f_one_b, zb_h1, zb_h2, interleaved_one_f_one_b, zb_v)


def compact_zb(problem: SchedulingProblem) -> Orders:
    """Return orders with little idle time, also over slow links [assumed: ours, after DeepCEE/SpanTrain].

    Published zero-bubble schedules assume one transfer cost and equal stages. Here, every stage has its own times of F,
    I and W, every link has its own latency and transmission time, microbatches may differ, and the orders respect
    memory and ``in_flight``. With P = 3 stages, M = 4 microbatches, F = I = W = 1 time slot (B takes two), a latency of
    1 slot on both links, and memory for 4 microbatches::

        stage 0  F0 F1 F2 F3 .. .. .. .. .. B0 .. B1 .. B2 .. B3 ..
        stage 1  .. .. F0 F1 F2 .. .. I0 F3 I1 .. I2 W0 I3 W1 W2 W3
        stage 2  .. .. .. .. F0 I0 F1 I1 F2 I2 F3 I3 W0 W1 W2 W3 ..

    The makespan has no formula. A search in three steps finds the order; its seed is fixed, so that equal problems have
    equal orders:

    1. Try the published schedules, and list scheduling with many rules (`planner.schedules.kernel.rule_search`).
    2. Take the order with the least makespan, and move actions along its critical path
       (`planner.schedules.kernel.annealing.anneal`).
    3. Put B in place of I and W where the makespan stays the same
       (`planner.schedules.kernel.annealing.join_backwards`).

    The makespan is never longer than that of 1F1B, ZB-H1 or any other published schedule within the same limits. On the
    instances of the bench `schedules` it is 0.04 % above the proved optimum on average, 2.2 % at worst. Microbatches
    that differ in size may run in another order than that of their indices.

    Raises:
        InputError: A microbatch does not fit into a worker's memory.
    """
    return compact(problem, published(problem))


def published(problem: SchedulingProblem) -> list[Orders]:
    """Return the orders of the published schedules that apply to the problem and respect its memory and ``in_flight``.

    1F1B is included twice: with depth P - s at stage s, and with the problem's ``in_flight``.
    """
    own = tuple(min(limit, problem.stages - stage) for stage, limit in enumerate(problem.in_flight))
    tries = [(one_f_one_b, replace(problem, in_flight=own)), *((schedule, problem) for schedule in _PUBLISHED)]
    found = []
    for schedule, limited in tries:
        try:
            orders = schedule(limited)
        except InputError:
            continue
        if is_within_limits(problem, orders):
            found.append(orders)
    return found


def compact(problem: SchedulingProblem, starts: Sequence[Orders]) -> Orders:
    """Return the orders with the least makespan that the search finds, beginning with the orders ``starts``.

    All of ``starts`` are within the problem's limits, and none of them has a shorter makespan than the result.

    Raises:
        InputError: A microbatch does not fit into a worker's memory.
    """
    tables, first, random = tables_of(problem), first_actions(problem, split=True), np.random.default_rng(_SEED)
    goal_s, actions = lower_bound_s(problem), int(first[-1])
    makespan_s, sequence = _best_start(problem, starts)
    trials = _RULE_ACTIONS // actions * (1 if tables.equal_microbatches else 2)
    ruled_s, ruled = search_rules(tables, first, _most_live(problem), max(8, trials), goal_s, random)
    if ruled_s < makespan_s:
        makespan_s, sequence = ruled_s, ruled
    if makespan_s == np.inf:
        raise no_room(problem)
    makespan_s = anneal(tables, first, sequence, min(_MOST_MOVES, _MOVE_ACTIONS // actions), goal_s, random)
    join_backwards(tables, first, sequence, makespan_s, _JOIN_ACTIONS // actions)
    return to_orders(sequence, first)


def _best_start(problem: SchedulingProblem, starts: Sequence[Orders]) -> tuple[float, Ints]:
    best_s, best = np.inf, np.empty(0, np.int64)
    for orders in map(split_backwards, starts):
        makespan_s = finish_s(problem, orders)
        if makespan_s < best_s:
            best_s, best = makespan_s, to_sequence(orders)
    return best_s, best


def _most_live(problem: SchedulingProblem) -> Ints:
    """Return the most microbatches that each stage can hold at once, int64 [stages]."""
    least_bytes = np.maximum(problem.activation_bytes.min(axis=1), 1e-100)
    room = np.floor(problem.capacity_bytes[list(problem.workers)] / least_bytes + GRACE)
    limits = np.minimum(np.minimum(room, problem.in_flight), problem.microbatches)
    return np.asarray(np.maximum(1, limits), dtype=np.int64)


# Relative difference up to which two makespans count as equal.
_SAME = 1e-9


def portfolio(problem: SchedulingProblem) -> Orders:
    """Return the orders with the least makespan of all schedules except ``optimal``.

    Orders with unsplit backwards are preferred to the result of the search where both have the same makespan.

    Raises:
        InputError: A microbatch does not fit into a worker's memory.
    """
    dynamic = [dynamic_orders(problem, split) for split in (False, True)]
    starts = [orders for orders in (*dynamic, *published(problem), gpipe(problem)) if is_within_limits(problem, orders)]
    best = compact(problem, starts)
    best_s = finish_s(problem, best)
    whole = (orders for orders in starts if not (orders.kind == BACKWARD_WEIGHT).any())
    return next((orders for orders in whole if finish_s(problem, orders) <= best_s * (1 + _SAME)), best)
