import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.strategies.trace_strategies import link_traces
from traces.common.errors import InputError
from traces.resample import merged, resampled
from traces.trace import LinkTrace


@given(link_traces(with_latency=True), st.floats(0.01, 1.5))
def test_every_window_keeps_its_bits(trace: LinkTrace, share: float) -> None:
    step_s = trace.duration_s * share
    windows = resampled(trace, step_s)
    edges_s = np.append(windows.times_s, windows.duration_s)
    bits = trace.bits_between(edges_s[:-1], edges_s[1:])
    total = trace.mean_bps * trace.duration_s
    assert windows.bits_between(edges_s[:-1], edges_s[1:]) == pytest.approx(bits, rel=1e-9, abs=1e-9 * total)
    assert (windows.duration_s, windows.loops) == (trace.duration_s, trace.loops)


def test_the_last_window_may_be_shorter_and_latency_is_averaged() -> None:
    trace = LinkTrace(np.array([0.0, 1.0]), np.array([4.0, 8.0]), 5.0, np.array([0.1, 0.3]))
    windows = resampled(trace, 2.0)
    assert windows.times_s.tolist() == [0, 2, 4]
    assert windows.bandwidth_bps.tolist() == [6, 8, 8]
    assert windows.latency_s == pytest.approx(np.array([0.2, 0.3, 0.3]))


@pytest.mark.parametrize(("duration_s", "step_s", "pieces"), [(0.3, 0.1, 3), (0.7, 0.1, 7), (1.0, 5.0, 1)])
def test_rounding_adds_no_window(duration_s: float, step_s: float, pieces: int) -> None:
    assert len(resampled(LinkTrace(np.zeros(1), np.ones(1), duration_s), step_s).times_s) == pieces


@pytest.mark.parametrize(
    ("step_s", "message"),
    [(0.0, "the step is 0 s"), (float("nan"), "the step is nan s"), (1e-9, "1e\\+09 steps")],
)
def test_a_step_that_makes_no_sense_is_refused(step_s: float, message: str) -> None:
    with pytest.raises(InputError, match=message):
        resampled(LinkTrace(np.zeros(1), np.ones(1), 1.0), step_s)


def test_equal_neighbours_merge() -> None:
    trace = LinkTrace(np.arange(4.0), np.array([1.0, 1.0, 2.0, 2.0]), 4.0, np.array([0.1, 0.1, 0.1, 0.2]))
    assert merged(trace).times_s.tolist() == [0, 2, 3]
