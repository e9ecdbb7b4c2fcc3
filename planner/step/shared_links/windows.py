"""Windows of TCP that open with acknowledgements and halve on idle lines, as `sim.network.send_window` has them."""

import numpy as np

from planner.schedules.kernel.arrays import inner
from planner.step.shared_links.flow_state import MOST_PARTS, Network, State

# Number of parts of a window that are acknowledged one by one, and the share of a part that is rounding.
_PARTS, _ROUNDING = 16, 1e-9

# Halvings after which every window has its initial size.
_MOST_HALVINGS = 64


@inner
def opening_s(network: Network, state: State, line: int, bits: float, now_s: float) -> float:  # pragma: no cover
    """Return the delay that its window adds to a message of a line that begins now, seconds."""
    path_bps, round_trip_s = network.path_bps[line], network.round_trip_s[line]
    if bits <= 0 or round_trip_s <= 0:
        return 0.0
    timeout_s = network.idle_s + round_trip_s
    _acknowledge(state, line, now_s)
    if now_s - state.open_s[line] >= timeout_s:
        halvings = np.floor(min((now_s - state.open_s[line]) / timeout_s, _MOST_HALVINGS))
        initial_bits = min(network.initial_bits * network.weight[line], network.window_bits[line])
        state.grown_bits[line] = max(initial_bits, state.grown_bits[line] * 0.5**halvings)
    clock_s, left_bits, state.most_in_flight_bits[line] = now_s, bits, 0.0
    while left_bits > 0:
        _acknowledge(state, line, clock_s)
        open_bits = min(state.grown_bits[line], network.window_bits[line])
        in_flight_bits = state.in_flight_bits[line]
        wanted_bits = min(open_bits, in_flight_bits + left_bits)
        state.most_in_flight_bits[line] = max(state.most_in_flight_bits[line], wanted_bits)
        part_bits = min(left_bits, open_bits / _PARTS)
        if open_bits - in_flight_bits < part_bits * (1 - _ROUNDING) and state.part_count[line]:
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
    state.open_s[line] = clock_s
    return float(max(0.0, clock_s - now_s - bits / path_bps))


@inner
def _acknowledge(state: State, line: int, now_s: float) -> None:  # pragma: no cover
    """Free the parts whose acknowledgements are here; each bit opens the window by one, up to twice those in flight."""
    while state.part_count[line] and state.part_s[line, state.first_part[line]] <= now_s:
        bits, grown_bits = state.part_bits[line, state.first_part[line]], state.grown_bits[line]
        state.grown_bits[line] = max(grown_bits, min(grown_bits + bits, 2 * state.most_in_flight_bits[line]))
        state.in_flight_bits[line] -= bits
        state.part_count[line] -= 1
        state.first_part[line] = (state.first_part[line] + 1) % MOST_PARTS
    if not state.part_count[line]:
        state.in_flight_bits[line] = 0.0
