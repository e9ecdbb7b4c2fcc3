"""Carries out a step whose messages share links, in compiled code: rates change when a message starts or departs.

Each ordered pair of devices is a line that carries one message at a time. Two models of shared links, those of
`sim.network`: messages get max-min fair rates; or, with the queues that the windows of TCP make, links serve windows of
bytes first come, first served. A message waits until its connection's window lets it through.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from planner.schedules.dynamic import SAME_MOMENT_S
from planner.schedules.kernel.arrays import inner
from planner.schedules.kernel.timing import transmit_fifo
from planner.step.graph import Floats, Ints, StepGraph
from planner.step.shared_links.choices import Choices
from planner.step.shared_links.dynamic_order import Progress, begin_choices, choose, new_progress, record_choice
from planner.step.shared_links.flow_state import Flows, Network, State, new_state, opening_s


class _Run(NamedTuple):
    """A step that is being carried out: what it reads, how far it is, and the actors that go on next."""

    graph: StepGraph
    network: Network
    duration_s: Floats
    flows: Flows
    choices: Choices
    progress: Progress
    state: State
    stack: Ints


@njit(cache=True)
def carry_out(
    graph: StepGraph, network: Network, duration_s: Floats, flows: Flows, choices: Choices
) -> tuple[float, Floats]:  # pragma: no cover
    """Return the makespan of a step in seconds, infinite if actions wait for ever, and the end of each action.

    Args:
        graph: Actions and messages.
        network: Lines and the links that they share.
        duration_s: Duration of each action, seconds, [actions].
        flows: Sizes and times of the messages.
        choices: Actions that actors choose from, instead of running them in the graph's order.
    """
    state, actors, progress = new_state(graph, network), len(graph.first_action) - 1, new_progress(choices)
    sharing: Ints = np.flatnonzero(~network.alone).astype(np.int64)
    fair: Ints = np.flatnonzero(~network.alone & ~network.queued).astype(np.int64)
    served: Ints = np.flatnonzero(~network.alone & network.queued).astype(np.int64)
    stack, height, now_s, turns = np.empty(actors + len(graph.receiver) + 1, np.int64), actors, 0.0, 0
    stack[:actors] = np.arange(actors - 1, -1, -1)
    run = _Run(graph, network, duration_s, flows, choices, progress, state, stack)
    while True:
        while height:
            height = _advance(run, height - 1, now_s)
        next_s, choose_s, chooser = np.inf, np.inf, -1
        for line in sharing:
            next_s = min(next_s, state.event_s[line])
        for actor in choices.actors:
            if progress.choose_s[actor] < choose_s:
                choose_s, chooser = progress.choose_s[actor], actor
        if choose_s + SAME_MOMENT_S < next_s:
            # After everything else of this moment, which may make further actions ready.
            height = _choose(run, chooser, choose_s)
            continue
        if next_s == np.inf:
            break
        elapsed_s, now_s = next_s - now_s, next_s
        for line in sharing:
            if state.active[line]:
                state.left_bits[line] -= state.rate_bps[line] * elapsed_s
        for line in sharing:
            if state.event_s[line] > now_s:
                continue
            if state.active[line]:
                if state.rest_bits[line] > 0:
                    turns = _start(network, state, line, state.rest_bits[line], turns)
                    continue
                height = _depart(run, line, height, now_s)
            head = state.head[line]
            if head < 0:
                continue
            state.event_s[line] = max(now_s, state.sent_s[head])
            if state.event_s[line] <= now_s and not state.admitted[line]:
                if network.grows:
                    state.event_s[line] += opening_s(network, state, line, flows.bits[head], now_s)
                elif network.queued[line]:
                    state.event_s[line] += _waiting_s(network, flows, state, line, now_s)
                state.admitted[line] = True
            if state.event_s[line] <= now_s:
                turns = _start(network, state, line, flows.bits[head], turns)
        if len(served):
            _serve(network, flows, state, served, now_s)
        if len(fair):
            _share(network, flows, state, fair, now_s)
    for actor in range(actors):
        if state.position[actor] < graph.first_action[actor + 1]:
            return np.inf, state.ended_s
    return (state.clock_s.max() if actors else 0.0), state.ended_s


@inner
def _start(network: Network, state: State, line: int, bits: float, turns: int) -> int:  # pragma: no cover
    """Send a message's next bits, at most a window; return the number of turns so far."""
    state.active[line] = True
    state.left_bits[line] = min(bits, network.window_bits[line])
    state.rest_bits[line] = bits - state.left_bits[line]
    state.turn[line] = turns
    return turns + 1


@inner
def _waiting_s(network: Network, flows: Flows, state: State, line: int, now_s: float) -> float:  # pragma: no cover
    """Return the delay that the window adds to the first message of a line, seconds.

    The window opens at a constant rate, and holds no more than all of its bits.
    """
    message, window_bits = state.head[line], network.window_bits[line]
    if window_bits == np.inf:
        return 0.0
    refill_bps = window_bits / network.round_trip_s[line]
    bits, alone_s = flows.bits[message], flows.bits[message] / flows.ceiling_bps[message]
    opened_bits = min(window_bits, state.open_bits[line] + refill_bps * (now_s - state.open_s[line]))
    waiting_s = max(0.0, (bits - opened_bits) / refill_bps - alone_s)
    sent_s = waiting_s + alone_s
    state.open_bits[line] = max(0.0, min(window_bits, opened_bits + refill_bps * sent_s - bits))
    state.open_s[line] = now_s + sent_s
    return float(waiting_s)


@inner
def _advance(run: _Run, height: int, now_s: float) -> int:  # pragma: no cover
    """Let the actor ``stack[height]`` work until it waits; return the height of the stack with the actors it wakes."""
    graph, flows, state, actor = run.graph, run.flows, run.state, run.stack[height]
    action, clock_s = state.position[actor], state.clock_s[actor]
    while action < graph.first_action[actor + 1] and not state.sending[actor]:
        if run.choices.chosen[action]:
            begin_choices(run.choices, run.progress, actor, clock_s)
            break
        ready_s, copied_s, missing = clock_s, state.copied_in_s[actor], -1
        for place in range(graph.first_received[action], graph.first_received[action + 1]):
            message = graph.received[place]
            there_s = state.arrival_s[message]
            if np.isnan(there_s):
                missing = message
                break
            if flows.blocking[message]:
                there_s = max(there_s, ready_s + there_s - state.sent_s[message])
            copied_s = max(there_s, copied_s) + flows.copy_in_s[message]
            ready_s = max(ready_s, copied_s)
        if missing >= 0:
            state.waiting[missing] = actor
            break
        state.copied_in_s[actor] = copied_s
        end_s = ready_s + run.duration_s[action]
        state.ended_s[action] = end_s
        clock_s, height = _send(run, height, action, actor, end_s, now_s)
        action += 1
    state.position[actor], state.clock_s[actor] = action, clock_s
    return height


@inner
def _choose(run: _Run, actor: int, now_s: float) -> int:  # pragma: no cover
    """Let an actor begin one of the actions that it chooses from; return the height of the stack."""
    graph, choices, progress, state = run.graph, run.choices, run.progress, run.state
    position = state.position[actor]
    action = choose(choices, progress, graph, state.arrival_s, actor, choices.step[position], now_s)
    if action < 0:
        return 0
    record_choice(choices, progress, actor, action)
    start_s = now_s
    for place in range(graph.first_received[action], graph.first_received[action + 1]):
        # The last input may arrive within `SAME_MOMENT_S` from now.
        start_s = max(start_s, state.arrival_s[graph.received[place]])
    end_s = state.ended_s[action] = start_s + run.duration_s[action]
    state.position[actor], state.clock_s[actor], progress.choose_s[actor] = position + 1, end_s, end_s
    _, height = _send(run, 0, action, actor, end_s, now_s)
    if not progress.left[actor]:
        progress.choose_s[actor] = np.inf
        run.stack[height] = actor
        height += 1
    return height


@inner
def _send(
    run: _Run, height: int, action: int, actor: int, end_s: float, now_s: float
) -> tuple[float, int]:  # pragma: no cover
    """Send the messages of an action that ends at ``end_s``.

    Returns:
        When the actor can go on, unless its messages wait for others, and the height of the stack.
    """
    graph, network, flows, state = run.graph, run.network, run.flows, run.state
    clock_s = end_s
    for message in range(graph.first_sent[action], graph.first_sent[action + 1]):
        state.copied_out_s[actor] = max(end_s, state.copied_out_s[actor]) + flows.copy_out_s[message]
        sent_s = state.copied_out_s[actor]
        state.sent_s[message] = sent_s
        line = network.line[graph.channel[message]]
        if network.alone[line]:
            departed_s, arrival_s = transmit_fifo(
                line, sent_s, flows.transmission_s[message], flows.latency_s[message], state.free_s, state.arrived_s
            )
            state.arrival_s[message] = arrival_s
            if flows.blocking[message]:
                clock_s = max(clock_s, departed_s)
            height = _arrive(run, height, message)
            continue
        if state.head[line] < 0:
            state.head[line] = message
            state.event_s[line] = max(sent_s, now_s)
        else:
            state.following[state.tail[line]] = message
        state.tail[line] = message
        if flows.blocking[message]:
            state.sending[actor] += 1
    return clock_s, height


@inner
def _arrive(run: _Run, height: int, message: int) -> int:  # pragma: no cover
    """Let the receiver of a message, whose arrival is known, go on; return the height of the stack."""
    progress, state = run.progress, run.state
    if run.choices.awaited[message]:
        actor, copy_in_s = run.graph.receiver[message], run.flows.copy_in_s[message]
        if copy_in_s > 0:
            copied_s = max(state.arrival_s[message], state.copied_in_s[actor]) + copy_in_s
            state.arrival_s[message] = state.copied_in_s[actor] = copied_s
        if progress.left[actor]:
            at_s = max(state.arrival_s[message], state.clock_s[actor])
            progress.choose_s[actor] = min(progress.choose_s[actor], at_s)
    elif state.waiting[message] >= 0:
        run.stack[height] = state.waiting[message]
        state.waiting[message] = -1
        height += 1
    return height


@inner
def _depart(run: _Run, line: int, height: int, now_s: float) -> int:  # pragma: no cover
    """End the first message of a line; return the height of the stack with the actors that go on."""
    flows, state = run.flows, run.state
    message = state.head[line]
    state.head[line], state.event_s[line] = state.following[message], np.inf
    state.active[line], state.admitted[line] = False, False
    state.arrived_s[line] = max(state.arrived_s[line], now_s + flows.latency_s[message])
    state.arrival_s[message] = state.arrived_s[line]
    height = _arrive(run, height, message)
    if flows.blocking[message]:
        sender = flows.sender[message]
        state.clock_s[sender] = max(state.clock_s[sender], now_s)
        state.sending[sender] -= 1
        if not state.sending[sender]:
            run.stack[height] = sender
            height += 1
    return height


@inner
def _go_on(state: State, line: int, rate_bps: float, now_s: float) -> None:  # pragma: no cover
    """Set the rate of the bits of a line that are under way, and the time when the last of them departs."""
    state.rate_bps[line] = rate_bps
    if state.left_bits[line] <= 0:
        state.event_s[line] = now_s
    else:
        state.event_s[line] = now_s + state.left_bits[line] / rate_bps if rate_bps > 0 else np.inf


@inner
def _serve(network: Network, flows: Flows, state: State, sharing: Ints, now_s: float) -> None:  # pragma: no cover
    """Give all bits under way, in the order of their starts, the rate that earlier ones leave on their links."""
    count, ordered, left_bps = 0, state.growing, state.left_bps
    for link in range(len(left_bps)):
        left_bps[link] = network.capacity_bps[link]
    for line in sharing:
        if state.active[line]:
            place = count
            while place and state.turn[ordered[place - 1]] > state.turn[line]:
                ordered[place] = ordered[place - 1]
                place -= 1
            ordered[place] = line
            count += 1
    for index in range(count):
        line = ordered[index]
        rate_bps = flows.ceiling_bps[state.head[line]]
        for place in range(network.first_link[line], network.first_link[line + 1]):
            rate_bps = min(rate_bps, left_bps[network.link[place]])
        for place in range(network.first_link[line], network.first_link[line + 1]):
            left_bps[network.link[place]] -= rate_bps
        _go_on(state, line, rate_bps, now_s)


@inner
def _share(network: Network, flows: Flows, state: State, sharing: Ints, now_s: float) -> None:  # pragma: no cover
    """Give all bits under way their max-min fair rates."""
    links, count, level_bps = len(network.capacity_bps), 0, 0.0
    growing, left_bps, users, full = state.growing, state.left_bps, state.users, state.full
    for link in range(len(left_bps)):
        left_bps[link] = network.capacity_bps[link]
    for line in sharing:
        if state.active[line]:
            growing[count] = line
            count += 1
            for place in range(network.first_link[line], network.first_link[line + 1]):
                users[network.link[place]] += network.weight[line]
    while count:
        step_bps = np.inf
        for link in range(links):
            if users[link]:
                step_bps = min(step_bps, left_bps[link] / users[link])
        for index in range(count):
            line = growing[index]
            step_bps = min(step_bps, flows.ceiling_bps[state.head[line]] / network.weight[line] - level_bps)
        level_bps += step_bps
        for link in range(links):
            if users[link]:
                full[link] = left_bps[link] / users[link] <= step_bps
                left_bps[link] = max(0.0, left_bps[link] - step_bps * users[link])
        still = 0
        for index in range(count):
            line = growing[index]
            ceiling_bps = flows.ceiling_bps[state.head[line]]
            stays = ceiling_bps > level_bps * network.weight[line] * (1 + 1e-12)
            for place in range(network.first_link[line], network.first_link[line + 1]):
                stays = stays and not full[network.link[place]]
            if stays:
                growing[still] = line
                still += 1
                continue
            _go_on(state, line, min(level_bps * network.weight[line], ceiling_bps), now_s)
            for place in range(network.first_link[line], network.first_link[line + 1]):
                users[network.link[place]] -= network.weight[line]
        count = still
