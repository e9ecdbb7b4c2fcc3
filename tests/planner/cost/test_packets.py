"""What jitter and losses of packets do to a message, against the definitions."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cost.network import PAYLOAD_BYTES, jitter_delay_s, loss_ceiling_bps


@given(st.integers(1, 60), st.floats(1e-4, 1))
def test_the_last_of_some_packets_waits_for_the_slowest(frames: int, jitter_s: float) -> None:
    # The expectation of a maximum is the integral of 1 - P(all are below x).
    below = (np.arange(20_000) + 0.5) / 20_000
    expected_s = jitter_s * float((1 - below**frames).mean())
    for size_bytes in ((frames - 1) * PAYLOAD_BYTES + 1, frames * PAYLOAD_BYTES):
        assert jitter_delay_s(jitter_s, size_bytes) == pytest.approx(expected_s, rel=1e-6)


def test_without_jitter_there_is_no_delay_and_an_empty_message_is_a_packet() -> None:
    assert jitter_delay_s(0.0, 1e6) == 0.0
    assert jitter_delay_s(0.01, 0) == 0.005


def test_losses_limit_a_connection() -> None:
    # 1448 bytes in 100 ms are 115.84 kbit/s; one packet of a hundred lost lets sqrt(150) of them be under way.
    assert loss_ceiling_bps(0.01, 0.1) == pytest.approx(115.84e3 * 12.24745, rel=1e-6)
    assert loss_ceiling_bps(0.0, 0.1) == math.inf
    assert loss_ceiling_bps(0.01, 0.0) == math.inf


@given(st.floats(1e-6, 0.9), st.floats(1e-3, 1))
def test_four_times_the_losses_or_twice_the_way_halve_it(loss_share: float, round_trip_s: float) -> None:
    ceiling_bps = loss_ceiling_bps(loss_share, round_trip_s)
    assert loss_ceiling_bps(loss_share / 4, round_trip_s) == pytest.approx(2 * ceiling_bps)
    assert loss_ceiling_bps(loss_share, 2 * round_trip_s) == pytest.approx(ceiling_bps / 2)
