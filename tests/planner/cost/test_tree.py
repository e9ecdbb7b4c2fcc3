from math import log2

import pytest

from planner.cost.collectives import NOTHING, Exchange
from planner.cost.synchronisation import all_reduce
from tests.helpers.processes.carrying_out import exchanges_of_all


@pytest.mark.parametrize("participants", range(1, 34))
def test_rounds_and_bytes_are_those_of_the_formulas(participants: int) -> None:
    power = 2 ** int(log2(participants))
    folded = participants - power
    elements = 32 * 3
    lists = exchanges_of_all("tree", elements, ["a"] * participants)
    rounds = 1 + max((exchange.round for each in lists for exchange in each), default=-1)
    assert rounds == 2 * log2(power) + (2 if folded else 0)
    halved = 2 * (power - 1) * elements // power
    sent = [sum(exchange.send_elements for exchange in each) for each in lists]
    assert sent == [elements, halved + elements] * folded + [halved] * (participants - 2 * folded)


def test_neighbours_exchange_most() -> None:
    exchanges = all_reduce("tree", 16, ("a",) * 8, position=0)
    assert [(e.send_to, e.send_elements) for e in exchanges] == [(1, 8), (2, 4), (4, 2), (4, 2), (2, 4), (1, 8)]


def test_three_participants_by_hand() -> None:
    regions = ["a", "b", "a"]
    assert all_reduce("tree", 5, tuple(regions), position=0) == (
        Exchange(0, 1, (0, 5), None, NOTHING, adds=True),
        Exchange(3, None, NOTHING, 1, (0, 5), adds=False),
    )
    assert all_reduce("tree", 5, tuple(regions), position=1) == (
        Exchange(0, None, NOTHING, 0, (0, 5), adds=True),
        Exchange(1, 2, (2, 5), 2, (0, 2), adds=True),
        Exchange(2, 2, (0, 2), 2, (2, 5), adds=False),
        Exchange(3, 0, (0, 5), None, NOTHING, adds=False),
    )
    assert all_reduce("tree", 5, tuple(regions), position=2) == (
        Exchange(1, 1, (0, 2), 1, (2, 5), adds=True),
        Exchange(2, 1, (2, 5), 1, (0, 2), adds=False),
    )
