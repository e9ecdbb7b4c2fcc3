"""Windows of a trace: what plays, what is known before, and what the runs of a window say of each other."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.runs.scenario import choose_scenario
from experiments.sweep.backtest.comparison import compared_runs, summaries
from experiments.sweep.backtest.task import NONE, PROGRESS, STATIC
from experiments.sweep.backtest.windows import beginning_at, links_by_text, scaled_to, window_of
from tests.helpers.strategies.trace_strategies import link_traces
from traces.common.errors import InputError
from traces.trace import LinkTrace

SCENARIO = choose_scenario("cloud-edge-end")
WAN = ("cloud->edge", "edge->cloud", "edge->end", "end->edge")


@given(link_traces(with_latency=True, loops=True), st.floats(0, 1, exclude_max=True), st.floats(0, 1))
def test_a_trace_from_a_moment_on_is_the_same_trace_later(trace: LinkTrace, share: float, later: float) -> None:
    start_s = share * trace.duration_s
    shifted = beginning_at(trace, start_s)
    assert shifted.duration_s == trace.duration_s
    ends_s = np.linspace(0, 2 * trace.duration_s, 17)
    carried = trace.bits_between(start_s, start_s + ends_s)
    assert shifted.bits_between(0.0, ends_s) == pytest.approx(carried, rel=1e-6, abs=1e-6 * trace.mean_bps + 1e-3)
    # In the middle of a piece, where rounding does not move its edges past the moment.
    next_s = np.append(shifted.times_s[1:], shifted.duration_s)
    long, middles_s = next_s - shifted.times_s > 1e-9 * shifted.duration_s, (shifted.times_s + next_s) / 2
    assert trace.latency_s is not None
    assert shifted.latency_s is not None
    expected_s = trace.latency_s[trace.piece_at(start_s + middles_s)]
    assert shifted.latency_s[long].tolist() == expected_s[long].tolist()


def trace_of(*rates_mbps: float) -> LinkTrace:
    """Rates of ten seconds each."""
    return LinkTrace(10.0 * np.arange(len(rates_mbps)), 1e6 * np.array(rates_mbps, np.float64), 10.0 * len(rates_mbps))


def test_only_what_came_before_a_window_is_known() -> None:
    """Two traces that differ from the start of the window on are known as the same."""
    one, other = (window_of(SCENARIO, WAN, trace_of(100, 300, later), 20.0, 10.0, scaled=False) for later in (50, 900))
    for link, same, played, hindsight in zip(
        *(each.cluster.links for each in (one.known, other.known, one.actual, one.in_hindsight)), strict=True
    ):
        assert (link.trace, link.bandwidth_bps) == (None, same.bandwidth_bps)
        if link.name in WAN:
            assert played.trace is not None
            assert played.trace.bandwidth_at([0.0, 10.0, 20.0]).tolist() == [50e6, 100e6, 300e6]
            assert (link.bandwidth_bps, hindsight.bandwidth_bps) == (200e6, 50e6)
        else:
            assert link == played == hindsight


def test_at_the_beginning_of_a_trace_the_declared_rates_are_known() -> None:
    known = window_of(SCENARIO, WAN, trace_of(100, 300), 0.0, 10.0, scaled=False).known
    assert known.cluster.links == SCENARIO.cluster.links


def test_traces_are_scaled_to_the_declared_rate_of_each_link() -> None:
    actual = window_of(SCENARIO, ["edge->end"], trace_of(1, 3), 0.0, 10.0, scaled=True).actual
    (trace,) = (link.trace for link in actual.cluster.links if link.trace is not None)
    assert trace.bandwidth_at([0.0, 10.0]) == pytest.approx([200e6, 600e6])
    with pytest.raises(InputError, match="all rates of the trace are 0"):
        scaled_to(trace_of(0), 1e6)


def test_links_are_named_by_their_ends() -> None:
    assert links_by_text(SCENARIO, ()) == WAN
    assert set(links_by_text(SCENARIO, ["edge-cloud", "edge->end"])) == {*WAN[:2], "edge->end"}
    with pytest.raises(InputError, match="unknown link 'cloud-end'"):
        links_by_text(SCENARIO, ["cloud-end"])


NAMES = (NONE, "auto", "depth", f"{STATIC}megatron", f"{STATIC}deepcee")


@given(st.data(), st.integers(1, 6))
def test_no_run_does_more_than_what_is_known_ahead(data: st.DataObject, intervals: int) -> None:
    shares = st.lists(st.floats(0, 100), min_size=intervals, max_size=intervals)
    in_intervals = {name: data.draw(shares) for name in NAMES}
    runs = {
        name: {"samples_per_s": float(np.cumsum(own)[-1]), PROGRESS: json.dumps(np.cumsum(own).tolist())}
        for name, own in in_intervals.items()
    }
    found = compared_runs(runs)
    bound = sum(max(own[place] for own in in_intervals.values()) for place in range(intervals))
    static = max(sum(own) for name, own in in_intervals.items() if name not in ("auto", "depth"))
    for name, own in in_intervals.items():
        figures = found[name]
        assert figures["known_ahead_per_s"] == pytest.approx(bound)
        assert figures["best_static_per_s"] == pytest.approx(static)
        if bound:
            assert 0 <= float(figures["regret_known_ahead"]) <= 1
            assert (1 - float(figures["regret_known_ahead"])) * bound == pytest.approx(sum(own), abs=1e-9 * bound)
        if sum(in_intervals[NONE]) > 1e-3:
            assert figures["gain"] == pytest.approx(sum(own) / sum(in_intervals[NONE]))


def test_runs_without_the_plan_that_never_changes_are_not_compared() -> None:
    assert compared_runs({"auto": {"samples_per_s": 1.0, PROGRESS: "[1.0]"}}) == {}


def test_summaries_name_the_worst_window() -> None:
    def row(policy: str, start_s: float, gain: float | None) -> dict[str, object]:
        shared = {"trace": "a.csv", "none_per_s": 2.0, "best_static_per_s": 3.0, "known_ahead_per_s": 4.0}
        figures = {"regret_static": 0.1, "regret_known_ahead": 0.2, "changes": 2, "lost_s": 5.0}
        return {"policy": policy, "start_s": start_s, "gain": gain, **shared, **figures}

    rows = [row(NONE, start_s, 1.0) for start_s in (0.0, 60.0)]
    rows += [row("auto", 0.0, 2.0), row("auto", 60.0, 0.5), row("depth", 0.0, None), row(f"{STATIC}auto", 0.0, 9.0)]
    none, auto, static, ahead = summaries(rows)
    assert [each.policy for each in (none, auto, static, ahead)] == [NONE, "auto", "best static plan", "known ahead"]
    assert (auto.windows, auto.worst_trace, auto.worst_start_s, auto.least_gain) == (2, "a.csv", 60.0, 0.5)
    assert (auto.gain, static.gain, ahead.gain) == (pytest.approx(1.0), pytest.approx(1.5), pytest.approx(2.0))
    assert (auto.changes, auto.lost_s, static.regret_static) == (2, 5.0, None)
