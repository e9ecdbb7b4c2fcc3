"""Rates of matrix products: those that were measured, and what lies between and outside."""

from itertools import pairwise, product
from math import exp2, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.scenario.kind_table import DIVISIONS, KindTable, MatrixProduct
from traces.common.errors import InputError

sizes = st.lists(st.integers(1, 2**14), min_size=1, max_size=3, unique=True).map(lambda each: tuple(sorted(each)))
wanted = st.floats(0.1, 2**16)


def table_of(rows: tuple[int, ...], inner: tuple[int, ...], outer: tuple[int, ...], rates: list[float]) -> KindTable:
    left = iter(rates)
    cube = tuple(tuple(tuple(next(left) for _ in outer) for _ in inner) for _ in rows)
    return KindTable("box", "CPU", "fp32", rows, inner, outer, cube, 1e-6, 1e10, "made up")


@st.composite
def tables(draw: st.DrawFn, *, rising: bool = False) -> KindTable:
    rows, inner, outer = draw(sizes), draw(sizes), draw(sizes)
    count = len(rows) * len(inner) * len(outer)
    if not rising:
        return table_of(rows, inner, outer, draw(st.lists(st.floats(1e6, 1e15), min_size=count, max_size=count)))
    factors = [
        sorted(draw(st.lists(st.floats(1, 100), min_size=len(each), max_size=len(each))))
        for each in (rows, inner, outer)
    ]
    return table_of(rows, inner, outer, [1e9 * one * two * three for one, two, three in product(*factors)])


@given(tables())
def test_measured_products_have_their_rates(table: KindTable) -> None:
    for (one, rows), (two, inner), (three, outer) in product(*map(enumerate, (table.rows, table.inner, table.outer))):
        assert table.rate(rows, inner, outer) == pytest.approx(table.rates[one][two][three], rel=1e-9)


def around(measured: tuple[int, ...], size: float) -> list[int]:
    """The indices of the measured sizes next to this one."""
    below = [index for index, each in enumerate(measured) if each <= size][-1:]
    above = [index for index, each in enumerate(measured) if each >= size][:1]
    return [*below, *above]


@given(tables(), wanted, wanted, wanted)
def test_a_rate_lies_between_those_of_its_neighbours(table: KindTable, rows: float, inner: float, outer: float) -> None:
    near = product(around(table.rows, rows), around(table.inner, inner), around(table.outer, outer))
    rates = [table.rates[one][two][three] for one, two, three in near]
    assert min(rates) * (1 - 1e-9) <= table.rate(rows, inner, outer) <= max(rates) * (1 + 1e-9)


@given(tables(), wanted, wanted, wanted)
def test_outside_the_rate_is_that_of_the_nearest_sizes(
    table: KindTable, rows: float, inner: float, outer: float
) -> None:
    clipped = [
        min(max(size, measured[0]), measured[-1])
        for size, measured in ((rows, table.rows), (inner, table.inner), (outer, table.outer))
    ]
    assert table.rate(rows, inner, outer) == pytest.approx(table.rate(*clipped), rel=1e-9)


@given(tables(rising=True), st.lists(wanted, min_size=2, max_size=4), wanted, wanted, st.integers(0, 2))
def test_rates_that_rise_with_a_size_rise_between_the_measured_ones(
    table: KindTable, along: list[float], one: float, other: float, axis: int
) -> None:
    shapes = [[*(one, other)[:axis], size, *(one, other)[axis:]] for size in sorted(along)]
    assert all(high >= low * (1 - 1e-9) for low, high in pairwise(table.rate(*shape) for shape in shapes))


def test_halfway_in_the_logarithm_is_the_geometric_mean() -> None:
    table = table_of((1, 16), (64,), (64, 1024), [1e9, 4e9, 16e9, 64e9])
    assert table.rate(4, 64, 64) == pytest.approx(4e9)
    assert table.rate(1, 64, 256) == pytest.approx(2e9)
    assert table.rate(2, 64, 128) == pytest.approx(exp2((3 * log2(1e9) + log2(16e9)) / 4) * 2**0.5)


@given(wanted, wanted, wanted, st.integers(1, 9), st.sampled_from(DIVISIONS), st.integers(1, 64))
def test_parts_of_a_product_are_together_its_operations(
    rows: float, inner: float, outer: float, count: int, divide: str, degree: int
) -> None:
    whole = MatrixProduct(rows, inner, outer, count, divide)
    part = whole.part(degree)
    assert degree * part.flop == pytest.approx(whole.flop)
    assert getattr(part, divide) == pytest.approx(getattr(whole, divide) / degree)


@pytest.mark.parametrize("changed", [{"rows": 0}, {"inner": -1.0}, {"outer": float("inf")}, {"count": 0}])
def test_a_product_of_nothing_is_refused(changed: dict[str, float]) -> None:
    with pytest.raises(InputError, match=r"products of .* are not possible; give sizes above zero"):
        MatrixProduct(**{"rows": 1, "inner": 1, "outer": 1, **changed})
