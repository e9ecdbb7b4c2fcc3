"""Tests of plans whose messages between regions may be compressed."""

from dataclasses import replace
from functools import cache

import pytest

from experiments.runs.scenario import choose_scenario
from planner.plan.plan import Plan
from planner.runs.metrics import measure
from planner.scenario.cluster import Cluster, Link
from planner.scenario.scenario import Scenario, with_better_links, within_regions
from planner.systems.auto.candidates.compressed import as_if_compressed, with_compressions
from planner.systems.auto.objective import contended_step_time_s, traffic_price
from planner.systems.auto.policy import AutoPolicy
from planner.systems.auto.portfolio import Portfolio, searched
from planner.systems.auto.strategy import auto
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import layered_plan, mesh_scenario
from traces.common.errors import InputError
from traces.trace import LinkTrace


def allowing(scenario: Scenario, *compressions: str, precision: str = "fp32") -> Scenario:
    return replace(scenario, training=replace(scenario.training, compressions=compressions, precision=precision))


SITES = choose_scenario("four-sites")
# Two of them show as much as all four, and are planned in a quarter of the time.
TWO = within_regions(SITES, ["south", "west"])
SLOW = with_better_links(TWO, 0.5)


@cache
def plain_plan() -> Plan:
    return auto(SLOW)


def test_smaller_messages_are_chosen_where_they_shorten_the_step() -> None:
    plain, compressed = plain_plan(), auto(allowing(SLOW, "none", "int8"))
    assert (plain.compression, compressed.compression) == ("none", "int8")
    assert contended_step_time_s(compressed, SLOW) < 0.95 * contended_step_time_s(plain, SLOW)


def test_numbers_stay_as_they_are_where_rounding_gains_less_than_a_hundredth() -> None:
    quick = with_better_links(TWO, 1.2)
    plan = auto(allowing(quick, "none", "int8"))
    assert (plan.compression, len(plan.devices)) == ("none", 2)
    rounded = replace(plan, compression="int8")
    assert 0.99 < contended_step_time_s(rounded, quick) / contended_step_time_s(plan, quick) < 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((), "nothing is no"),
        (("int9",), "unknown compression 'int9'"),
        (("int8", "int8"), "int8, int8 is no"),
    ],
)
def test_a_list_of_formats_names_each_once(given: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        allowing(SITES, *given)


def test_smaller_messages_cost_less() -> None:
    plan, links = plain_plan(), tuple(replace(link, price_per_gb=0.02) for link in SLOW.cluster.links)
    dear = replace(SLOW, cluster=Cluster(SLOW.cluster.devices, links))
    rounded = replace(plan, compression="int8")
    assert traffic_price(rounded, dear) == pytest.approx(traffic_price(plan, dear) / 4, rel=1e-3)


def test_the_price_of_a_step_is_that_of_all_that_the_simulator_sends() -> None:
    """Messages between stages and between replicas, and sums of gradients over the paid link."""
    scenario = mesh_scenario(
        4,
        [0.1] * 4,
        [0.1] * 4,
        output_bytes=[3000] * 4,
        parameter_bytes=[50_000] * 4,
        global_batch=8,
        link=lambda a, b: (1e6, 0.01),
    )
    links = tuple(replace(link, price_per_gb=0.02) for link in scenario.cluster.links)
    scenario = replace(scenario, cluster=Cluster(scenario.cluster.devices, links))
    plan = layered_plan(scenario, [([(2, 1, 1), (4, 1, 1)], [2, 2]), ([(2, 1, 1), (4, 1, 1)], [2, 2])])
    price = traffic_price(plan, scenario)
    assert measure(Simulator().run(scenario, plan, None, 1)).cost_usd == pytest.approx(price, rel=1e-6)


@pytest.mark.slow
def test_the_policy_goes_back_when_the_links_recover() -> None:
    fast = with_better_links(TWO, 40)

    def falling(link: Link) -> Link:
        rates_bps = [link.bandwidth_bps / (80 if slow else 1) for slow in (False, True, False)]
        return replace(link, trace=LinkTrace([0.0, 40.0, 120.0], rates_bps, 3600.0))

    links = tuple(map(falling, fast.cluster.links))
    scenario = allowing(replace(fast, cluster=Cluster(fast.cluster.devices, links)), "none", "int8")
    record = Simulator(duration_s=200.0).run(scenario, auto(fast), AutoPolicy(scenario), 10**6)
    used = [decision.plan.compression for decision in record.decisions]
    assert "int8" in used
    assert used[-1] == "none"


@pytest.mark.slow
def test_the_policy_keeps_small_messages_where_slow_times_of_the_links_need_them() -> None:
    fast = with_better_links(TWO, 8)

    def swaying(link: Link) -> Link:
        return replace(link, trace=LinkTrace([0.0, 25.0], [link.bandwidth_bps, link.bandwidth_bps / 8], 50.0))

    links = tuple(map(swaying, fast.cluster.links))
    scenario = allowing(replace(fast, cluster=Cluster(fast.cluster.devices, links)), "none", "int8")
    start = replace(auto(fast), compression="int8")
    # In the first half of each period messages as they are would do.
    assert contended_step_time_s(replace(start, compression="none"), fast) < 1.001 * contended_step_time_s(start, fast)
    # Twice slow after it was fast, and fast again.
    record = Simulator(duration_s=125.0).run(scenario, start, AutoPolicy(scenario), 10**6)
    assert "none" not in [decision.plan.compression for decision in record.decisions]


def test_a_format_that_is_the_only_one_is_used() -> None:
    assert auto(allowing(TWO, "bf16")).compression == "bf16"


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
    free = allowing(SLOW, "none", "int8")
    portfolio, plan = Portfolio(free, searched), plain_plan()
    portfolio.add(plan)
    assert set(with_compressions(plan, free)) <= set(portfolio.plans())
    assert {each.compression for each in portfolio.plans()} == {"none", "int8"}
    assert {each.pipelines for each in portfolio.plans()} == {plan.pipelines}
