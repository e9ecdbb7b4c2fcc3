from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.core.step_program import compile_plan
from planner.adapt.observation import Observation, PathObservation
from planner.check import check_plan
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.systems.deepcee.depth_choice import MOST_MICROBATCHES_PER_STAGE
from planner.systems.deepcee.policy import DepthPolicy
from planner.systems.registry import POLICIES, make_policy
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import chain_plan, chain_scenario, layered_plan, mesh_scenario
from traces.common.errors import InputError
from traces.trace import LinkTrace

RATE_BPS = 1e6


@pytest.fixture
def scenario() -> Scenario:
    """Two equal stages; an activation of one sample takes 0.04 s."""
    return chain_scenario([0.1, 0.1], [0.2, 0.2], output_bytes=[5000, 0], bandwidth_bps=RATE_BPS, global_batch=16)


def seen(
    scenario: Scenario, plan: Plan, step: int, *, rate_bps: float = RATE_BPS, latency_s: float | None = 0.0
) -> Observation:
    """A step in which every path of the plan carried at this rate and latency, and compute was as profiled."""
    programs = compile_plan(plan, scenario)
    pairs = sorted({(t.source, t.target) for p in programs.values() for w in p.work for t in w.sends})
    paths = tuple(PathObservation(a, b, 10_000, ((0.0, 80_000 / rate_bps),), latency_s) for a, b in pairs)
    compute_s = tuple(sorted((name, sum(w.duration_s for w in p.work)) for name, p in programs.items()))
    return Observation(step, plan, compute_s, paths)


def settled(policy: DepthPolicy, scenario: Scenario, plan: Plan, **weather: float) -> Plan:
    """The plan after some steps of the same weather."""
    for step in range(8):
        plan = policy.decide(seen(scenario, plan, step, **weather), plan) or plan
    return plan


def depths(plan: Plan) -> list[int]:
    return [stage.in_flight for stage in plan.pipelines[0].stages]


def samples_in_flight(plan: Plan) -> int:
    return plan.pipelines[0].stages[0].in_flight * max(plan.pipelines[0].microbatches)


def test_depth_rises_with_the_latency_and_falls_on_recovery(scenario: Scenario) -> None:
    policy = DepthPolicy(scenario)
    calm = settled(policy, scenario, chain_plan(scenario))
    rough = settled(policy, scenario, calm, latency_s=0.6)
    recovered = settled(policy, scenario, rough)
    assert samples_in_flight(rough) > samples_in_flight(calm)
    assert depths(rough)[0] > 2
    assert samples_in_flight(recovered) < samples_in_flight(rough)
    assert depths(recovered) == depths(calm)


def test_depth_rises_when_a_link_slows_and_falls_on_recovery(scenario: Scenario) -> None:
    policy = DepthPolicy(scenario)
    calm = settled(policy, scenario, chain_plan(scenario))
    slow = settled(policy, scenario, calm, rate_bps=RATE_BPS / 6)
    recovered = settled(policy, scenario, slow)
    assert samples_in_flight(slow) > samples_in_flight(calm)
    assert samples_in_flight(recovered) < samples_in_flight(slow)


def test_calm_weather_changes_nothing_once_settled(scenario: Scenario) -> None:
    policy = DepthPolicy(scenario)
    plan = settled(policy, scenario, chain_plan(scenario))
    for step in range(20):
        assert policy.decide(seen(scenario, plan, step), plan) is None


def test_jitter_of_a_few_percent_changes_nothing(scenario: Scenario) -> None:
    policy = DepthPolicy(scenario)
    plan = settled(policy, scenario, chain_plan(scenario))
    for step in range(20):
        sway = 1.02 if step % 2 else 0.98
        assert policy.decide(seen(scenario, plan, step, rate_bps=sway * RATE_BPS), plan) is None


def test_adapting_is_faster_than_staying_on_a_link_that_slows() -> None:
    trace = LinkTrace(np.array([0.0, 20.0]), np.array([1e6, 1.2e5]), 1e4, np.array([0.01, 0.5]))
    scenario = chain_scenario(
        [0.1] * 3, [0.2] * 3, output_bytes=[5000, 5000, 0], bandwidth_bps=1e6, trace=trace, global_batch=24
    )
    plan = chain_plan(scenario)
    ends_s = [
        max(event.end_s for event in Simulator().run(scenario, plan, policy, 20).events)
        for policy in (make_policy("depth", scenario), None)
    ]
    assert ends_s[0] < 0.9 * ends_s[1]


@st.composite
def weather(draw: st.DrawFn) -> tuple[float, float | None]:
    return draw(st.floats(1e3, 1e8)), draw(st.one_of(st.none(), st.floats(-0.01, 2.0)))


@settings(max_examples=60)
@given(
    st.lists(weather(), min_size=1, max_size=6),
    st.sampled_from(["1f1b", "gpipe"]),
    st.integers(0, 20_000),
    st.lists(st.integers(1, 3), min_size=3, max_size=3),
)
def test_any_weather_leads_to_plans_that_fit_and_keep_the_batch(
    days: Sequence[tuple[float, float | None]], schedule: str, spare_bytes: int, widths: list[int]
) -> None:
    scenario = mesh_scenario(
        sum(widths),
        [0.1] * 3,
        [0.2] * 3,
        link=lambda a, b: (RATE_BPS, 0.01),
        memory_bytes=8000 + 2000 * (3 if schedule == "1f1b" else 12) + spare_bytes,
        global_batch=12,
    )
    stages = [(index + 1, width, 3 - index) for index, width in enumerate(widths)]
    plan = layered_plan(scenario, [(stages, [2] * 6)], schedule=schedule)
    check_plan(plan, scenario)
    policy = DepthPolicy(scenario)
    for step, (rate_bps, latency_s) in enumerate(days):
        decided = policy.decide(seen(scenario, plan, step, rate_bps=rate_bps, latency_s=latency_s), plan)
        if decided is not None:
            check_plan(decided, scenario)
            assert decided.global_batch == plan.global_batch
            assert decided.schedule == plan.schedule
            plan = decided


def test_gpipe_with_replicas_stays_within_memory() -> None:
    # Two replicas share 9 samples as 4 and 5, 3 as 2 and 1. GPipe holds all microbatches at once: 5 samples as
    # one microbatch, for which there is room, 6 as three.
    scenario = mesh_scenario(
        4, [0.1, 0.1], [0.2, 0.2], output_bytes=[2000, 0], memory_bytes=8000 + 5000, global_batch=9
    )
    plan = layered_plan(scenario, [([(1, 2, 2), (2, 2, 1)], [9])], schedule="gpipe")
    check_plan(plan, scenario)
    decided = DepthPolicy(scenario).decide(seen(scenario, plan, 0, rate_bps=1e9), plan)
    if decided is not None:
        check_plan(decided, scenario)


@settings(max_examples=30)
@given(st.lists(weather(), min_size=1, max_size=6))
def test_the_same_observations_lead_to_the_same_decisions(days: Sequence[tuple[float, float | None]]) -> None:
    scenario = chain_scenario([0.1, 0.2], [0.2, 0.4], output_bytes=[5000, 0], bandwidth_bps=RATE_BPS, global_batch=12)
    plans = [chain_plan(scenario)] * 2
    policies = [DepthPolicy(scenario), DepthPolicy(scenario)]
    for step, (rate_bps, latency_s) in enumerate(days):
        decided = [
            policy.decide(seen(scenario, plan, step, rate_bps=rate_bps, latency_s=latency_s), plan)
            for policy, plan in zip(policies, plans, strict=True)
        ]
        assert decided[0] == decided[1]
        plans = [new or old for new, old in zip(decided, plans, strict=True)]


def test_policies_by_name(scenario: Scenario) -> None:
    assert make_policy("none", scenario) is None
    assert isinstance(make_policy("depth", scenario), DepthPolicy)
    assert make_policy("depth", scenario) is not make_policy("depth", scenario)
    with pytest.raises(
        InputError, match=rf"unknown policy 'dept'; did you mean 'depth'\? valid: {', '.join(POLICIES)}"
    ):
        make_policy("dept", scenario)


def test_a_large_batch_is_not_cut_finer_than_pays() -> None:
    scenario = chain_scenario([0.1, 0.1], [0.2, 0.2], output_bytes=[5000, 0], bandwidth_bps=1e9, global_batch=4096)
    plan = chain_plan(scenario, microbatches=[2048, 2048])
    decided = DepthPolicy(scenario).decide(seen(scenario, plan, 0, rate_bps=1e9), plan)
    assert decided is not None
    assert len(decided.pipelines[0].microbatches) == MOST_MICROBATCHES_PER_STAGE * 2
