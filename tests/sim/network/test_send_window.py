"""The window of a sender, against closed formulas: a long stream, rounds that double, idleness that halves."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.network import send_window
from sim.network.send_window import SendWindow

NEVER = math.inf
# A window leaves in parts; a figure is as fine as they are.
FINE = 0.07


def took_s(window: SendWindow, start_s: float, size_bytes: int, rate_bps: float, trip_s: float = 1.0) -> float:
    return window.waiting_s(start_s, size_bytes, rate_bps, trip_s) + 8 * size_bytes / rate_bps


@given(st.integers(1, 10**7), st.floats(1e4, 1e9), st.floats(0, 1))
def test_a_window_that_holds_everything_makes_nobody_wait(size_bytes: int, rate_bps: float, trip_s: float) -> None:
    window = SendWindow(1e15, math.inf, NEVER)
    assert window.waiting_s(1.0, size_bytes, rate_bps, trip_s) == pytest.approx(
        0.0, abs=1e-6 * 8 * size_bytes / rate_bps
    )


@settings(max_examples=50)
@given(st.floats(1e5, 1e8), st.floats(0.01, 0.2), st.floats(0.05, 3))
def test_a_long_stream_gets_a_window_per_round_trip(rate_bps: float, trip_s: float, share_of_path: float) -> None:
    most_bytes = share_of_path * rate_bps * trip_s / 8
    window = SendWindow(most_bytes, most_bytes, NEVER)
    clock_s, size_bytes = 0.0, max(1, int(most_bytes * 3))
    for _ in range(10):
        clock_s += took_s(window, clock_s, size_bytes, rate_bps, trip_s)
    reached_bps = 8 * 10 * size_bytes / clock_s
    # The first window goes at once.
    least_bps = min(rate_bps, 8 * most_bytes / trip_s)
    assert least_bps * (1 - FINE) <= reached_bps <= least_bps * (1 + 1 / 30 + FINE)


MESSAGES = st.lists(st.tuples(st.floats(0, 3), st.integers(1, 3 * 10**6)), min_size=1, max_size=5)


@settings(max_examples=100)
@given(MESSAGES, st.floats(1e3, 1e5), st.floats(1, 20), st.floats(1e5, 1e8), st.floats(0.001, 0.3), st.floats(0.01, 2))
def test_whole_windows_at_once_take_as_long_as_part_by_part(
    messages: list[tuple[float, int]],
    first_bytes: float,
    growth: float,
    rate_bps: float,
    trip_s: float,
    timeout_s: float,
) -> None:
    def delays_s(settled_parts: float) -> list[float]:
        window, clock_s, found = SendWindow(first_bytes, growth * first_bytes, timeout_s), 0.0, []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(send_window, "SETTLED_PARTS", settled_parts)
            for pause_s, size_bytes in messages:
                found.append(took_s(window, clock_s + pause_s, size_bytes, rate_bps, trip_s))
                clock_s += pause_s + found[-1]
        return found

    assert delays_s(2 * send_window.PARTS) == pytest.approx(delays_s(math.inf), rel=1e-9)


@pytest.mark.parametrize(("rounds", "size_bytes"), [(0, 950), (1, 2850), (2, 6650), (3, 14250)])
def test_slow_start_doubles_every_round_trip(rounds: int, size_bytes: int) -> None:
    # A path that carries a window in no time: 1, 2, 4 and 8 thousand bytes, a round trip of a second apart.
    window = SendWindow(1000.0, math.inf, NEVER)
    assert took_s(window, 0.0, size_bytes, 1e9) == pytest.approx(rounds, abs=1e-3)


def test_what_was_opened_stays_open_and_halves_when_idle() -> None:
    def second_s(idle_s: float, timeout_s: float) -> float:
        window = SendWindow(1000.0, math.inf, timeout_s)
        first_s = took_s(window, 0.0, 7000, 1e9)
        return took_s(window, first_s + idle_s, 4000, 1e9)

    # It is open for 8,000 bytes; timeouts are 1.5 s with the round trip.
    assert second_s(100.0, NEVER) == pytest.approx(0, abs=1e-3)
    assert second_s(1.4, 0.5) == pytest.approx(0, abs=1e-3)
    # Halved twice and thrice: 2,000 and 1,000 bytes.
    assert second_s(3.1, 0.5) == pytest.approx(1, abs=1e-3)
    assert second_s(100.0, 0.5) == pytest.approx(2, abs=1e-3)


def test_bytes_that_wait_before_the_path_open_the_window_as_on_linux() -> None:
    """`ss -ti` shows 2.68, 5.35 and 5.35 MB after messages of 2.667 MB by Reno over 40 Mbit/s, 20 ms there and back.

    The path itself holds 0.2 MB.
    """
    window, found, clock_s = SendWindow(14480.0, math.inf, NEVER), [], 0.0
    for _ in range(3):
        clock_s += took_s(window, clock_s, 2_666_672, 40e6, 0.04) + 1.0
        # Acknowledgements count when the next byte leaves.
        window.waiting_s(clock_s, 1, 40e6, 0.04)
        found.append(window.size_bytes / 1e6)
    assert found == pytest.approx([2.68, 5.35, 5.35], rel=0.01)


@settings(max_examples=100)
@given(st.integers(1, 10**5), st.floats(1e4, 1e7), st.floats(1e-3, 0.5), st.floats(500, 1e5), st.floats(1.5, 4))
def test_a_larger_first_window_never_takes_longer(
    size_bytes: int, rate_bps: float, trip_s: float, initial_bytes: float, larger: float
) -> None:
    """With a first message; a later one may take longer, since a message that needs fewer rounds opens the window less.

    A window grows to at most twice the bytes in flight: 1,688 bytes at once open it less than 608 and 1,080 bytes do.
    """
    first_s, larger_s = (
        took_s(SendWindow(window_bytes, math.inf, NEVER), 0.0, size_bytes, rate_bps, trip_s)
        for window_bytes in (initial_bytes, initial_bytes * larger)
    )
    assert larger_s <= first_s * (1 + FINE) + 1e-9
