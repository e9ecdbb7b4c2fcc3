import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.systems.auto.forecasting.change_detection import PageHinkley

# Multiples of 1/16 are exact in floating point, so that neither side of a comparison is decided by rounding.
exact = st.integers(-800, 800).map(lambda number: number / 16)
series = st.lists(exact, min_size=1, max_size=60)
positive = st.integers(0, 100).map(lambda number: number / 16)


def states(
    detector: PageHinkley, values: "list[float] | np.ndarray[tuple[int], np.dtype[np.float64]]"
) -> list[PageHinkley]:
    seen = []
    for value in values:
        detector = detector.after(float(value))
        seen.append(detector)
    return seen


def first_change(detector: PageHinkley, values: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> int | None:
    return next((index for index, state in enumerate(states(detector, values)) if state.changed), None)


@given(series, positive, positive)
def test_page_hinkley_is_the_distance_from_the_extreme_of_the_cumulative_sum(
    values: list[float], slack: float, threshold: float
) -> None:
    array = np.array(values)
    means = np.cumsum(array) / np.arange(1, len(array) + 1)
    rising = np.cumsum(array - means - slack)
    falling = np.cumsum(array - means + slack)
    up = rising - np.minimum.accumulate(rising)
    down = np.maximum.accumulate(falling) - falling
    found = states(PageHinkley(slack=slack, threshold=threshold), values)
    assert [state.up for state in found] == pytest.approx(up, abs=1e-9)
    assert [state.down for state in found] == pytest.approx(down, abs=1e-9)
    assert [state.mean for state in found] == pytest.approx(means, abs=1e-9)
    clear = (np.abs(up - threshold) > 1e-9) & (np.abs(down - threshold) > 1e-9)
    said = np.array([state.changed for state in found])
    assert (said == ((up > threshold) | (down > threshold)))[clear].all()


@given(series, positive)
def test_a_mirrored_series_changes_the_other_way(values: list[float], slack: float) -> None:
    ahead = states(PageHinkley(slack=slack, threshold=1.0), values)
    mirrored = states(PageHinkley(slack=slack, threshold=1.0), [-value for value in values])
    assert [(state.up, state.down) for state in ahead] == [(state.down, state.up) for state in mirrored]


@pytest.mark.parametrize("shift", [1.0, -1.0, 3.0])
def test_a_shift_is_found_soon_and_silence_is_long(shift: float) -> None:
    rng = np.random.default_rng(7)
    delays, false_alarms = [], 0
    for _ in range(20):
        quiet, shifted = rng.normal(10.0, 1.0, 100), rng.normal(10.0 + shift, 1.0, 200)
        slack, threshold = 0.5, 8.0
        found = first_change(PageHinkley(slack=slack, threshold=threshold), np.append(quiet, shifted))
        assert found is not None
        false_alarms += found < 100
        delays.append(found - 100)
    assert false_alarms <= 1
    # The sum rises by |shift| - slack a value; the mean follows the shift a little meanwhile.
    expected = 8.0 / (abs(shift) - 0.5)
    assert 0.5 * expected < np.median(delays) < 2.5 * expected
