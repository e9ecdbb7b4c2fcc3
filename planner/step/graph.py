"""One step of a plan as a graph in arrays: the actions of each actor in order, and the messages between them.

Both `planner.step.evaluate` and the simulator compute times from this graph.
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from planner.schedules.kernel.timing import transmit_fifo

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


class StepGraph(NamedTuple):
    """Actions of actors and the messages between them. An actor is a device, a tensor-parallel group or a stream.

    Actions are numbered actor by actor, in the order in which an actor runs them. Messages are numbered in the order of
    the actions that send them: action a sends messages first_sent[a] to first_sent[a + 1] - 1. A channel is an ordered
    pair of actors.

    Attributes:
        first_action: First action of each actor; last the number of actions, [actors + 1].
        first_received: First entry of each action in ``received``; last the number of entries, [actions + 1].
        received: Message indices, grouped by the action that waits for them, [messages].
        first_sent: First message that each action sends; last the number of messages, [actions + 1].
        receiver: Actor that receives each message, [messages].
        channel: Channel of each message, [messages].
        channel_sender: Actor that sends on each channel, [channels].
        channel_receiver: Actor that receives from each channel, [channels].
    """

    first_action: Ints
    first_received: Ints
    received: Ints
    first_sent: Ints
    receiver: Ints
    channel: Ints
    channel_sender: Ints
    channel_receiver: Ints

    @property
    def actors(self) -> int:
        """Number of actors."""
        return len(self.first_action) - 1

    @property
    def actions(self) -> int:
        """Number of actions."""
        return len(self.first_sent) - 1

    @property
    def messages(self) -> int:
        """Number of messages."""
        return len(self.receiver)


def repeated(graph: StepGraph, times: int) -> tuple[StepGraph, Ints, Ints, Ints]:
    """Return the graph of several equal steps in a row, each actor going on with the next one when it is done.

    Returns:
        The graph; the action of ``graph`` that each of its actions repeats, the same of its messages, and the step of
        each of its actions, from 0.
    """
    of_message = graph.first_sent[graph.first_action]
    of_received = graph.first_received[graph.first_action]
    action, step = _in_a_row(graph.first_action, times)
    message, message_step = _in_a_row(of_message, times)
    entry, entry_step = _in_a_row(of_received, times)
    number = np.empty((times, graph.messages), np.int64)
    number[message_step, message] = np.arange(len(message))
    several = StepGraph(
        times * graph.first_action,
        _bounds(np.diff(graph.first_received)[action]),
        number[entry_step, graph.received[entry]],
        _bounds(np.diff(graph.first_sent)[action]),
        graph.receiver[message],
        graph.channel[message],
        graph.channel_sender,
        graph.channel_receiver,
    )
    return several, action, message, step


def _in_a_row(first: Ints, times: int) -> tuple[Ints, Ints]:
    """Return the members of groups, each group several times in a row, and the repetition of each, from 0.

    ``first`` has the first member of each group, and last the number of members, [groups + 1].
    """
    sizes = np.repeat(np.diff(first), times)
    step = np.repeat(np.tile(np.arange(times), len(first) - 1), sizes)
    member = np.arange(sizes.sum()) + np.repeat(np.repeat(first[:-1], times) - _bounds(sizes)[:-1], sizes)
    return member, step


def _bounds(sizes: Ints) -> Ints:
    return np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)


@njit(cache=True)
def walk(graph: StepGraph) -> tuple[Ints, Ints, Ints]:
    """Return a topological order of the actions.

    Returns:
        The actions in topological order, without those that a cycle blocks, [at most actions]; the actor of each of
        these, of the same shape; and the first action that each actor cannot run, or its last action + 1, [actors].
    """
    actors = len(graph.first_action) - 1
    actions = len(graph.first_sent) - 1
    sequence = np.empty(actions, np.int64)
    acting = np.empty(actions, np.int64)
    position = graph.first_action[:-1].copy()
    sent = np.zeros(len(graph.receiver), np.bool_)
    waiting = np.full(len(graph.receiver), -1, np.int64)
    stack = np.arange(actors - 1, -1, -1)
    height, count = actors, 0
    while height:
        height -= 1
        actor = stack[height]
        action = position[actor]
        while action < graph.first_action[actor + 1]:
            missing = -1
            for index in range(graph.first_received[action], graph.first_received[action + 1]):
                if not sent[graph.received[index]]:
                    missing = graph.received[index]
                    break
            if missing >= 0:
                waiting[missing] = actor
                break
            sequence[count] = action
            acting[count] = actor
            count += 1
            for message in range(graph.first_sent[action], graph.first_sent[action + 1]):
                sent[message] = True
                if waiting[message] >= 0:
                    stack[height] = waiting[message]
                    waiting[message] = -1
                    height += 1
            action += 1
        position[actor] = action
    return sequence[:count], acting[:count], position


@njit(cache=True)
def longest_path(
    graph: StepGraph,
    sequence: Ints,
    acting: Ints,
    duration_s: Floats,
    transmission_s: Floats,
    latency_s: Floats,
    blocking: Flags,
    copy_out_s: Floats,
    copy_in_s: Floats,
) -> float:
    """Return the makespan of a step on links of constant rate, none of which two channels share, seconds.

    Args:
        graph: Actions and messages.
        sequence: All actions in topological order, from `walk`.
        acting: Actor of each action in ``sequence``.
        duration_s: Duration of each action, seconds, [actions].
        transmission_s: Time for which each message keeps its channel busy, seconds, [messages].
        latency_s: Time from a message's departure to its arrival, seconds, [messages]; messages of a channel arrive in
            order, so that a message may have to wait for an earlier one.
        blocking: Whether a message keeps sender and receiver from computing while it is sent, [messages].
        copy_out_s: Time for which each message is copied to the sender's host, seconds, [messages].
        copy_in_s: Time for which each message is copied from the receiver's host, seconds, [messages]; in the order in
            which the receiver's actions need them.
    """
    copied_out_s = np.zeros(len(graph.first_action) - 1)
    copied_in_s = np.zeros(len(graph.first_action) - 1)
    sent_s = np.empty(len(graph.receiver))
    clock_s = np.zeros(len(graph.first_action) - 1)
    free_s = np.zeros(len(graph.channel_sender))
    arrival_s = np.empty(len(graph.receiver))
    arrived_s = np.zeros(len(graph.channel_sender))
    for index in range(len(sequence)):
        action = sequence[index]
        actor = acting[index]
        now_s = clock_s[actor]
        for place in range(graph.first_received[action], graph.first_received[action + 1]):
            message = graph.received[place]
            there_s = arrival_s[message]
            if blocking[message]:
                there_s = max(there_s, now_s + there_s - sent_s[message])
            there_s = max(there_s, copied_in_s[actor]) + copy_in_s[message]
            copied_in_s[actor] = there_s
            if there_s > now_s:
                now_s = there_s
        now_s += duration_s[action]
        clock_s[actor] = now_s
        for message in range(graph.first_sent[action], graph.first_sent[action + 1]):
            copied_out_s[actor] = max(now_s, copied_out_s[actor]) + copy_out_s[message]
            sent_s[message] = copied_out_s[actor]
            departed_s, arrival_s[message] = transmit_fifo(
                graph.channel[message], sent_s[message], transmission_s[message], latency_s[message], free_s, arrived_s
            )
            if blocking[message]:
                clock_s[actor] = max(clock_s[actor], departed_s)
    return clock_s.max() if len(clock_s) else 0.0


@njit(cache=True)
def longest_paths(
    graph: StepGraph,
    sequence: Ints,
    acting: Ints,
    duration_s: Floats,
    transmission_s: Floats,
    latency_s: Floats,
    blocking: Flags,
    copy_out_s: Floats,
    copy_in_s: Floats,
) -> Floats:
    """Return the makespan for each row of times, seconds, [rows].

    Arguments are those of `longest_path`; ``duration_s`` has shape [rows, actions], ``transmission_s`` and
    ``latency_s`` have shape [rows, messages].
    """
    result = np.empty(len(duration_s))
    for row in range(len(duration_s)):
        result[row] = longest_path(
            graph,
            sequence,
            acting,
            duration_s[row],
            transmission_s[row],
            latency_s[row],
            blocking,
            copy_out_s,
            copy_in_s,
        )
    return result
