"""One step of a plan as a graph in arrays: what each actor does in order, and the messages between them.

Everything that is timed, the compiled evaluator and the simulator alike, walks this one form.
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
    """Actions of actors (a device, or the devices of a tensor-parallel group) and messages between them.

    Actions are numbered actor by actor, in the order in which each does them; messages in the order of the
    actions that hand them over, so that action a sends messages first_sent[a] to first_sent[a + 1] - 1. A channel
    leads from one actor to another and has one sender.

    Attributes:
        first_action: Where each actor's actions begin, and after the last one their number, [actors + 1].
        first_received: Where each action's messages begin in `received`, [actions + 1].
        received: Messages in the order in which they are waited for, [messages].
        first_sent: First message that each action sends, [actions + 1].
        receiver: Actor that a message goes to, [messages].
        channel: What it travels on, [messages].
        channel_sender: Actor, [channels].
        channel_receiver: Actor, [channels].
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


@njit(cache=True)
def walk(graph: StepGraph) -> tuple[Ints, Ints, Ints]:
    """Return an order in which every action comes after what it waits for, for a scan without branches.

    Shapes: [actions] the actions in that order, shorter if the others wait for each other in a cycle; [actions] the
    actor of each; [actors] the action at which each actor stops.
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
) -> float:
    """Return the makespan on constant links that no two channels share, seconds.

    Args:
        graph: What is done.
        sequence: All actions, each after what it waits for; from `walk`.
        acting: The actor of each.
        duration_s: Of each action, [actions].
        transmission_s: How long each message keeps its channel busy, [messages].
        latency_s: From a message's departure to its arrival, unless one before it comes later, [messages].
        blocking: Whether sender and receiver do nothing else while a message is on its way, [messages].
    """
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
            if there_s > now_s:
                now_s = there_s
        now_s += duration_s[action]
        clock_s[actor] = now_s
        for message in range(graph.first_sent[action], graph.first_sent[action + 1]):
            departed_s, arrival_s[message] = transmit_fifo(
                graph.channel[message], now_s, transmission_s[message], latency_s[message], free_s, arrived_s
            )
            sent_s[message] = now_s
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
) -> Floats:
    """Return the makespans of many variants of one graph; the times have a row for each."""
    result = np.empty(len(duration_s))
    for row in range(len(duration_s)):
        result[row] = longest_path(
            graph, sequence, acting, duration_s[row], transmission_s[row], latency_s[row], blocking
        )
    return result
