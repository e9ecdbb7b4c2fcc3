"""Tests of plans whose messages between regions may be compressed."""

from dataclasses import replace

import pytest

from experiments.runs.scenario import choose_scenario
from planner.plan.plan import COMPRESSIONS
from planner.scenario.scenario import Scenario
from planner.systems.auto.candidates.compressed import as_if_compressed, with_compressions
from planner.systems.auto.objective import contended_step_time_s
from planner.systems.auto.portfolio import Portfolio, searched
from planner.systems.auto.strategy import auto


def allowing(scenario: Scenario, *compressions: str, precision: str = "fp32") -> Scenario:
    return replace(scenario, training=replace(scenario.training, compressions=compressions, precision=precision))


SITES = choose_scenario("four-sites")


def test_smaller_messages_are_chosen_where_they_shorten_the_step() -> None:
    plain, free = auto(SITES), allowing(SITES, *COMPRESSIONS)
    compressed = auto(free)
    assert (plain.compression, compressed.compression) == ("none", "int8")
    assert contended_step_time_s(compressed, SITES) < 0.95 * contended_step_time_s(plain, SITES)


@pytest.mark.parametrize("name", ["two-regions", "cloud-edge-end-small"])
def test_numbers_stay_as_they_are_where_rounding_gains_nothing(name: str) -> None:
    scenario = choose_scenario(name)
    assert auto(allowing(scenario, *COMPRESSIONS)) == auto(scenario)


def test_a_format_that_is_the_only_one_is_used() -> None:
    assert auto(allowing(SITES, "bf16")).compression == "bf16"


def test_only_links_between_regions_are_taken_for_faster() -> None:
    scenario = allowing(choose_scenario("cloud-edge-end"), "none", "int8")
    faster = as_if_compressed(scenario, "int8")
    for link, other in zip(scenario.cluster.links, faster.cluster.links, strict=True):
        ratio = other.bandwidth_bps / link.bandwidth_bps
        assert ratio == (1.0 if link.source == link.target else pytest.approx(4.0, rel=1e-4))
    assert as_if_compressed(scenario, "none") is scenario
    half = allowing(scenario, "none", "bf16", precision="bf16")
    assert as_if_compressed(half, "bf16") is half


def test_the_portfolio_can_change_the_compression_alone() -> None:
    free = allowing(SITES, "none", "int8")
    portfolio, plan = Portfolio(free, searched), auto(SITES)
    portfolio.add(plan)
    assert set(with_compressions(plan, free)) <= set(portfolio.plans())
    assert {each.compression for each in portfolio.plans()} == {"none", "int8"}
    assert {each.pipelines for each in portfolio.plans()} == {plan.pipelines}
