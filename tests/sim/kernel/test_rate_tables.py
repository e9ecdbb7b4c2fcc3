"""Tables of rates against the traces that they come from, and against their own rates point by point."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from planner.scenario.cluster import LONGEST_OUTAGE_S
from sim.kernel.piecewise import (
    RateTable,
    RateTables,
    holding,
    join_tables,
    link_table,
    moved,
    rate_at,
    resumes_s,
    time_of,
)
from tests.helpers.strategies.trace_strategies import link_traces
from traces.trace import LinkTrace

EXACT = 1e-9
CEILINGS = st.one_of(st.just(math.inf), st.floats(1e3, 1e10))
MANY = settings(max_examples=200)


def joined(table: RateTable) -> RateTables:
    """The table as number 1 between two others, whose pieces are not its own."""
    return join_tables([RateTable((0.0, 7.0), (3.0, 5.0)), table, RateTable((0.0,), (11.0,), 13.0)])


def clipped(trace: LinkTrace, ceiling: float) -> LinkTrace:
    return LinkTrace(
        trace.times_s, np.minimum(trace.bandwidth_bps, ceiling), trace.duration_s, trace.latency_s, trace.loops
    )


@st.composite
def moments(draw: st.DrawFn, trace: LinkTrace) -> float:
    """A time inside a piece, in any of many rounds, away from the ends of pieces where a rounding would decide."""
    ends_s = np.append(trace.times_s[1:], trace.duration_s)
    piece = draw(st.integers(0, len(ends_s) - 1))
    share = draw(st.floats(0.01, 0.99))
    turn = draw(st.integers(0, 40)) if trace.loops else 0
    return float(turn * trace.duration_s + trace.times_s[piece] + share * (ends_s[piece] - trace.times_s[piece]))


@st.composite
def traces_with_moments(draw: st.DrawFn) -> tuple[LinkTrace, float, float]:
    trace = draw(link_traces(with_latency=True))
    earlier_s, later_s = sorted((draw(moments(trace)), draw(moments(trace))))
    return trace, earlier_s, later_s


@MANY
@given(traces_with_moments(), CEILINGS)
def test_rates_and_latencies_are_those_of_the_trace(case: tuple[LinkTrace, float, float], ceiling: float) -> None:
    trace, time_s, _ = case
    tables = joined(link_table(trace).clipped(1.0, ceiling))
    assert rate_at(tables, 1, time_s) == min(float(trace.bandwidth_at(time_s)), ceiling)
    assert trace.latency_s is not None
    table = replace(link_table(trace), rates=trace.latency_s.tolist())
    assert rate_at(joined(table), 1, time_s) == trace.latency_s[trace.piece_at(time_s)]


@MANY
@given(traces_with_moments(), CEILINGS)
def test_what_moves_is_the_integral_of_the_trace_below_the_ceiling(
    case: tuple[LinkTrace, float, float], ceiling: float
) -> None:
    trace, start_s, end_s = case
    below = clipped(trace, ceiling)
    # The integral of a trace is a difference of two that start at 0.
    rounding = 1e-12 * float(below.bits_between(0.0, end_s))
    # The end of a piece is rounded too, in each round anew, and may be a part in a billion of a very short piece.
    rounding += float(below.bandwidth_bps.max()) * float(np.spacing(end_s)) * (end_s / below.duration_s + 1)
    expected = pytest.approx(float(below.bits_between(start_s, end_s)), rel=EXACT, abs=rounding)
    assert moved(joined(link_table(trace)), 1, start_s, end_s, ceiling) == expected
    assert moved(joined(link_table(below)), 1, start_s, end_s, math.inf) == expected


@MANY
@given(traces_with_moments(), CEILINGS, st.floats(1e-3, 20))
def test_an_amount_takes_as_long_as_over_the_trace_below_the_ceiling(
    case: tuple[LinkTrace, float, float], ceiling: float, share: float
) -> None:
    trace, start_s, _ = case
    below = clipped(trace, ceiling)
    bits = share * below.mean_bps * below.duration_s
    assume(bits > 0)
    # A bit more or less, since one that leaves just as an outage begins may round to its other side.
    least_s, most_s = start_s + below.time_to_send([bits * (1 - EXACT), bits * (1 + EXACT)], start_s)
    end_s = time_of(joined(link_table(trace)), 1, bits, start_s, ceiling)
    assert least_s * (1 - EXACT) <= end_s <= most_s * (1 + EXACT)
    assert end_s == pytest.approx(time_of(joined(link_table(below)), 1, bits, start_s, math.inf), rel=EXACT)


@MANY
@given(traces_with_moments(), CEILINGS, st.floats(1e-3, 20))
def test_the_time_of_an_amount_is_when_the_integral_reaches_it(
    case: tuple[LinkTrace, float, float], ceiling: float, share: float
) -> None:
    trace, start_s, _ = case
    tables = joined(link_table(trace))
    amount = share * min(trace.mean_bps, ceiling) * trace.duration_s
    end_s = time_of(tables, 1, amount, start_s, ceiling)
    assume(start_s < end_s < math.inf)
    # A time of this size says a rate's bits no finer.
    grain = 4 * float(np.spacing(end_s)) * min(float(trace.bandwidth_bps.max()), ceiling)
    assert moved(tables, 1, start_s, end_s, ceiling) == pytest.approx(amount, rel=EXACT, abs=grain)
    just_before_s = end_s - 1e-6 * (end_s - start_s)
    assert moved(tables, 1, start_s, just_before_s, ceiling) < amount


@MANY
@given(traces_with_moments())
def test_nothing_moves_until_a_rate_resumes(case: tuple[LinkTrace, float, float]) -> None:
    trace, time_s, _ = case
    # A dark loop is looked through for a day, which takes long if it is short.
    assume(trace.bandwidth_bps.any() or trace.duration_s > 10)
    tables = joined(link_table(trace))
    resumed_s = resumes_s(tables, 1, time_s)
    if trace.bandwidth_at(time_s) > 0:
        assert resumed_s == time_s
    elif resumed_s < math.inf:
        assert moved(tables, 1, time_s, resumed_s, math.inf) == 0
        assert moved(tables, 1, resumed_s, resumed_s + 1e-6, math.inf) > 0
    else:
        assert not trace.bandwidth_at(time_s + np.linspace(0, 2 * trace.duration_s, 1000)).any()


# After 30 rounds, a millionth of the time is longer than the second piece.
ROUNDS = LinkTrace(
    np.array([0.0, 0.0125, 0.01445313, 1.01445312]), np.zeros(4), 69.014453125, np.zeros(4), loops=True, ends=False
)


@MANY
@example((ROUNDS, 2070.43984375, 2070.43984375))
@given(traces_with_moments())
def test_a_rate_holds_until_the_next_piece(case: tuple[LinkTrace, float, float]) -> None:
    trace, time_s, _ = case
    rate, until_s = holding(joined(link_table(trace)), 1, time_s)
    assert rate == trace.bandwidth_at(time_s)
    assert until_s > time_s
    if until_s < math.inf:
        near_s = 1e-6 * (until_s - time_s)
        assert trace.piece_at(time_s) == trace.piece_at(until_s - near_s)
        next_one = (trace.piece_at(time_s) + 1) % len(trace.times_s)
        assert trace.piece_at(until_s + 1e-9 * until_s) == next_one or trace.piece_at(until_s) == next_one
    else:
        assert not trace.loops
        assert trace.piece_at(time_s) == len(trace.times_s) - 1


def test_a_rate_of_zero_for_longer_than_a_day_is_for_ever() -> None:
    for outage_s, is_waited_for in ((LONGEST_OUTAGE_S, True), (LONGEST_OUTAGE_S + 1, False)):
        tables = joined(RateTable((0.0, 10.0, 10.0 + outage_s), (1.0, 0.0, 2.0)))
        assert (time_of(tables, 1, 12.0, 0.0, math.inf) == 11.0 + outage_s) is is_waited_for
        assert (resumes_s(tables, 1, 10.0) == 10.0 + outage_s) is is_waited_for
        # Who has all he needs before does not see it.
        assert time_of(tables, 1, 10.0, 0.0, math.inf) == 10.0


def test_a_dark_loop_never_moves_anything() -> None:
    tables = joined(RateTable((0.0, 1.0), (0.0, 0.0), 600.0))
    assert time_of(tables, 1, 1.0, 5.0, math.inf) == math.inf
    assert resumes_s(tables, 1, 5.0) == math.inf


# --- tables made of tables ------------------------------------------------------------------------------------


def pointwise(table: RateTable, time_s: float) -> float:
    """The rate at a time by going through the table from its start, round after round."""
    while time_s >= table.duration_s:
        time_s -= table.duration_s - table.repeat_from_s
    return [rate for start_s, rate in zip(table.times_s, table.rates, strict=True) if start_s <= time_s][-1]


@st.composite
def whole_tables(draw: st.DrawFn) -> RateTable:
    """Whole numbers, so that the ends of pieces are exact; looping from a later piece, from 0, or not at all."""
    lengths_s = draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    edges_s = [0, *np.cumsum(lengths_s).tolist()]
    rates = draw(st.lists(st.integers(0, 4).map(float), min_size=len(lengths_s), max_size=len(lengths_s)))
    if draw(st.booleans()):
        return RateTable(edges_s[:-1], rates)
    return RateTable(edges_s[:-1], rates, edges_s[-1], draw(st.sampled_from(edges_s[:-1])))


@st.composite
def cuts(draw: st.DrawFn) -> list[tuple[float, float]]:
    """Disjoint times without a rate, in any order; the last one may be for ever."""
    edges_s = sorted(draw(st.lists(st.integers(0, 40), min_size=2, max_size=6, unique=True)))
    pairs = [(float(start_s), float(end_s)) for start_s, end_s in zip(edges_s[::2], edges_s[1::2], strict=False)]
    if draw(st.booleans()):
        pairs[-1] = (pairs[-1][0], math.inf)
    return draw(st.permutations(pairs))


@MANY
@given(whole_tables(), cuts())
@example(RateTable([0, 1], [1.0, 2.0], 2.0), [(5.0, math.inf)])
def test_without_is_zero_inside_and_the_same_outside_for_ever(
    table: RateTable, gaps: Sequence[tuple[float, float]]
) -> None:
    tables = joined(table.without(gaps))
    for time_s in np.arange(0.0, 100.0, 0.5).tolist():
        is_cut = any(start_s <= time_s < end_s for start_s, end_s in gaps)
        assert rate_at(tables, 1, time_s) == (0.0 if is_cut else pointwise(table, time_s))


@MANY
@given(traces_with_moments(), st.floats(0, 3e4), st.floats(1e-3, 3e4))
def test_an_outage_in_a_trace_takes_away_what_the_trace_carries_in_it(
    case: tuple[LinkTrace, float, float], start_s: float, length_s: float
) -> None:
    trace, from_s, until_s = case
    end_s = start_s + length_s
    assume(end_s < 200 * trace.duration_s)
    whole, cut = joined(link_table(trace)), joined(link_table(trace).without([(start_s, end_s)]))
    outside = [(from_s, min(start_s, until_s)), (max(end_s, from_s), until_s)]
    expected = sum(moved(whole, 1, first_s, last_s, math.inf) for first_s, last_s in outside if first_s < last_s)
    # The end of a piece in a late round is only as exact as its time, once a round.
    rounds = 2 + max(end_s, until_s) / trace.duration_s
    grain = rounds * float(np.spacing(max(end_s, until_s)) * trace.bandwidth_bps.max())
    assert moved(cut, 1, from_s, until_s, math.inf) == pytest.approx(expected, rel=EXACT, abs=grain)


@MANY
@given(whole_tables(), st.floats(0.1, 3), st.floats(0.5, 5))
def test_clipping_scales_and_then_cuts_off_every_rate(table: RateTable, factor: float, ceiling: float) -> None:
    tables = joined(table.clipped(factor, ceiling))
    for time_s in np.arange(0.0, 60.0, 0.5).tolist():
        assert rate_at(tables, 1, time_s) == min(pointwise(table, time_s) * factor, ceiling)
