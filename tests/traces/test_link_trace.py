import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.strategies.trace_strategies import link_traces
from traces.common.errors import InputError
from traces.trace import LinkTrace


@pytest.fixture
def swaying() -> LinkTrace:
    """10 Mbit/s for 2 s, an outage of 3 s, 4 Mbit/s for 5 s, again and again."""
    return LinkTrace(np.array([0.0, 2.0, 5.0]), np.array([10e6, 0.0, 4e6]), 10.0)


def rounding_bits(trace: LinkTrace, until_s: float) -> float:
    """What rounding may cost: some last digits of the bits so far, and of the time at the highest rate."""
    bits = float(trace.bits_between(0.0, until_s))
    return 64 * float(np.spacing(bits) + np.spacing(until_s) * trace.bandwidth_bps.max()) + 1e-9


@given(link_traces(), st.floats(0, 5e3), st.floats(1, 1e12))
def test_the_time_to_send_is_when_the_bits_have_passed(trace: LinkTrace, start_s: float, bits: float) -> None:
    needed_s = float(trace.time_to_send(bits, start_s))
    if math.isinf(needed_s):
        assert trace.bandwidth_bps[-1] == 0
        return
    slack = rounding_bits(trace, start_s + needed_s)
    assert float(trace.bits_between(start_s, start_s + needed_s)) == pytest.approx(bits, abs=slack)


@given(link_traces(), st.floats(0, 5e3), st.floats(0, 5e3))
def test_the_bits_of_a_stretch_need_no_longer_than_it(trace: LinkTrace, start_s: float, length_s: float) -> None:
    end_s = start_s + length_s
    bits = float(trace.bits_between(start_s, end_s))
    needed_s = float(trace.time_to_send(bits, start_s))
    slack = rounding_bits(trace, end_s)
    lowest_bps = trace.bandwidth_bps[trace.bandwidth_bps > 0].min(initial=np.inf)
    assert needed_s <= length_s + slack / lowest_bps
    assert float(trace.bits_between(start_s, start_s + needed_s)) == pytest.approx(bits, abs=slack)


@given(
    link_traces(),
    st.lists(st.floats(0, 5e3), min_size=1, max_size=5),
    st.lists(st.floats(0, 1e11), min_size=1),
)
def test_arrays_give_what_their_numbers_give(trace: LinkTrace, starts_s: list[float], bits: list[float]) -> None:
    starts, amounts = np.array(starts_s)[:, np.newaxis], np.array(bits)
    needed_s = trace.time_to_send(amounts, starts)
    assert needed_s.shape == (len(starts_s), len(bits))
    assert needed_s.tolist() == [[float(trace.time_to_send(b, s)) for b in bits] for s in starts_s]
    carried = trace.bits_between(starts, starts + 1.0)
    assert carried.tolist() == [[float(trace.bits_between(s, s + 1.0))] for s in starts_s]


@given(link_traces(), st.floats(0, 5e3), st.floats(0, 1))
def test_a_rate_holds_until_the_time_that_is_given_with_it(trace: LinkTrace, time_s: float, share: float) -> None:
    rate_bps, until_s = trace.rate_until(time_s)
    assert rate_bps == float(trace.bandwidth_at(time_s))
    later_s = time_s + share * (min(until_s, 1e4) - time_s)
    if time_s <= later_s < until_s:
        assert float(trace.bandwidth_at(later_s)) == rate_bps
    # A piece is left at its end: little later another one holds.
    pieces = np.diff(trace.times_s, append=trace.duration_s)
    if math.isfinite(until_s) and len(pieces) > 1:
        after_s = max(time_s, until_s) + 1e-6 * (1 + time_s)
        assert int(trace.piece_at(after_s)) != int(trace.piece_at(time_s)) or pieces.min() < 1e-5 * (1 + time_s)


def test_bits_over_outages_and_periods(swaying: LinkTrace) -> None:
    assert swaying.mean_bps == 4e6
    assert swaying.bits_between([0, 1, 2, 9, 0], [2, 6, 5, 11, 100]).tolist() == [20e6, 14e6, 0, 14e6, 400e6]


def test_bits_that_end_with_the_outage_do_not_wait_for_its_end(swaying: LinkTrace) -> None:
    assert swaying.time_to_send([20e6, 20e6 + 4, 40e6, 400e6], 0.0).tolist() == [2.0, 5.000001, 10.0, 100.0]


def test_a_sum_that_rounds_up_does_not_wait_for_the_end_of_the_outage() -> None:
    trace = LinkTrace(np.array([0.0, 0.3]), np.array([1e9, 0.0]), 1e4)
    starts_s = np.linspace(0.0, 0.29, 1000)
    needed_s = trace.time_to_send(trace.bits_between(starts_s, 0.3), starts_s)
    assert needed_s == pytest.approx(0.3 - starts_s)


def test_without_looping_the_last_rate_holds_for_ever() -> None:
    trace = LinkTrace(np.array([0.0, 1.0]), np.array([8.0, 2.0]), 2.0, loops=False)
    assert trace.bits_between(0, 11) == 28
    assert trace.time_to_send(28, 0) == 11


def test_a_dead_link_never_sends() -> None:
    trace = LinkTrace(np.zeros(1), np.zeros(1), 1.0)
    assert trace.time_to_send([0.0, 1.0], 3.0).tolist() == [0.0, math.inf]


@pytest.mark.parametrize(
    ("times_s", "rates_bps", "duration_s", "message"),
    [
        ([], [], 1, "the trace has no rows"),
        ([0, 1], [1], 2, "differ in number"),
        ([0, 1], [1, -2], 2, "rate -2 in row 2"),
        ([0, 1], [1, math.nan], 2, "rate nan in row 2"),
        ([1, 2], [1, 2], 3, "the first time is 1 s"),
        ([0, 2, 1], [1, 2, 3], 3, "time goes from 2 s to 1 s in row 3"),
        ([0, 2], [1, 2], 2, "lasts 2 s but its last row starts at 2 s"),
    ],
)
def test_what_is_no_trace_is_refused(
    times_s: list[float], rates_bps: list[float], duration_s: float, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        LinkTrace(np.array(times_s), np.array(rates_bps), duration_s)


def test_an_input_error_survives_the_way_out_of_a_worker_process() -> None:
    error = pickle.loads(pickle.dumps(InputError("bad", where="here", valid="do this")))
    assert str(error) == "here: bad; do this"


def test_a_trace_that_ends_is_none_that_loops() -> None:
    trace = LinkTrace(np.zeros(1), np.ones(1), 1.0, loops=False)
    ends = LinkTrace(np.zeros(1), np.ones(1), 1.0, loops=False, ends=True)
    assert trace != ends
    # What it answers after its end is what one that holds does.
    assert ends.bits_between(0.0, 5.0) == trace.bits_between(0.0, 5.0)
    with pytest.raises(InputError, match="both loops and ends"):
        LinkTrace(np.zeros(1), np.ones(1), 1.0, ends=True)
