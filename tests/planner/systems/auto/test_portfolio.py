"""Tests of the portfolio of policy `auto`: links that are observed a little differently lead to the same plans."""

import math
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.runs.scenario import choose_scenario
from planner.plan.plan import Plan
from planner.systems.auto.portfolio import GRID, Links, Portfolio, searched

SCENARIO = choose_scenario("four-sites")
COUNT = len(SCENARIO.cluster.links)

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
    """Return the scenario's links, rounded to the grid, with rates and latencies that deviate by powers of its ratio.

    The links of one site have a sixteenth of their rates.
    """
    links = {}
    for number, link in enumerate(SCENARIO.cluster.links):
        rate_bps = link.bandwidth_bps / (16 if "east" in link.name else 1)
        rate, latency = (round(math.log(value, GRID)) for value in (rate_bps, link.latency_s))
        links[link.name] = GRID ** (rate + deviations[number]), GRID ** (latency + deviations[COUNT + number])
    return links


@settings(max_examples=4, deadline=None)
@given(SMALL, SMALL)
def test_links_that_differ_by_noise_lead_to_the_same_plans(one: list[float], other: list[float]) -> None:
    assert found(observed(one)) == found(observed(other))
