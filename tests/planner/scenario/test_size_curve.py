import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.scenario.size_curve import SizeCurve

# Rises to a peak, as most measured networks; falls to a trough and rises; straight; flat.
PEAKED = SizeCurve(-0.2, 3.0, 12.0, 8 * 22e9)
TROUGHED = SizeCurve(0.005, 0.05, 0.9, 8 * 1.7e9)
STRAIGHT = SizeCurve(0.0, 2.0, 5.0, 8 * 30e9)
FLAT = SizeCurve(0.0, 0.0, 1.0, 8 * 2e9)
CURVES = (PEAKED, TROUGHED, STRAIGHT, FLAT)

sizes = st.floats(1.0, 1e13)


@pytest.mark.parametrize(("size_bytes", "gigabytes_per_s"), [(1e6, 12.0), (4e6, 17.2), (0.5e6, 8.8)])
def test_inside_it_is_the_polynomial(size_bytes: float, gigabytes_per_s: float) -> None:
    assert PEAKED.rate_bps(size_bytes) == pytest.approx(8e9 * gigabytes_per_s)


def test_the_ceiling_holds() -> None:
    assert PEAKED.rate_bps(64e6) == 8 * 22e9


def test_past_its_peak_the_rate_stays() -> None:
    low = SizeCurve(-0.2, 3.0, 12.0, math.inf)
    assert low.rate_bps(1e12) == low.rate_bps(1e6 * 2**7.5) == pytest.approx(8e9 * 23.25)


def test_below_its_shortest_time_messages_take_that_time() -> None:
    exponents = [number / 1000 for number in range(-3000, 0)]
    shortest_s = min(2**x * 1e6 / (1e9 * (-0.2 * x**2 + 3.0 * x + 12.0)) for x in exponents)
    times_s = [8 * size / PEAKED.rate_bps(size) for size in (1, 1000, 100_000)]
    assert times_s == pytest.approx([shortest_s] * 3)


def test_below_a_trough_the_rate_stays() -> None:
    assert TROUGHED.rate_bps(1.0) == TROUGHED.rate_bps(1e6 / 32) == pytest.approx(8e9 * 0.775)


@pytest.mark.parametrize("curve", CURVES)
@given(one=sizes, other=sizes)
def test_larger_messages_are_never_slower_nor_sooner_there(curve: SizeCurve, one: float, other: float) -> None:
    small, large = sorted((one, other))
    assert 0 < curve.rate_bps(small) <= curve.rate_bps(large) * (1 + 1e-9)
    assert small / curve.rate_bps(small) <= large / curve.rate_bps(large) * (1 + 1e-9)
