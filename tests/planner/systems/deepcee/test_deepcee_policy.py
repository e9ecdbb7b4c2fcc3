from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.core.step_program import compile_plan
from planner.adapt.observation import Observation, PathObservation
from planner.check import check_plan
from planner.cost.network import ConstantRatePath, nominal_path
from planner.plan.plan import Plan
from planner.runs.metrics import measure
from planner.scenario.cluster import Link
from planner.scenario.scenario import Scenario
from planner.systems.deepcee.observed_paths import ObservedPaths, with_observed_links
from planner.systems.deepcee.policy import DeepceePolicy
from planner.systems.registry import make_plan, make_policy
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import chain_plan, chain_scenario
from traces.trace import LinkTrace

RATE_BPS = 1e6


@pytest.fixture
def scenario() -> Scenario:
    """Three stages; the first boundary is wide, the one after the first layer of each stage narrow."""
    return chain_scenario(
        [0.1] * 3,
        [0.2] * 3,
        output_bytes=[5000, 500, 0],
        bandwidth_bps=RATE_BPS,
        global_batch=16,
        parameter_bytes=400,
    )


def seen(
    plan: Plan, scenario: Scenario, step: int, slow: Mapping[tuple[str, str], float] = {}, latency_s: float = 0.0
) -> Observation:
    """A step in which paths carried as declared, or a share of it, and compute was as profiled."""
    programs = compile_plan(plan, scenario)
    pairs = sorted({(t.source, t.target) for p in programs.values() for w in p.work for t in w.sends})
    paths = tuple(
        PathObservation(*pair, 10_000, ((0.0, 80_000 / (RATE_BPS * slow.get(pair, 1.0))),), latency_s) for pair in pairs
    )
    compute_s = tuple(sorted((name, sum(w.duration_s for w in p.work)) for name, p in programs.items()))
    return Observation(step, plan, compute_s, paths)


def test_calm_weather_changes_nothing(scenario: Scenario) -> None:
    plan, policy = make_plan("deepcee", scenario), DeepceePolicy(scenario)
    assert [policy.decide(seen(plan, scenario, step), plan) for step in range(12)] == [None] * 12


def test_depth_rises_with_latency_and_the_start_returns_with_calm(scenario: Scenario) -> None:
    start, policy = chain_plan(scenario, schedule="compact-zb"), DeepceePolicy(scenario)
    plan = start
    for step in range(6):
        plan = policy.decide(seen(plan, scenario, step, latency_s=0.6), plan) or plan
    rough = plan
    assert rough.pipelines[0].stages[0].in_flight * max(rough.pipelines[0].microbatches) > 3
    check_plan(rough, scenario)
    for step in range(6, 16):
        plan = policy.decide(seen(plan, scenario, step), plan) or plan
    assert plan != rough


def test_a_link_that_stays_slow_is_left(scenario: Scenario) -> None:
    start, policy = make_plan("deepcee", scenario), DeepceePolicy(scenario)
    ends = [stage.replicas[0].device for stage in start.pipelines[0].stages][:2]
    assert len(ends) == 2
    slow = {(ends[0], ends[1]): 0.02, (ends[1], ends[0]): 0.02}
    plan = start
    for step in range(40):
        plan = policy.decide(seen(plan, scenario, step, slow), plan) or plan
        check_plan(plan, scenario)
    places = [(stage.first_layer, stage.replicas) for stage in plan.pipelines[0].stages]
    assert places != [(stage.first_layer, stage.replicas) for stage in start.pipelines[0].stages]
    # The links recover: what is not used any more is forgotten, and the start is best again.
    for step in range(40, 400):
        plan = policy.decide(seen(plan, scenario, step), plan) or plan
    assert plan.pipelines[0].stages[0].replicas == start.pipelines[0].stages[0].replicas
    assert [s.end_layer for s in plan.pipelines[0].stages] == [s.end_layer for s in start.pipelines[0].stages]


def test_a_short_drop_is_not_worth_moving_large_layers() -> None:
    heavy = chain_scenario(
        [0.1] * 3,
        [0.2] * 3,
        output_bytes=[5000, 500, 0],
        bandwidth_bps=RATE_BPS,
        global_batch=16,
        parameter_bytes=10**8,
    )
    plan, policy = make_plan("deepcee", heavy), DeepceePolicy(heavy)
    ends = [stage.replicas[0].device for stage in plan.pipelines[0].stages][:2]
    slow = {tuple(ends): 0.3, tuple(ends[::-1]): 0.3}
    places = {stage.replicas for stage in plan.pipelines[0].stages}
    for step in range(8):
        plan = policy.decide(seen(plan, heavy, step, slow), plan) or plan
    assert {stage.replicas for stage in plan.pipelines[0].stages} == places


def test_who_has_gone_is_waited_for(scenario: Scenario) -> None:
    plan, policy = make_plan("deepcee", scenario), DeepceePolicy(scenario)
    gone = replace(seen(plan, scenario, 0), gone=(plan.devices[0],), away=(plan.devices[0],))
    assert policy.decide(gone, plan) is None


def test_it_gains_on_a_link_that_drops() -> None:
    trace = LinkTrace(np.array([0.0, 20.0]), np.array([1e6, 1.2e5]), 1e4, np.array([0.01, 0.5]))
    scenario = chain_scenario(
        [0.1] * 3, [0.2] * 3, output_bytes=[5000, 5000, 0], bandwidth_bps=1e6, trace=trace, global_batch=24
    )
    plan = chain_plan(scenario, schedule="compact-zb")
    rates = [
        measure(Simulator().run(scenario, plan, policy, 20)).samples_per_s
        for policy in (make_policy("deepcee", scenario), None)
    ]
    assert rates[0] > 1.1 * rates[1]


@settings(max_examples=15)
@given(st.lists(st.tuples(st.floats(0.01, 10), st.floats(0, 1)), min_size=1, max_size=8))
def test_any_weather_leads_to_the_same_plans_that_fit(days: list[tuple[float, float]]) -> None:
    scenario = chain_scenario([0.1, 0.2], [0.2, 0.4], output_bytes=[5000, 0], bandwidth_bps=RATE_BPS, global_batch=12)
    plans, policies = [make_plan("deepcee", scenario)] * 2, [DeepceePolicy(scenario), DeepceePolicy(scenario)]
    everywhere = [(a.name, b.name) for a in scenario.cluster.devices for b in scenario.cluster.devices]
    for step, (share, latency_s) in enumerate(days):
        slow = dict.fromkeys(everywhere, share)
        decided = [
            policy.decide(seen(plan, scenario, step, slow, latency_s), plan) or plan
            for policy, plan in zip(policies, plans, strict=True)
        ]
        assert decided[0] == decided[1]
        check_plan(decided[0], scenario)
        plans = decided


# --- Observed links -----------------------------------------------------------------------------------------


@given(st.floats(1e3, 1e9), st.floats(0, 2))
def test_an_observed_path_is_what_the_new_scenario_declares(rate_bps: float, latency_s: float) -> None:
    trace = LinkTrace(np.array([0.0]), np.array([1e6]), 10.0)
    scenario = chain_scenario([0.1] * 3, [0.2] * 3, bandwidth_bps=1e6, latency_s=0.1, trace=trace)
    found = with_observed_links(scenario, {("device-0", "device-1"): ConstantRatePath(rate_bps, latency_s)})
    path = nominal_path(found, "device-0", "device-1")
    assert (path.rate_bps, path.latency_s) == (pytest.approx(rate_bps), pytest.approx(latency_s))
    changed = [new.name for old, new in zip(scenario.cluster.links, found.cluster.links, strict=True) if old != new]
    assert changed == ["region-0->region-1"]
    assert all((link.trace is None) == (link.name in changed) for link in found.cluster.links)


def test_paths_that_share_a_link_give_it_the_fastest_rate(scenario: Scenario) -> None:
    paths = {("device-0", "device-1"): ConstantRatePath(3e5, 0.2)}
    both = {**paths, ("device-0", "device-2"): ConstantRatePath(4e5, 0.1)}
    links: dict[str, Link] = {link.name: link for link in with_observed_links(scenario, both).cluster.links}
    assert links["region-0->region-1"].bandwidth_bps == pytest.approx(3e5)
    assert links["region-0->region-2"].latency_s == pytest.approx(0.1)
    assert with_observed_links(scenario, {}).cluster.links == scenario.cluster.links


def test_what_carries_nothing_is_forgotten(scenario: Scenario) -> None:
    paths, plan = ObservedPaths(scenario), chain_plan(scenario)
    paths.learn(seen(plan, scenario, 0, {("device-0", "device-1"): 0.1}))
    slow_bps = paths.path("device-0", "device-1").rate_bps
    assert slow_bps < 0.2 * RATE_BPS
    quiet = replace(seen(plan, scenario, 1), paths=())
    for _ in range(400):
        paths.learn(quiet)
    assert paths.path("device-0", "device-1").rate_bps == pytest.approx(RATE_BPS, rel=0.02)
