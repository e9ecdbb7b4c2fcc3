"""Advances devices in compiled code: each device works until it needs a message whose arrival is not known yet.

Actions in a fixed order and messages over exclusive lines need no SimPy events: their times follow from earlier ones.
Only messages on shared lines are returned, which connections send.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from planner.schedules.kernel.arrays import inner
from planner.schedules.kernel.timing import transmit_fifo
from planner.step.graph import Flags, Floats, Ints, StepGraph
from sim.kernel.piecewise import RateTables, rate_at, resumes_s, time_of

# Modes of a line: constant rate, a rate that follows a table, or links shared with other lines.
CONSTANT, TABLED, SHARED = 0, 1, 2


class StepState(NamedTuple):
    """Progress of a step. Times are seconds from the start of the run, nan where not known yet.

    Attributes:
        position: Next action of each actor, [actors].
        arrival_s: When each message arrives, [messages].
        waiting: Actor that waits for each message, -1 for none, [messages].
        wait_s: When the receiver began to wait for a message, [messages].
        sent_s: When each message was ready to be sent, in the memory of the sender's host, [messages].
        departed_s: When the last bit of each message left, [messages].
        start_s: Start of each action, [actions].
        end_s: End of each action, [actions].
        sending: Number of messages on shared lines whose departure an actor waits for, [actors].
        unsent: Output of `advance`: messages that it left to connections, [messages].
        finished: Output of `advance`: actors that have finished the step, [actors].
        stack: Working memory of `advance`: actors to advance next, [2 * actors].
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
    unsent: Ints
    finished: Ints
    stack: Ints


class StepTimes(NamedTuple):
    """Durations of the actions and messages of one step.

    Attributes:
        duration_s: Duration of each action, [actions].
        transmission_s: Time for which a message keeps a line of constant rate busy, [messages].
        wire_bits: Bits that a message puts on a line, [messages].
        latency_s: Latency of a message on a line of constant latency, jitter included, [messages].
        jitter_s: Delay by jitter and hand-over of a message on a line of varying latency, [messages].
        line: Line of each channel, [channels].
        blocking: Whether sender and receiver compute nothing while a message is under way, [messages].
        copy_out_s: Time for which a message is copied to the sender's host, [messages].
        copy_in_s: Time for which a message is copied from the receiver's host, [messages].
    """

    duration_s: Floats
    transmission_s: Floats
    wire_bits: Floats
    latency_s: Floats
    jitter_s: Floats
    line: Ints
    blocking: Flags
    copy_out_s: Floats
    copy_in_s: Floats


class Lines(NamedTuple):
    """Lines of a run, each one direction between two devices.

    Attributes:
        mode: `CONSTANT`, `TABLED` or `SHARED`, [lines].
        free_s: When the last message so far has departed, seconds, [lines].
        arrived_s: When the last message so far has arrived, seconds, [lines].
        rate_table: Number of the table of a `TABLED` line's rate, [lines].
        latency_table: Number of the table of a line's latency, -1 if it is constant, [lines].
        tables: Rates in bits per second, and latencies in seconds.
    """

    mode: Ints
    free_s: Floats
    arrived_s: Floats
    rate_table: Ints
    latency_table: Ints
    tables: RateTables


class Devices(NamedTuple):
    """Clocks, speeds and absences of the actors' devices.

    Attributes:
        clock_s: Time up to which each actor has worked, seconds, [actors].
        speed_table: Number of the table of an actor's speed, -1 if that is always 1, [actors].
        tables: Speeds relative to the profile.
        first_absence: Index of each actor's first absence in the next two arrays, [actors + 1].
        leaves_s: Starts of absences, seconds, rising per actor, [absences].
        returns_s: Ends of absences, seconds, [absences].
        copied_out_s: End of each actor's last copy to its host so far, seconds, [actors].
        copied_in_s: End of each actor's last copy from its host so far, seconds, [actors].
    """

    clock_s: Floats
    speed_table: Ints
    tables: RateTables
    first_absence: Ints
    leaves_s: Floats
    returns_s: Floats
    copied_out_s: Floats
    copied_in_s: Floats


def new_state(graph: StepGraph) -> StepState:
    """Return the state of a step in which nothing has happened yet."""
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
    """Return when an action that could start at ``ready_s`` starts and ends, seconds; infinity if it never does.

    An action that its device carries out when the device leaves is lost, and starts again when the device returns.
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
def _transmit(
    graph: StepGraph,
    times: StepTimes,
    lines: Lines,
    devices: Devices,
    state: StepState,
    actor: int,
    message: int,
    now_s: float,
) -> bool:
    """Transmit a message of an actor at ``now_s`` unless its line is shared; return whether its arrival is known.

    The actor's copy engine copies it to the host before, after the actor's earlier messages.
    """
    now_s = max(now_s, devices.copied_out_s[actor]) + times.copy_out_s[message]
    devices.copied_out_s[actor] = now_s
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
    """Return when an action starts and ends; `_occupied` for callers that are not compiled."""
    return _occupied(devices, actor, ready_s, duration_s)


@njit(cache=True)
def transmit(
    graph: StepGraph,
    times: StepTimes,
    lines: Lines,
    devices: Devices,
    state: StepState,
    actor: int,
    message: int,
    now_s: float,
) -> bool:
    """Transmit a message; `_transmit` for callers that are not compiled."""
    return _transmit(graph, times, lines, devices, state, actor, message, now_s)


@njit(cache=True)
def advance(
    graph: StepGraph,
    times: StepTimes,
    lines: Lines,
    devices: Devices,
    state: StepState,
    ready: Ints,
) -> tuple[int, int]:
    """Advance the ready actors of a step, and the actors that receive their messages, until every actor waits.

    Returns:
        Number of messages put into ``state.unsent``, and of actors put into ``state.finished``, in order of events.
    """
    unsent, finished, stack = state.unsent, state.finished, state.stack
    unsent_count, finished_count = 0, 0
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
            ready_s, copied_s = clock_s, devices.copied_in_s[actor]
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
                copied_s = max(there_s, copied_s) + times.copy_in_s[message]
                if copied_s > ready_s:
                    ready_s = copied_s
            if blocked:
                break
            devices.copied_in_s[actor] = copied_s
            start_s, end_s = _occupied(devices, actor, ready_s, times.duration_s[action])
            if end_s == np.inf:
                blocked = True
                break
            state.start_s[action], state.end_s[action] = start_s, end_s
            clock_s = end_s
            for message in range(graph.first_sent[action], graph.first_sent[action + 1]):
                if _transmit(graph, times, lines, devices, state, actor, message, end_s):
                    if times.blocking[message]:
                        clock_s = max(clock_s, state.departed_s[message])
                    if state.waiting[message] >= 0:
                        stack[height] = state.waiting[message]
                        state.waiting[message] = -1
                        height += 1
                else:
                    unsent[unsent_count] = message
                    unsent_count += 1
                    if times.blocking[message]:
                        state.sending[actor] += 1
                        blocked = True
            action += 1
        state.position[actor] = action
        devices.clock_s[actor] = clock_s
        if not blocked:
            finished[finished_count] = actor
            finished_count += 1
    return unsent_count, finished_count
