from dataclasses import replace
from math import ceil, inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.network import ConstantRatePath
from planner.runs.event_totals import step_ends_s
from planner.scenario.cluster import Cluster
from planner.scenario.scenario import (
    Scenario,
    in_window,
)
from planner.step.evaluate import step_time_s
from planner.systems.auto.objective import Objective
from planner.systems.auto.robust import check_quantile, in_bad_windows, robust_cost_model, robust_rate, trace_windows
from planner.systems.auto.strategy import plan_for, robust_plan, start_plan
from planner.systems.registry import make_plan
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import chain_plan, chain_scenario
from traces.common.errors import InputError
from traces.trace import LinkTrace

RATES_BPS = st.lists(st.floats(1e4, 1e7), min_size=1, max_size=5)


def swaying(rates_bps: list[float], latencies_s: list[float], piece_s: float, *, loops: bool = True) -> Scenario:
    """Three stages with a trace of pieces of equal length on every link."""
    times_s = piece_s * np.arange(len(rates_bps))
    trace = LinkTrace(times_s, np.array(rates_bps), piece_s * len(rates_bps), np.array(latencies_s), loops=loops)
    scenario = chain_scenario([1.0, 2.0, 0.5], [2.0, 3.0, 1.0], bandwidth_bps=trace.mean_bps, trace=trace)
    mean_s = float(np.mean(latencies_s))
    links = tuple(replace(link, latency_s=mean_s) for link in scenario.cluster.links)
    return replace(scenario, cluster=Cluster(scenario.cluster.devices, links))


@settings(max_examples=30)
@given(RATES_BPS, st.floats(0, 2), st.floats(5, 400), st.floats(0, 0.99), st.floats(1, 100))
def test_a_loop_over_the_windows_finds_the_same(
    rates_bps: list[float], latency_s: float, piece_s: float, quantile: float, window_s: float
) -> None:
    latencies_s = [latency_s * (1 + number) for number in range(len(rates_bps))]
    scenario = swaying(rates_bps, latencies_s, piece_s)
    plan = chain_plan(scenario)
    windows = trace_windows(scenario, window_s)
    steps_s = []
    for start_s, end_s in windows:
        # The mean of a thousand moments in the middle of as many slices: not how it is computed.
        moments_s = start_s + (end_s - start_s) * (np.arange(20000) + 0.5) / 20000
        piece = np.minimum((moments_s // piece_s).astype(int), len(rates_bps) - 1)
        rate_bps, delay_s = np.array(rates_bps)[piece].mean(), np.array(latencies_s)[piece].mean()
        steps_s.append(step_time_s(plan, scenario, lambda a, b, r=rate_bps, d=delay_s: ConstantRatePath(r, d)))
    judged_s = robust_cost_model(scenario, quantile, window_s)(plan)
    tolerance_s = 1e-3 * max(steps_s)
    slower = sum(each_s > judged_s + tolerance_s for each_s in steps_s)
    as_slow = sum(each_s >= judged_s - tolerance_s for each_s in steps_s)
    assert slower <= quantile * len(windows) + 1e-6
    assert as_slow >= min(len(windows), ceil(quantile * len(windows) + 1e-6))
    assert min(abs(each_s - judged_s) for each_s in steps_s) <= tolerance_s


@settings(max_examples=20)
@given(st.floats(1e4, 1e7), st.floats(0, 2), st.floats(0, 0.99), st.booleans())
def test_on_a_constant_trace_it_is_the_steady_step(
    rate_bps: float, latency_s: float, quantile: float, loops: bool
) -> None:
    scenario = swaying([rate_bps] * 3, [latency_s] * 3, 100.0, loops=loops)
    plan = chain_plan(scenario)
    assert robust_cost_model(scenario, quantile)(plan) == pytest.approx(step_time_s(plan, scenario), rel=1e-9)
    rate = robust_rate(plan, scenario, quantile)
    assert rate.samples_per_s == pytest.approx(plan.global_batch / step_time_s(plan, scenario), rel=1e-9)


def test_without_traces_there_is_one_window() -> None:
    scenario = chain_scenario([1.0, 1.0], [1.0, 1.0])
    assert robust_rate(chain_plan(scenario), scenario, 0.1).windows == 1


def test_windows_are_equally_long_and_end_with_what_is_known() -> None:
    scenario = swaying([1e6] * 4, [0.0] * 4, 250.0)
    windows = trace_windows(scenario)
    assert len(windows) == 17
    assert windows[-1][1] == pytest.approx(1000.0)
    assert {round(end_s - start_s, 6) for start_s, end_s in windows} == {round(1000 / 17, 6)}


def test_a_window_of_outage_ends() -> None:
    scenario = swaying([1e6, 0.0], [0.0, 0.0], 100.0)
    assert in_window(scenario, 100.0, 200.0).cluster.links[0].bandwidth_bps == 1.0
    plan = chain_plan(scenario)
    assert robust_cost_model(scenario, 0.0)(plan) > 1000 * robust_cost_model(scenario, 0.9)(plan)


def test_a_link_without_a_limit_has_none_in_bad_windows() -> None:
    scenario = swaying([1e8, 1e6], [0.0, 0.0], 100.0)
    *others, last = scenario.cluster.links
    links = (*others, replace(last, bandwidth_bps=inf, trace=None))
    bad = in_bad_windows(replace(scenario, cluster=Cluster(scenario.cluster.devices, links)), 0.0)
    assert [link.bandwidth_bps for link in bad.cluster.links[-2:]] == [1e6, inf]


def test_a_plan_for_bad_windows_keeps_off_a_link_that_mostly_fails() -> None:
    # Crossing pays at the mean rate, which one window in ten makes alone.
    outage = swaying([1e8, *[1e2] * 9], [0.0] * 10, 60.0)
    scenario = one_kind(outage)
    steady = plan_for(scenario, Objective())
    robust = robust_plan(scenario, Objective(), 0.1)
    judge = robust_cost_model(scenario, 0.1)
    assert len(steady.devices) > 1
    assert len(robust.devices) == 1
    assert judge(robust) < judge(steady)


@pytest.mark.parametrize(
    ("rates_bps", "crosses"),
    [pytest.param([1e8, *[1e2] * 9], False, marks=pytest.mark.slow), ([*[1e8] * 9, 3e7], True)],
)
def test_a_start_is_what_trains_most_over_the_traces(rates_bps: list[float], crosses: bool) -> None:
    scenario = one_kind(swaying(rates_bps, [0.0] * 10, 60.0))
    start, steady = make_plan("auto", scenario), plan_for(scenario, Objective())
    assert (len(start.devices) > 1) == crosses
    trained = [
        len(step_ends_s(Simulator(duration_s=600.0).run(scenario, plan, None, 10**5).events))
        for plan in (start, steady)
    ]
    assert trained[0] >= trained[1]
    # Without traces nothing is compared.
    assert start_plan(in_window(scenario, 0.0, 60.0), Objective()) == make_plan("auto", in_window(scenario, 0.0, 60.0))


def one_kind(scenario: Scenario) -> Scenario:
    """The scenario with all devices of the first one's kind, and a time for every layer on it."""
    devices = tuple(replace(device, kind="kind-0") for device in scenario.cluster.devices)
    layers = tuple(
        replace(layer, times={"kind-0": layer.times[f"kind-{index}"]}) if "kind-0" not in layer.times else layer
        for index, layer in enumerate(scenario.model.layers)
    )
    model = replace(scenario.model, layers=layers)
    return replace(scenario, cluster=Cluster(devices, scenario.cluster.links), model=model)


@pytest.mark.parametrize("quantile", [-0.1, 1.0, float("nan")])
def test_a_quantile_is_a_share_below_one(quantile: float) -> None:
    with pytest.raises(InputError, match="a share of 0 or more and below 1"):
        check_quantile(quantile)
