from collections import Counter
from collections.abc import Sequence
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cost.synchronisation import all_reduce
from tests.helpers.processes.carrying_out import exchanges_of_all

ELEMENTS = st.integers(0, 1000)
REGIONS = st.lists(st.sampled_from("abcd"), min_size=1, max_size=12)


def sent_between(algorithm: str, elements: int, regions: Sequence[str]) -> Counter[tuple[str, str]]:
    """Elements that each region sends to each other one."""
    sent: Counter[tuple[str, str]] = Counter()
    for position, exchanges in enumerate(exchanges_of_all(algorithm, elements, regions)):
        for exchange in exchanges:
            if exchange.send_to is not None and regions[exchange.send_to] != regions[position]:
                sent[regions[position], regions[exchange.send_to]] += exchange.send_elements
    return sent


@given(ELEMENTS, REGIONS)
def test_each_region_sends_its_part_to_the_next_one(elements: int, regions: list[str]) -> None:
    order = list(dict.fromkeys(regions))
    count = len(order)
    sent = sent_between("hierarchical", elements, regions)
    assert sent.total() == 2 * (count - 1) * elements
    assert set(+sent) <= {(region, order[(index + 1) % count]) for index, region in enumerate(order)}
    lanes = min(Counter(regions).values())
    for each in sent.values():
        # Each lane's parts differ by one element.
        assert each == pytest.approx(2 * (count - 1) / count * elements, abs=2 * lanes)


@given(ELEMENTS, REGIONS)
def test_no_ring_sends_less_between_regions(elements: int, regions: list[str]) -> None:
    hierarchical = sent_between("hierarchical", elements, regions).total()
    assert hierarchical <= sent_between("ring", elements, sorted(regions)).total()
    assert hierarchical <= sent_between("ring", elements, regions).total()


@given(ELEMENTS, REGIONS)
def test_rounds_are_those_of_the_formula(elements: int, regions: list[str]) -> None:
    counts = Counter(regions).values()
    lists = exchanges_of_all("hierarchical", elements, regions)
    rounds = 1 + max((exchange.round for each in lists for exchange in each), default=-1)
    most, least = max(counts), min(counts)
    assert rounds == 2 * (most - 1) + 2 * (ceil(most / least) - 1) + 2 * (len(counts) - 1)


@pytest.mark.parametrize("regions", [["a"] * 5, ["a", "b", "c", "d"], ["a"]])
def test_it_is_the_ring_for_one_region_or_one_participant_in_each(regions: list[str]) -> None:
    for position in range(len(regions)):
        assert all_reduce("hierarchical", 23, tuple(regions), position) == all_reduce(
            "ring", 23, tuple(regions), position
        )


def test_two_regions_of_two_use_both_lanes() -> None:
    lists = exchanges_of_all("hierarchical", 8, ["a", "b", "a", "b"])
    # Each: half to its neighbour, two quarters (of its half) over the wide area, half to its neighbour.
    assert [[(e.send_to, e.send) for e in each] for each in lists] == [
        [(2, (0, 4)), (1, (4, 6)), (1, (6, 8)), (2, (4, 8))],
        [(3, (0, 4)), (0, (6, 8)), (0, (4, 6)), (3, (4, 8))],
        [(0, (4, 8)), (3, (0, 2)), (3, (2, 4)), (0, (0, 4))],
        [(1, (4, 8)), (2, (2, 4)), (2, (0, 2)), (1, (0, 4))],
    ]


def test_a_region_with_more_participants_gathers_a_lane_at_its_owner() -> None:
    lists = exchanges_of_all("hierarchical", 12, ["a", "a", "a", "b"])
    # One lane; participant 2 is left with chunk 0 of the three, which makes it the owner.
    assert [(e.round, e.send_to, e.receive_from) for e in lists[2]] == [
        (0, 0, 1),
        (1, 0, 1),
        (2, None, 0),
        (3, None, 1),
        (4, 3, 3),
        (5, 3, 3),
        (6, 0, None),
        (7, 1, None),
        (8, 0, 1),
        (9, 0, 1),
    ]
    assert [(e.round, e.send_elements) for e in lists[3]] == [(4, 6), (5, 6)]
