"""Link files that are wrong: what a policy observes and decides is what the true links demand, in both backends."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.backend import TorchBackend
from executor.wan.testbed import missing
from experiments.runs.scenario import choose_scenario
from planner.adapt.observation import Observation
from planner.adapt.policy import Policy
from planner.plan.plan import Plan
from planner.runs.record import Backend, RunRecord
from planner.scenario.cluster import Cluster
from planner.scenario.effects import WIDE_AREA_TCP, Effects
from planner.scenario.scenario import Scenario
from planner.step.evaluate import step_time_s
from planner.step.orders import with_found_orders
from planner.systems.auto.portfolio import Portfolio, searched
from planner.systems.registry import make_policy
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import chain_plan, mesh_scenario

# By then a policy must know the links.
KNOWN_AFTER = 20
RATE_BPS = (100e6, 60e6)
LATENCY_S = (0.02, 0.035)


class Watched:
    """Passes observations on to a policy, and keeps them."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.seen: list[Observation] = []

    def decide(self, observation: Observation, plan: Plan) -> Plan | None:
        self.seen.append(observation)
        return self._policy.decide(observation, plan)


def truth() -> tuple[Scenario, Plan]:
    """Three stages in three regions; each link carries half its rate or more."""

    def link(source: int, target: int) -> tuple[float, float]:
        between = min(source, target) if abs(source - target) == 1 else 0
        return RATE_BPS[between], LATENCY_S[between]

    scenario = mesh_scenario(
        3,
        [0.003, 0.002, 0.003],
        [0.006, 0.004, 0.006],
        output_bytes=[150_000, 150_000, 0],
        link=link,
        global_batch=16,
        regions=["a", "b", "c"],
    )
    return scenario, chain_plan(scenario, microbatches=[2] * 8)


def declared(scenario: Scenario, factors: tuple[float, float], latencies_s: tuple[float, float]) -> Scenario:
    """The scenario with wrong links."""
    links = []
    for link in scenario.cluster.links:
        number = 0 if "device-0" in link.name else 1
        wrong = {"bandwidth_bps": factors[number] * link.bandwidth_bps, "latency_s": latencies_s[number]}
        links.append(replace(link, **wrong))
    return replace(scenario, cluster=Cluster(scenario.cluster.devices, tuple(links)))


def watched(
    backend: Backend, true: Scenario, believed: Scenario, plan: Plan, policy: str = "depth"
) -> tuple[Watched, RunRecord]:
    watching = Watched(make_policy(policy, believed))
    # `auto` decides for the first time after 20 s, in which a step takes a second.
    return watching, backend.run(true, plan, watching, KNOWN_AFTER + 6)


def assert_seen(scenario: Scenario, observation: Observation, efficiency: float, rate_error: float) -> None:
    assert len(observation.paths) == 4
    for path in observation.paths:
        (link,) = scenario.cluster.path(path.source, path.target)
        assert path.rate_bps == pytest.approx(link.bandwidth_bps * efficiency, rel=rate_error)
        assert path.latency_s == pytest.approx(link.latency_s, abs=0.003)


FACTORS = st.floats(math.log(0.2), math.log(5)).map(math.exp)
LATENCIES_S = st.floats(0.01, 0.1)


@settings(max_examples=15)
@given(st.tuples(FACTORS, FACTORS), st.tuples(LATENCIES_S, LATENCIES_S))
def test_a_simulated_policy_decides_by_the_true_links(
    factors: tuple[float, float], latencies_s: tuple[float, float]
) -> None:
    scenario, plan = truth()
    right, by_truth = watched(Simulator(), scenario, scenario, plan)
    wrong, by_file = watched(Simulator(), scenario, declared(scenario, factors, latencies_s), plan)
    assert_seen(scenario, wrong.seen[KNOWN_AFTER], 1.0, 0.001)
    assert [each.plan for each in by_truth.decisions[-1:]] == [each.plan for each in by_file.decisions[-1:]]
    assert right.seen[-1].plan == wrong.seen[-1].plan


WRONG = {
    "slow then fast": ((0.2, 5.0), (0.1, 0.01)),
    "fast then slow": ((5.0, 0.2), (0.01, 0.1)),
    "slow": ((0.2, 0.2), (0.01, 0.01)),
}


@pytest.mark.slow
@pytest.mark.parametrize(("factors", "latencies_s"), WRONG.values(), ids=WRONG)
def test_the_simulated_search_is_by_the_true_links(
    factors: tuple[float, float], latencies_s: tuple[float, float]
) -> None:
    """Links that no step has used stay as declared: the plan that is found uses none of them."""
    scenario, plan = truth()
    scenario = replace(scenario, effects=Effects(network=WIDE_AREA_TCP))
    found = []
    for believed in (scenario, declared(scenario, factors, latencies_s)):
        record = Simulator().run(scenario, plan, make_policy("auto", believed), 2 * KNOWN_AFTER)
        found.append(record.decisions[-1].plan)
    # Two replicas of one pipeline and two pipelines of one device each do the same.
    assert step_time_s(found[1], scenario) == pytest.approx(step_time_s(found[0], scenario))
    assert step_time_s(found[0], scenario) < 0.3 * step_time_s(plan, scenario)


@pytest.mark.parametrize("factor", [pytest.param(0.2, marks=pytest.mark.slow), 5.0])
def test_orders_of_a_found_plan_are_those_for_the_true_links(factor: float) -> None:
    """The schedule of the plan finds another order for the declared links, with which a step takes longer."""
    scenario = choose_scenario("four-sites")
    steady = tuple(replace(link, trace=None) for link in scenario.cluster.links)
    scenario = replace(scenario, cluster=replace(scenario.cluster, links=steady))
    wrong = tuple(replace(link, bandwidth_bps=factor * link.bandwidth_bps) for link in steady)
    believed = replace(scenario, cluster=replace(scenario.cluster, links=wrong))
    portfolio = Portfolio(believed, searched)
    handover_s = scenario.effects.network.handover_s
    portfolio.cover({link.name: (link.bandwidth_bps, link.latency_s + handover_s) for link in steady}, frozenset())
    # Devices know the declared links only.
    carried_out = {plan.order: with_found_orders(plan, believed) for plan in portfolio.plans()}
    unordered = replace(carried_out["dynamic"], order="scheduled")
    right_s, wrong_s = (step_time_s(with_found_orders(unordered, links), scenario) for links in (scenario, believed))
    assert step_time_s(carried_out["scheduled"], scenario) == pytest.approx(right_s)
    assert wrong_s > 1.02 * right_s


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "backend"),
    [
        pytest.param(Effects(), lambda: TorchBackend("paced", emulator="shaper"), id="shaper"),
        pytest.param(
            Effects(network=WIDE_AREA_TCP),
            lambda: TorchBackend("paced", emulator="relay"),
            id="relay",
        ),
    ],
)
@pytest.mark.parametrize(
    ("factors", "latencies_s"), [((0.2, 5.0), (0.1, 0.01)), ((5.0, 0.2), (0.01, 0.1))], ids=["slow", "fast"]
)
@pytest.mark.parametrize("policy", ["depth", "auto"])
def test_a_real_policy_decides_by_the_true_links(
    network: Effects,
    backend: Callable[[], Backend],
    factors: tuple[float, float],
    latencies_s: tuple[float, float],
    policy: str,
) -> None:
    if network != Effects() and (lack := missing()) is not None:
        pytest.skip(lack)
    scenario, plan = truth()
    scenario = replace(scenario, effects=network)
    wrong, record = watched(backend(), scenario, declared(scenario, factors, latencies_s), plan, policy)
    assert_seen(scenario, wrong.seen[KNOWN_AFTER], network.network.payload_efficiency, 0.1)
    _, simulated = watched(Simulator(), scenario, scenario, plan, policy)
    # Noise may choose among plans that are equally fast: the plan is as fast as the one by the true links.
    here_s, there_s = (step_time_s(each.decisions[-1].plan, scenario) for each in (record, simulated))
    assert here_s == pytest.approx(there_s, rel=0.03)
