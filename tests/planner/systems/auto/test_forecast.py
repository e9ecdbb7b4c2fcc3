import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.benches.fidelity.hand_made import SHARED
from experiments.benches.fidelity.stages import pipeline_case
from planner.adapt.observation import Observation, PathObservation
from planner.adapt.unused_links import UnusedPath
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.scenario.effects import Effects, NetworkEffects
from planner.step.evaluate import step_time_s
from planner.systems.auto.forecasting.forecast import (
    FIRST_DWELL_S,
    MEMORY_S,
    PROBE_ERROR,
    LinkForecast,
    LinkSample,
    forecast_paths,
    observed_links,
    probed_links,
)
from planner.systems.auto.forecasting.probed_states import STATE_S
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import chain_scenario
from tests.helpers.strategies.scripted_policy import Scripted


def two_stages(scenario_name: str = "chain") -> Plan:
    stages = (Stage(0, 1, (Replica("device-0"),), 2), Stage(1, 2, (Replica("device-1"),), 1))
    return Plan(scenario_name, "chain", "test", "1f1b", (Pipeline(stages, (2,) * 4),))


def test_what_is_declared_stands_until_something_is_seen() -> None:
    link = LinkForecast(1e8, 0.02)
    assert link.samples == (LinkSample(1e8, 0.02, 0.0),)
    link.learn(LinkSample(5e7, 0.03, 2.0))
    assert link.samples == (LinkSample(5e7, 0.03, 2.0),)


@given(st.lists(st.floats(0.8e8, 1.2e8), min_size=1, max_size=200))
def test_a_rate_that_sways_little_is_one_regime(rates_bps: list[float]) -> None:
    link = LinkForecast(1e8, 0.02)
    assert not any(link.learn(LinkSample(rate_bps, 0.02, 1.0)) for rate_bps in rates_bps)
    assert link.age_s == len(rates_bps)


def test_a_lasting_change_begins_a_regime_and_teaches_how_long_they_last() -> None:
    link = LinkForecast(1e8, 0.02)
    for _ in range(100):
        assert not link.learn(LinkSample(1e8, 0.02, 1.0))
    changes = [link.learn(LinkSample(1e7, 0.02, 1.0)) for _ in range(20)]
    assert changes.count(True) == 1
    assert {sample.rate_bps for sample in link.samples} == {1e7}
    known_s = 100 + changes.index(True) + 1
    assert link.expected_dwell_s == (FIRST_DWELL_S + known_s) / 2


def test_memory_is_bounded() -> None:
    link = LinkForecast(1e8, 0.02)
    for _ in range(1000):
        link.learn(LinkSample(1e8, 0.02, 10.0))
    assert sum(sample.duration_s for sample in link.samples) <= MEMORY_S
    assert link.expected_dwell_s == 10000.0


def test_a_link_out_of_sight_counts_the_time_and_can_start_anew() -> None:
    link = LinkForecast(1e8, 0.02)
    link.learn(LinkSample(1e7, 0.02, 1.0))
    link.skip(50.0)
    link.skip(20.0)
    assert link.unseen_s == 70.0
    link.restart()
    assert {sample.rate_bps for sample in link.samples} == {link.declared.rate_bps}
    link.learn(LinkSample(2e7, 0.02, 1.0))
    assert link.unseen_s == 0.0


def test_what_probes_show_of_an_unused_link_comes_with_its_rates() -> None:
    link = LinkForecast(1e8, 0.02)
    for latency_s, most_bps in ((0.5, math.inf), (0.1, 5e6), (0.3, 1e9)):
        link.skip(STATE_S)
        link.see(latency_s, most_bps)
    assert link.samples == tuple(LinkSample(*each, 0.0) for each in ((1e8, 0.5), (5e6, 0.1), (1e8, 0.3)))
    # Where the rate is the same, the latency in the middle is expected.
    assert link.expected == LinkSample(1e8, 0.3, 0.0)
    # Rates of the steps that used it are spread over all that time, and latencies over all rates.
    link.restart()
    link.skip(STATE_S)
    for rate_bps in (1e7, 2e7, 3e7, 4e7):
        link.learn(LinkSample(rate_bps, 0.2, 0.1))
    link.skip(STATE_S)
    link.see(0.4, 1e6)
    assert [sample.latency_s for sample in link.samples] == pytest.approx([0.5, 0.1, 0.3, 0.2, 0.4])
    assert [sample.rate_bps for sample in link.samples] == pytest.approx([1e7, 5e6, 3e7, 3e7, 1e6])
    assert [sample.rate_bps for sample in link.as_declared] == pytest.approx([1e8, 5e6, 1e8, 1e8, 1e6])
    # What is older than 15 minutes is forgotten, however many steps there were.
    for _ in range(1000):
        link.skip(1.0)
        link.see(0.6, math.inf)
    assert {round(sample.latency_s, 9) for sample in link.samples} == {0.6}
    assert len(link.samples) <= MEMORY_S / STATE_S + 1


def test_a_state_is_the_mean_of_what_was_seen_in_its_time() -> None:
    link = LinkForecast(1e8, 0.02)
    link.learn(LinkSample(1e8, 0.02, 1.0))
    link.skip(1.0)
    link.see(0.1, 1e6)
    link.skip(1.0)
    link.see(0.3, 3e6)
    # A step that uses the link shows no bound of its rate, and takes nothing from those that did.
    link.learn(LinkSample(1e8, 0.5, 1.0))
    (sample,) = set(link.samples)
    assert (sample.rate_bps, sample.latency_s) == pytest.approx((1.5e6, 0.3))
    # Once there have been no probes for as long as states are kept, the samples stand for themselves.
    for _ in range(50):
        link.learn(LinkSample(1e8, 0.02, MEMORY_S / 40))
    assert {(sample.rate_bps, sample.latency_s) for sample in link.samples} == {(1e8, 0.02)}
    assert len(link.samples) == 40


def test_messages_take_longer_than_probes_by_their_hand_over() -> None:
    scenario = chain_scenario([0.1, 0.1], [0.2, 0.2], bandwidth_bps=1e8, latency_s=0.02)
    scenario = replace(scenario, effects=Effects(network=NetworkEffects(handover_s=0.005)))
    observation = Observation(0, two_stages(), (), (), unused=(UnusedPath("device-0", "device-1", 0.03, None),))
    assert probed_links(observation, scenario) == {"region-0->region-1": (pytest.approx(0.035), math.inf)}


def test_few_probes_hide_no_rates() -> None:
    link = LinkForecast(1e8, 0.02)
    for step in range(10):
        link.learn(LinkSample(1e7 * (1 + step), 0.02, 1.0))
    link.skip(1.0)
    link.see(0.5, math.inf)
    assert [sample.rate_bps for sample in link.samples] == [1e7 * (1 + step) for step in range(10)]
    assert {sample.latency_s for sample in link.samples} == {0.5}


def test_a_new_regime_forgets_what_probes_showed_before() -> None:
    link = LinkForecast(1e8, 0.02)
    link.learn(LinkSample(1e8, 0.02, 1.0))
    link.skip(1.0)
    link.see(0.5, 1e6)
    for _ in range(100):
        link.learn(LinkSample(1e8, 0.02, 0.1))
    while not link.learn(LinkSample(1e7, 0.02, 0.1)):
        pass
    assert link.samples == (LinkSample(1e7, 0.02, 0.1),)


def test_the_path_with_the_highest_rate_shows_most_of_a_link() -> None:
    scenario = chain_scenario([0.1, 0.1], [0.2, 0.2], bandwidth_bps=1e8, latency_s=0.02)
    paths = [UnusedPath("device-0", "device-1", *shown) for shown in ((0.03, 1e6), (0.04, 2e6), (0.05, None))]
    observation = Observation(0, two_stages(), (), (), unused=tuple(paths[:2]))
    assert probed_links(observation, scenario) == {"region-0->region-1": (0.03, PROBE_ERROR * 2e6)}
    assert probed_links(replace(observation, unused=tuple(paths)), scenario) == {"region-0->region-1": (0.03, math.inf)}


def test_a_link_that_is_always_used_has_its_own_latencies() -> None:
    link = LinkForecast(1e8, 0.02)
    samples = [LinkSample(1e8 + step, 0.01 * step, 10.0 + step) for step in range(30)]
    for sample in samples:
        link.learn(sample)
    assert link.samples == tuple(samples)


def test_a_path_is_put_down_to_its_link() -> None:
    scenario = chain_scenario([0.1, 0.1], [0.2, 0.2], bandwidth_bps=1e8, latency_s=0.02)
    path = PathObservation("device-0", "device-1", 1_000_000, ((0.0, 0.4),), 0.03)
    seen = observed_links(Observation(0, two_stages(), (), (path,)), scenario)
    assert seen == {"region-0->region-1": (2e7, 0.03)}


@pytest.mark.parametrize("factor", [0.2, 1.0, 5.0])
def test_the_rate_of_a_shared_link_is_found_whatever_is_declared(factor: float) -> None:
    """Two pipelines send over the same links between regions, at times side by side."""
    case = pipeline_case("shared", "1f1b", SHARED, (1,) * 6, [5, 3], "1f1b")
    watching = Scripted({})
    Simulator().run(case.scenario, case.plan, watching, 4)
    cluster = case.scenario.cluster
    wrong = tuple(replace(link, bandwidth_bps=factor * link.bandwidth_bps) for link in cluster.links)
    declared = replace(case.scenario, cluster=replace(cluster, links=wrong))
    for observation in watching.seen[1:]:
        seen = observed_links(observation, declared)
        assert seen.keys() == {"region-0->region-1", "region-1->region-0"}
        for rate_bps, _ in seen.values():
            assert rate_bps == pytest.approx(120e6, rel=0.01)


@given(st.floats(1e5, 1e9), st.floats(0.0, 0.2))
def test_forecast_paths_are_links_as_they_would_be_declared(rate_bps: float, latency_s: float) -> None:
    scenario = chain_scenario([0.1, 0.1], [0.2, 0.2])
    declared = chain_scenario([0.1, 0.1], [0.2, 0.2], bandwidth_bps=rate_bps, latency_s=latency_s)
    states = {link.name: LinkSample(rate_bps, latency_s, 1.0) for link in scenario.cluster.links}
    plan = two_stages()
    assert step_time_s(plan, scenario, forecast_paths(plan, scenario, states)) == step_time_s(plan, declared)
