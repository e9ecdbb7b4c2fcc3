"""Devices at work, in compiled code: each goes on until it waits for something that is not known yet.

What a device does in a fixed order, and what passes over a line that nobody shares, needs no events: its times
follow from those before it. Only messages on shared lines come back from here, for the network to carry.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from planner.schedules.kernel.arrays import inner
from planner.schedules.kernel.timing import transmit_fifo
from planner.step.graph import Flags, Floats, Ints, StepGraph
from sim.kernel.piecewise import RateTables, rate_at, resumes_s, time_of

# How a line carries messages: at a constant rate, at the rate of a table, or together with other lines.
CONSTANT, TABLED, SHARED = 0, 1, 2


class StepState(NamedTuple):
    """How far a step has come; times in seconds of the run, nan where not known yet.

    Attributes:
        position: The action that each actor does next, [actors].
        arrival_s: When each message is there, [messages].
        waiting: The actor that waits for a message, -1 if none does, [messages].
        wait_s: When the receiver began to wait for a message, [messages].
        sent_s: When a message was handed over, [messages].
        departed_s: When its last bit left, [messages].
        start_s: Of each action, [actions].
        end_s: Of each action, [actions].
        sending: Messages on shared lines for whose departure each actor waits, [actors].
        shared: Filled by `advance`: messages handed over to shared lines, [messages].
        finished: Filled by `advance`: actors that have finished the step, [actors].
        stack: Room for `advance` to remember who goes on next, [2 * actors].
    """

    position: Ints
    arrival_s: Floats
    waiting: Ints
    wait_s: Floats
    sent_s: Floats
    departed_s: Floats
    start_s: Floats
    end_s: Floats
    sending: Ints
    shared: Ints
    finished: Ints
    stack: Ints


class StepTimes(NamedTuple):
    """What the actions and messages of one step take.

    Attributes:
        duration_s: Of each action, [actions].
        transmission_s: How long a message keeps a line of constant rate busy, [messages].
        wire_bits: What a message puts on a line, [messages].
        latency_s: Of a message's line, where it is constant, jitter included, [messages].
        jitter_s: What the jitter of a line's packets adds where its latency is not constant, [messages].
        line: The line of each channel, [channels].
        blocking: Whether sender and receiver do nothing else while a message is on its way, [messages].
    """

    duration_s: Floats
    transmission_s: Floats
    wire_bits: Floats
    latency_s: Floats
    jitter_s: Floats
    line: Ints
    blocking: Flags


class Lines(NamedTuple):
    """One direction between two devices each, for the whole run.

    Attributes:
        mode: `CONSTANT`, `TABLED` or `SHARED`, [lines].
        free_s: When the last message handed over has departed, [lines].
        arrived_s: When it has arrived, [lines].
        rate_table: Of its rate, for `TABLED`, [lines].
        latency_table: Of its latency; -1 where that is constant, [lines].
        tables: Bits per second, and seconds.
    """

    mode: Ints
    free_s: Floats
    arrived_s: Floats
    rate_table: Ints
    latency_table: Ints
    tables: RateTables


class Devices(NamedTuple):
    """What the actors' devices go through during the run.

    Attributes:
        clock_s: When each actor has done what it has done, [actors].
        speed_table: Of its speed, -1 where that is always 1, [actors].
        tables: Speeds relative to the profile.
        first_absence: Where each actor's absences begin in the next two, [actors + 1].
        leaves_s: Starts of absences, rising per actor, [absences].
        returns_s: Their ends, [absences].
    """

    clock_s: Floats
    speed_table: Ints
    tables: RateTables
    first_absence: Ints
    leaves_s: Floats
    returns_s: Floats


def new_state(graph: StepGraph) -> StepState:
    """Return the state of a step that has not begun."""
    messages, actions = len(graph.receiver), len(graph.first_sent) - 1
    times = [np.full(messages, np.nan) for _ in range(4)]
    return StepState(
        graph.first_action[:-1].copy(),
        times[0],
        np.full(messages, -1, np.int64),
        times[1],
        times[2],
        times[3],
        np.full(actions, np.nan),
        np.full(actions, np.nan),
        np.zeros(graph.actors, np.int64),
        np.empty(messages, np.int64),
        np.empty(graph.actors, np.int64),
        np.empty(2 * graph.actors, np.int64),
    )


@inner
def _occupied(devices: Devices, actor: int, ready_s: float, duration_s: float) -> tuple[float, float]:
    """Return when an action that could start at ``ready_s`` really starts and ends; infinity if it never does.

    What is under way when the device leaves is lost, and starts again when it returns.
    """
    start_s = ready_s
    table = devices.speed_table[actor]
    absence = devices.first_absence[actor]
    while True:
        if table < 0:
            end_s = start_s + duration_s
        else:
            start_s = resumes_s(devices.tables, table, start_s)
            end_s = time_of(devices.tables, table, duration_s, start_s, np.inf) if start_s < np.inf else np.inf
        while absence < devices.first_absence[actor + 1] and devices.returns_s[absence] <= start_s:
            absence += 1
        if absence == devices.first_absence[actor + 1] or (
            end_s <= devices.leaves_s[absence] and start_s < devices.leaves_s[absence]
        ):
            return start_s, end_s
        start_s = devices.returns_s[absence]
        if start_s == np.inf:
            return start_s, start_s


@inner
def _hand_over(graph: StepGraph, times: StepTimes, lines: Lines, state: StepState, message: int, now_s: float) -> bool:
    """Put a message on its line at ``now_s``; return whether its arrival is known, as it is where nobody shares."""
    state.sent_s[message] = now_s
    channel = graph.channel[message]
    line = times.line[channel]
    if lines.mode[line] == SHARED:
        return False
    begin_s = max(now_s, lines.free_s[line])
    if lines.mode[line] == CONSTANT:
        departed_s = begin_s + times.transmission_s[message]
    else:
        departed_s = time_of(lines.tables, lines.rate_table[line], times.wire_bits[message], begin_s, np.inf)
        if departed_s == np.inf:
            return False
    latency_s = times.latency_s[message]
    if lines.latency_table[line] >= 0:
        latency_s = rate_at(lines.tables, lines.latency_table[line], departed_s) + times.jitter_s[message]
    state.departed_s[message], state.arrival_s[message] = transmit_fifo(
        line, departed_s, 0.0, latency_s, lines.free_s, lines.arrived_s
    )
    return True


@njit(cache=True)
def occupied(devices: Devices, actor: int, ready_s: float, duration_s: float) -> tuple[float, float]:
    """Return what `_occupied` does, to whoever is not compiled."""
    return _occupied(devices, actor, ready_s, duration_s)


@njit(cache=True)
def transmit(graph: StepGraph, times: StepTimes, lines: Lines, state: StepState, message: int, now_s: float) -> bool:
    """Return what `_hand_over` does, to whoever is not compiled."""
    return _hand_over(graph, times, lines, state, message, now_s)


@njit(cache=True)
def advance(
    graph: StepGraph,
    times: StepTimes,
    lines: Lines,
    devices: Devices,
    state: StepState,
    ready: Ints,
) -> tuple[int, int]:
    """Let the ready actors of a step go on as far as they get, and those whom their messages wake.

    Returns:
        How many messages it put into ``state.shared`` and actors into ``state.finished``, in the order of events.
    """
    shared, finished, stack = state.shared, state.finished, state.stack
    shared_count, finished_count = 0, 0
    stack[: len(ready)] = ready[::-1]
    height = len(ready)
    while height:
        height -= 1
        actor = stack[height]
        action = state.position[actor]
        clock_s = devices.clock_s[actor]
        last = graph.first_action[actor + 1]
        blocked = state.sending[actor] > 0
        while action < last and not blocked:
            ready_s = clock_s
            for place in range(graph.first_received[action], graph.first_received[action + 1]):
                message = graph.received[place]
                there_s = state.arrival_s[message]
                if np.isnan(there_s):
                    state.waiting[message] = actor
                    blocked = True
                    break
                state.wait_s[message] = ready_s
                if times.blocking[message]:
                    there_s = max(there_s, ready_s + there_s - state.sent_s[message])
                if there_s > ready_s:
                    ready_s = there_s
            if blocked:
                break
            start_s, end_s = _occupied(devices, actor, ready_s, times.duration_s[action])
            if end_s == np.inf:
                blocked = True
                break
            state.start_s[action], state.end_s[action] = start_s, end_s
            clock_s = end_s
            for message in range(graph.first_sent[action], graph.first_sent[action + 1]):
                if _hand_over(graph, times, lines, state, message, end_s):
                    if times.blocking[message]:
                        clock_s = max(clock_s, state.departed_s[message])
                    if state.waiting[message] >= 0:
                        stack[height] = state.waiting[message]
                        state.waiting[message] = -1
                        height += 1
                else:
                    shared[shared_count] = message
                    shared_count += 1
                    if times.blocking[message]:
                        state.sending[actor] += 1
                        blocked = True
            action += 1
        state.position[actor] = action
        devices.clock_s[actor] = clock_s
        if not blocked:
            finished[finished_count] = actor
            finished_count += 1
    return shared_count, finished_count
