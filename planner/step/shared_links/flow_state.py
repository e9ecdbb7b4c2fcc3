"""What the computation of a step with shared links reads and changes: lines, links, messages and their progress.

Windows of TCP that open with acknowledgements and halve on idle lines are those of `sim.network.send_window`.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from planner.schedules.kernel.arrays import inner
from planner.step.graph import Flags, Floats, Ints, StepGraph

# Most parts of windows of a line that are acknowledged one by one; bytes of further ones count with the last part.
MOST_PARTS = 64


class Network(NamedTuple):
    """Lines between devices, and the links that several lines share.

    Attributes:
        line: Line of each channel, [channels].
        alone: Whether a line's messages take their transmission time, whatever other lines carry, [lines].
        weight: Number of connections of each line, [lines].
        first_link: First entry of each line in ``link``; last the number of entries, [lines + 1].
        link: Indices of the links that each line shares with others, grouped by line.
        capacity_bps: Rate of payload of each shared link, [links].
        queued: Whether the links of a line serve windows of bytes first come, first served, [lines].
        window_bits: With queues, the bits that a line may have unacknowledged, [lines].
        grows: Whether windows open with acknowledgements and halve on idle lines; otherwise they are always open.
        path_bps: Rate of payload of each line's path without other flows, [lines].
        round_trip_s: Latency there and back of each line, seconds, [lines].
        initial_bits: Window of a new connection of each line; no window gets smaller, [lines].
        idle_s: Time without the round trip after which the window of an idle line halves, seconds.
    """

    line: Ints
    alone: Flags
    weight: Ints
    first_link: Ints
    link: Ints
    capacity_bps: Floats
    queued: Flags
    window_bits: Floats
    grows: bool
    path_bps: Floats
    round_trip_s: Floats
    initial_bits: Floats
    idle_s: float


class Flows(NamedTuple):
    """The messages of a step as flows.

    Attributes:
        transmission_s: Transmission time of each message on an idle path, seconds, [messages].
        bits: Payload of each message, [messages].
        ceiling_bps: Highest rate of each message on its path, [messages].
        latency_s: Time from departure to arrival, seconds, [messages].
        blocking: Whether sender and receiver compute nothing while a message is under way, [messages].
        sender: Actor that sends each message, [messages].
        copy_out_s: Time for which each message is copied to the sender's host, seconds, [messages].
        copy_in_s: Time for which each message is copied from the receiver's host, seconds, [messages].
    """

    transmission_s: Floats
    bits: Floats
    ceiling_bps: Floats
    latency_s: Floats
    blocking: Flags
    sender: Ints
    copy_out_s: Floats
    copy_in_s: Floats


class State(NamedTuple):
    """Progress of a step, times in seconds from its start.

    Attributes:
        clock_s: Time up to which each actor has worked, [actors].
        position: Next action of each actor, [actors].
        sending: Number of messages whose departure each actor waits for, [actors].
        copied_out_s: End of each actor's last copy to its host so far, [actors].
        copied_in_s: End of each actor's last copy from its host so far, [actors].
        ended_s: End of each action, infinite while it is not known, [actions].
        arrival_s: Arrival of each message, nan while it is not known, [messages].
        sent_s: Time at which each message was ready to be sent, [messages].
        waiting: Actor that waits for each message, -1 for none, [messages].
        following: Message behind each message in the queue of its line, -1 for none, [messages].
        head: First message in the queue of each line, -1 for none, [lines].
        tail: Last message in the queue of each line, [lines].
        free_s: Departure of the last message so far, [lines].
        arrived_s: Arrival of the last message so far, [lines].
        event_s: Next start or departure of each line, infinite if there is none, [lines].
        active: Whether bits of the first message are under way, [lines].
        left_bits: Bits under way that have not departed yet, [lines].
        rate_bps: Rate of these bits, [lines].
        rest_bits: With queues, bits of the first message behind those under way, [lines].
        admitted: With queues, whether the window has let the first message through, [lines].
        turn: With queues, the order in which the bits under way have started, [lines].
        open_bits: With queues, bits that the window lets through, [lines].
        open_s: With queues, the time for which ``open_bits`` is known, [lines]; if windows grow, the end of the last
            message.
        grown_bits: If windows grow, the window, [lines].
        in_flight_bits: If windows grow, the bits that are not acknowledged, [lines].
        most_in_flight_bits: If windows grow, most of these bits since the latest message began, [lines].
        part_count: If windows grow, the number of parts of windows in flight, [lines].
        first_part: If windows grow, the place of the first of these parts, [lines].
        part_s: If windows grow, when each part is acknowledged, in a ring, [lines, parts].
        part_bits: If windows grow, the bits of each part, in a ring, [lines, parts].
        growing: Working memory of `planner.step.shared_links.flows`: lines whose rate is not known yet, [lines].
        left_bps: Working memory of `planner.step.shared_links.flows`: rate that links have left, [links].
        users: Working memory of `planner.step.shared_links.flows`: connections without a rate on each link, [links].
        full: Working memory of `planner.step.shared_links.flows`: whether links have nothing left, [links].
    """

    clock_s: Floats
    position: Ints
    sending: Ints
    copied_out_s: Floats
    copied_in_s: Floats
    ended_s: Floats
    arrival_s: Floats
    sent_s: Floats
    waiting: Ints
    following: Ints
    head: Ints
    tail: Ints
    free_s: Floats
    arrived_s: Floats
    event_s: Floats
    active: Flags
    left_bits: Floats
    rate_bps: Floats
    rest_bits: Floats
    admitted: Flags
    turn: Ints
    open_bits: Floats
    open_s: Floats
    grown_bits: Floats
    in_flight_bits: Floats
    most_in_flight_bits: Floats
    part_count: Ints
    first_part: Ints
    part_s: Floats
    part_bits: Floats
    growing: Ints
    left_bps: Floats
    users: Ints
    full: Flags


@njit(cache=True)
def new_state(graph: StepGraph, network: Network) -> State:  # pragma: no cover
    """Return the state before the start of a step."""
    actors, messages = len(graph.first_action) - 1, len(graph.receiver)
    lines, links = len(network.weight), len(network.capacity_bps)
    windows = lines if network.grows else 0
    return State(
        np.zeros(actors),
        graph.first_action[:-1].copy(),
        np.zeros(actors, np.int64),
        np.zeros(actors),
        np.zeros(actors),
        np.full(len(graph.first_sent) - 1, np.inf),
        np.full(messages, np.nan),
        np.zeros(messages),
        np.full(messages, -1, np.int64),
        np.full(messages, -1, np.int64),
        np.full(lines, -1, np.int64),
        np.full(lines, -1, np.int64),
        np.zeros(lines),
        np.zeros(lines),
        np.full(lines, np.inf),
        np.zeros(lines, np.bool_),
        np.zeros(lines),
        np.zeros(lines),
        np.zeros(lines),
        np.zeros(lines, np.bool_),
        np.zeros(lines, np.int64),
        network.window_bits.copy(),
        np.zeros(lines),
        network.initial_bits.copy(),
        np.zeros(lines),
        np.zeros(lines),
        np.zeros(lines, np.int64),
        np.zeros(lines, np.int64),
        np.zeros((windows, MOST_PARTS)),
        np.zeros((windows, MOST_PARTS)),
        np.zeros(lines, np.int64),
        np.zeros(links),
        np.zeros(links, np.int64),
        np.zeros(links, np.bool_),
    )


# Number of parts of a window that are acknowledged one by one, since acknowledgements arrive while it is sent, and the
# share of a part that is rounding, which must not delay a part.
PARTS, ROUNDING = 16, 1e-9

# Parts of the largest window after which the delays of a window repeat: after the first window all parts are equal, and
# the second one ends a round trip, or a window's transmission, after it.
SETTLED_PARTS = 2 * PARTS

# Halvings after which every window has its initial size.
MOST_HALVINGS = 64


@inner
def opening_s(network: Network, state: State, line: int, bits: float, now_s: float) -> float:  # pragma: no cover
    """Return the delay that its window adds to a message of a line that begins now, seconds."""
    path_bps, round_trip_s = network.path_bps[line], network.round_trip_s[line]
    if bits <= 0 or round_trip_s <= 0:
        return 0.0
    timeout_s = network.idle_s + round_trip_s
    _acknowledge(state, line, now_s)
    if now_s - state.open_s[line] >= timeout_s:
        halvings = np.floor(min((now_s - state.open_s[line]) / timeout_s, MOST_HALVINGS))
        state.grown_bits[line] = max(network.initial_bits[line], state.grown_bits[line] * 0.5**halvings)
    clock_s, left_bits, state.most_in_flight_bits[line] = now_s, bits, 0.0
    equal_parts = 0
    while left_bits > 0:
        _acknowledge(state, line, clock_s)
        open_bits = min(state.grown_bits[line], network.window_bits[line])
        if equal_parts >= SETTLED_PARTS and left_bits >= open_bits:
            windows, window_s = left_bits // open_bits, open_bits / path_bps
            later_s = windows * max(window_s, round_trip_s + window_s / PARTS / 2)
            _skip(state, line, windows * open_bits, later_s)
            clock_s += later_s
            left_bits -= windows * open_bits
            continue
        in_flight_bits = state.in_flight_bits[line]
        wanted_bits = min(open_bits, in_flight_bits + left_bits)
        state.most_in_flight_bits[line] = max(state.most_in_flight_bits[line], wanted_bits)
        part_bits = min(left_bits, open_bits / PARTS)
        if open_bits - in_flight_bits < part_bits * (1 - ROUNDING) and state.part_count[line]:
            clock_s = max(clock_s, state.part_s[line, state.first_part[line]])
            continue
        part_s = part_bits / path_bps
        clock_s += part_s
        state.in_flight_bits[line] += part_bits
        left_bits -= part_bits
        is_apart = state.part_count[line] < MOST_PARTS
        state.part_count[line] += is_apart
        last = (state.first_part[line] + state.part_count[line] - 1) % MOST_PARTS
        # Acknowledgements arrive while a part is sent: it counts as acknowledged halfway.
        state.part_s[line, last] = clock_s - part_s / 2 + round_trip_s
        state.part_bits[line, last] = part_bits if is_apart else state.part_bits[line, last] + part_bits
        equal_parts = equal_parts + 1 if part_bits == network.window_bits[line] / PARTS else 0
    state.open_s[line] = clock_s
    return float(max(0.0, clock_s - now_s - bits / path_bps))


@inner
def _skip(state: State, line: int, bits: float, later_s: float) -> None:  # pragma: no cover
    """Send whole windows, each of which takes as long as the one before, in ``later_s`` in all."""
    for number in range(state.part_count[line]):
        state.part_s[line, (state.first_part[line] + number) % MOST_PARTS] += later_s
    _grow(state, line, bits)


@inner
def _grow(state: State, line: int, bits: float) -> None:  # pragma: no cover
    """Open the window by acknowledged bits: by one for each, up to twice those in flight."""
    grown_bits = state.grown_bits[line]
    state.grown_bits[line] = max(grown_bits, min(grown_bits + bits, 2 * state.most_in_flight_bits[line]))


@inner
def _acknowledge(state: State, line: int, now_s: float) -> None:  # pragma: no cover
    """Free the parts whose acknowledgements are here, and open the window by their bits."""
    while state.part_count[line] and state.part_s[line, state.first_part[line]] <= now_s:
        bits = state.part_bits[line, state.first_part[line]]
        _grow(state, line, bits)
        state.in_flight_bits[line] -= bits
        state.part_count[line] -= 1
        state.first_part[line] = (state.first_part[line] + 1) % MOST_PARTS
    if not state.part_count[line]:
        state.in_flight_bits[line] = 0.0
