"""Start times and makespan of given orders, compiled with numba: a search times thousands of orders."""

import numpy as np
from numba import njit

from planner.schedules.kernel.arrays import DOWN, NOTHING, UP, Tables, decode, inner, tables_of, to_sequence
from planner.schedules.kernel.problem import BACKWARD_WEIGHT, FORWARD, Floats, Ints, Orders, SchedulingProblem
from traces.common.errors import InputError


@inner
def transmit_fifo(
    channel: int, sent_s: float, transmission_s: float, latency_s: float, free_s: Floats, arrived_s: Floats
) -> tuple[float, float]:
    """Return when a message departs and when it arrives, seconds; a channel delivers first in, first out.

    A message waits until the channel is free. It never arrives before the preceding message, even if its own latency or
    jitter is smaller.

    Args:
        channel: Index of the channel.
        sent_s: Time at which the message is ready to be sent, seconds.
        transmission_s: Time for which the message keeps the channel busy, seconds.
        latency_s: Time from departure to arrival, seconds.
        free_s: Departure of the last message on each channel, seconds, [channels]; updated in place.
        arrived_s: Arrival of the last message on each channel, seconds, [channels]; updated in place.
    """
    departed_s = max(sent_s, free_s[channel]) + transmission_s
    free_s[channel] = departed_s
    arrived_s[channel] = max(arrived_s[channel], departed_s + latency_s)
    return departed_s, arrived_s[channel]


@inner
def arrive_s(tables: Tables, direction: int, stage: int, microbatch: int, ready_s: float, sent_s: Floats) -> float:
    """Return the arrival of a transfer, seconds; no transfer overtakes an earlier one on its channel.

    Args:
        tables: Arrays of the problem.
        direction: `planner.schedules.kernel.arrays.DOWN` or `UP`.
        stage: Index of the sending stage.
        microbatch: Index of the microbatch.
        ready_s: End of the action whose output is transferred, seconds.
        sent_s: Departure and arrival of the last transfer on each channel, seconds, [2, channels]; updated in place.
    """
    channel = tables.channel[direction, stage]
    if channel < 0:
        return ready_s
    transmission_s, latency_s = tables.transmission_s[direction, stage, microbatch], tables.latency_s[direction, stage]
    return transmit_fifo(channel, ready_s, transmission_s, latency_s, sent_s[0], sent_s[1])[1]


# What an action waits for: an activation (`DOWN`), a gradient (`UP`), or, for W, the I of its own microbatch.
_GRADIENT, _OWN_INPUT = UP, 2


def finish_s(problem: SchedulingProblem, orders: Orders) -> float:
    """Return the makespan of the orders, seconds.

    Raises:
        InputError: The actions wait for each other in a cycle.
    """
    return float(_run(problem, orders)[1])


def start_times_s(problem: SchedulingProblem, orders: Orders) -> Floats:
    """Return the start of each action, seconds, [actions], in the order of the arrays of ``orders``.

    Raises:
        InputError: The actions wait for each other in a cycle.
    """
    return _run(problem, orders)[0]


def _run(problem: SchedulingProblem, orders: Orders) -> tuple[Floats, float]:
    sequence = to_sequence(orders)
    starts_s, causes = np.full(len(sequence), np.nan), np.empty(len(sequence), np.int64)
    makespan_s, _ = trace(tables_of(problem), orders.first_action, sequence, np.inf, starts_s, causes)
    if makespan_s == np.inf:
        stuck = int(np.argmax(np.isnan(starts_s)))
        worker = int(np.searchsorted(orders.first_action, stuck, side="right")) - 1
        action = orders.actions(worker)[stuck - int(orders.first_action[worker])]
        raise InputError(
            f"the order of actions deadlocks: worker {worker} never receives what {action} needs",
            valid=f"on every worker, put the actions that {action} waits for before the actions that wait for {action}",
        )
    return starts_s, makespan_s


@inner
def _transmit(
    tables: Tables,
    kind: int,
    stage: int,
    microbatch: int,
    end_s: float,
    place: int,
    ready_s: Floats,
    sender: Ints,
    sent_s: Floats,
    delayer: Ints,
) -> None:
    """Record when the output of an action arrives where it is needed, and which action determines this time."""
    stages = len(tables.worker)
    if kind == BACKWARD_WEIGHT:
        return
    if kind == FORWARD and stage == stages - 1:
        ready_s[_GRADIENT, stage, microbatch] = end_s
        sender[_GRADIENT, stage, microbatch] = place
        return
    if kind != FORWARD:
        ready_s[_OWN_INPUT, stage, microbatch] = end_s
        sender[_OWN_INPUT, stage, microbatch] = place
        if stage == 0:
            return
    direction = DOWN if kind == FORWARD else UP
    target = stage + 1 if kind == FORWARD else stage - 1
    channel = tables.channel[direction, stage]
    if channel >= 0 and sent_s[0, channel] <= end_s:
        delayer[channel] = place
    ready_s[direction, target, microbatch] = arrive_s(tables, direction, stage, microbatch, end_s, sent_s)
    sender[direction, target, microbatch] = delayer[channel] if channel >= 0 else place


@njit(cache=True)
def trace(
    tables: Tables, first: Ints, sequence: Ints, limit_s: float, starts_s: Floats, causes: Ints
) -> tuple[float, int]:
    """Return the makespan in seconds and the position of the action that ends last.

    The makespan is infinite, and the position -1, if the actions wait for each other in a cycle or the makespan would
    exceed ``limit_s``.

    Args:
        tables: Arrays of the problem.
        first: Index of each worker's first action, [workers + 1].
        sequence: Actions as integers, [actions].
        limit_s: Makespan above which the computation stops early, seconds.
        starts_s: Output, filled with the starts in seconds, [actions].
        causes: Output, [actions], filled with the position of the action whose end determined an action's start, -1 for
            a start at time 0. It is the preceding action of the worker, the action whose output was awaited, or an
            action whose transfer occupied the channel before that output.
    """
    stages, microbatches = tables.activation_bytes.shape
    workers = len(first) - 1
    ready_s, sender = np.full((3, stages, microbatches), -1.0), np.full((3, stages, microbatches), -1)
    ready_s[DOWN, 0] = 0.0
    sent_s, delayer = np.zeros((2, tables.channels)), np.zeros(tables.channels, np.int64)
    position, clock_s, remaining_s = first[:-1].copy(), np.zeros(workers), tables.load_s.copy()
    done, last, makespan_s = 0, -1, 0.0
    while done < first[-1]:
        done_before = done
        for turn in range(2 * workers):
            # Visit the workers down the pipeline and up again, as activations and gradients travel.
            worker = turn if turn < workers else 2 * workers - 1 - turn
            now_s, place = clock_s[worker], position[worker]
            while place < first[worker + 1]:
                if sequence[place] == NOTHING:
                    place, done = place + 1, done + 1
                    continue
                stage, kind, microbatch = decode(sequence[place])
                needed = DOWN if kind == FORWARD else _OWN_INPUT if kind == BACKWARD_WEIGHT else _GRADIENT
                there_s = ready_s[needed, stage, microbatch]
                if there_s < 0:
                    break
                causes[place] = place - 1 if now_s > 0 else -1
                if there_s > now_s:
                    now_s, causes[place] = there_s, sender[needed, stage, microbatch]
                starts_s[place] = now_s
                now_s += tables.duration_s[kind, stage, microbatch]
                remaining_s[worker] -= tables.duration_s[kind, stage, microbatch]
                if now_s + remaining_s[worker] > limit_s:
                    return np.inf, -1
                _transmit(tables, kind, stage, microbatch, now_s, place, ready_s, sender, sent_s, delayer)
                place, done = place + 1, done + 1
            if now_s > makespan_s:
                makespan_s, last = now_s, place - 1
            position[worker], clock_s[worker] = place, now_s
        if done == done_before:
            return np.inf, -1
    return makespan_s, last
