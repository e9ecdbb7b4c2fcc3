from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from math import ceil

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from planner.systems.cloudless.elastic_scheduling import (
    Offers,
    RegionOffer,
    Unit,
    elastic_schedule,
    greedy_schedule,
    schedule_within,
)

SPEEDS = st.floats(0.1, 100)
PRICES = st.floats(0.01, 10)
SAMPLES = st.integers(1, 10**6)


def equal_units(samples: float, count: int, speed: float, price: float, name: str) -> RegionOffer:
    return RegionOffer(samples, tuple(Unit(f"{name}-{index}", speed, price) for index in range(count)))


@st.composite
def uniform_offers(draw: st.DrawFn) -> Offers:
    """Regions that offer units of one kind each."""
    names = [f"region-{index}" for index in range(draw(st.integers(1, 3)))]
    return {n: equal_units(draw(SAMPLES), draw(st.integers(1, 6)), draw(SPEEDS), draw(PRICES), n) for n in names}


@st.composite
def mixed_offers(draw: st.DrawFn) -> RegionOffer:
    """A region that offers units of all kinds."""
    kinds = draw(st.lists(st.tuples(SPEEDS, PRICES), min_size=1, max_size=6))
    return RegionOffer(draw(SAMPLES), tuple(Unit(f"unit-{i}", *kind) for i, kind in enumerate(kinds)))


def test_two_regions_by_hand() -> None:
    # t* = 600 / (4 * 1) = 150 s; of the fast ones ceil(600 / (2 * 150)) = 2 are enough.
    offers = {"old": equal_units(600, 4, 1.0, 1.0, "old"), "new": equal_units(600, 4, 2.0, 3.0, "new")}
    elastic, greedy = elastic_schedule(offers), greedy_schedule(offers)
    assert {region: len(units) for region, units in elastic.units.items()} == {"old": 4, "new": 2}
    assert (elastic.run_time_s, greedy.run_time_s) == (150.0, 150.0)
    assert (elastic.price_per_hour, greedy.price_per_hour) == (10.0, 16.0)


@settings(max_examples=50)
@given(uniform_offers())
def test_as_many_as_the_formula_says(offers: Offers) -> None:
    elastic = elastic_schedule(offers)
    speed = {region: offer.units[0].samples_per_s for region, offer in offers.items()}
    slowest_s = max(offer.samples / (len(offer.units) * speed[region]) for region, offer in offers.items())
    for region, offer in offers.items():
        # Less a little: what is exactly enough may be a rounding more.
        assert len(elastic.units[region]) == ceil(offer.samples / (speed[region] * slowest_s) * (1 - 1e-6))
    assert elastic.run_time_s == pytest.approx(greedy_schedule(offers).run_time_s, rel=1e-6)
    assert elastic.price_per_hour <= greedy_schedule(offers).price_per_hour


def cheapest_subset(units: Sequence[Unit], speed: float) -> float:
    sums = (subset for size in range(len(units) + 1) for subset in combinations(units, size))
    return min(sum(u.price_per_hour for u in each) for each in sums if sum(u.samples_per_s for u in each) >= speed)


# Three units at the same price for a sample, of which the large one alone is more than enough.
@example(RegionOffer(1, (Unit("one", 1.0, 1.0), Unit("other", 1.0, 1.0), Unit("large", 5.0, 5.0))), 4.0)
@settings(max_examples=50)
@given(mixed_offers(), st.floats(1.0, 20.0))
def test_unlike_units_are_enough_and_cost_no_more_than_double_the_least(offer: RegionOffer, slack: float) -> None:
    """The bound is that of this rule for covering a demand (Csirik et al., 1991)."""
    fastest_s = greedy_schedule({"region": offer}).run_time_s
    schedule = schedule_within({"region": offer}, slack * fastest_s)
    assert schedule.run_time_s <= slack * fastest_s * (1 + 1e-6)
    least = cheapest_subset(offer.units, offer.samples / (slack * fastest_s) * (1 - 1e-8))
    assert schedule.price_per_hour <= 2 * least * (1 + 1e-6)


def test_of_unlike_units_the_cheapest_for_a_sample_comes_first_and_none_is_there_for_nothing() -> None:
    units = (Unit("big", 10.0, 9.0), Unit("small", 1.0, 1.0), Unit("twin", 1.0, 1.0))
    names = [
        [unit.name for unit in schedule_within({"region": RegionOffer(100, units)}, time_s).units["region"]]
        for time_s in (100.0, 10.0, 9.5, 100 / 12)
    ]
    assert names == [["small"], ["big"], ["big", "small"], ["big", "small", "twin"]]


def test_other_speeds_prices_and_units_make_another_schedule() -> None:
    offers = {"old": equal_units(600, 4, 1.0, 1.0, "old"), "new": equal_units(600, 4, 2.0, 3.0, "new")}

    def counts(changed: Offers) -> list[int]:
        return [len(units) for units in elastic_schedule(changed).units.values()]

    slower = {**offers, "new": equal_units(600, 4, 1.2, 3.0, "new")}
    fewer = {**offers, "old": equal_units(600, 2, 1.0, 1.0, "old")}
    assert [counts(each) for each in (offers, slower, fewer)] == [[4, 2], [4, 4], [2, 1]]
    first, *others = offers["new"].units
    dear = {**offers, "new": RegionOffer(600, (replace(first, price_per_hour=4.0), *others))}
    assert first.name not in [unit.name for unit in elastic_schedule(dear).units["new"]]
