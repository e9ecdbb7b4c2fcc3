"""Tests of the portfolio of policy `auto`: links that are observed a little differently lead to the same plans."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.runs.scenario import choose_scenario
from planner.adapt.observation import GRID
from planner.plan.plan import Plan
from planner.systems.auto.portfolio import Links, Portfolio, declared_links, searched

SCENARIO = choose_scenario("four-sites")
DECLARED = declared_links(SCENARIO)
COUNT = len(DECLARED)

SMALL = st.lists(st.floats(-0.4, 0.4), min_size=2 * COUNT, max_size=2 * COUNT)


def found(links: Links) -> set[Plan]:
    """Return the plans without their orders, which are those for exactly these links."""
    portfolio = Portfolio(SCENARIO, searched)
    portfolio.cover(links, frozenset())
    plans = set()
    for plan in portfolio.plans():
        pipelines = tuple(replace(each, orders=()) for each in plan.pipelines)
        plans.add(replace(plan, schedule="", pipelines=pipelines))
    return plans


def observed(deviations: list[float]) -> Links:
    """Return the declared links with rates and latencies that deviate by powers of the grid's ratio.

    The links of one site have fallen by twelve steps of the grid.
    """
    links = {}
    for number, (name, (rate_bps, latency_s)) in enumerate(DECLARED.items()):
        rate = deviations[number] - (12 if "east" in name else 0)
        links[name] = rate_bps * GRID**rate, latency_s * GRID ** deviations[COUNT + number]
    return links


@pytest.mark.slow
@settings(max_examples=2)
@given(SMALL, SMALL)
def test_links_that_differ_by_noise_lead_to_the_same_plans(one: list[float], other: list[float]) -> None:
    assert found(observed(one)) == found(observed(other))
