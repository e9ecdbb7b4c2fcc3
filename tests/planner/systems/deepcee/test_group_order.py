from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.systems.deepcee.device_groups import MOST_EXACT, best_order, path_cost


@st.composite
def distances(draw: st.DrawFn, least: int, most: int) -> np.ndarray:
    count = draw(st.integers(least, most))
    upper = draw(st.lists(st.integers(0, 30), min_size=count * count, max_size=count * count))
    half = np.triu(np.array(upper, dtype=float).reshape(count, count), 1)
    return half + half.T


@settings(max_examples=100)
@given(distances(1, 6))
def test_no_order_has_a_smaller_bottleneck_nor_a_smaller_sum_with_the_same(distance: np.ndarray) -> None:
    order = best_order(distance)
    assert sorted(order) == list(range(len(distance)))
    best = min(path_cost(each, distance) for each in permutations(range(len(distance))))
    assert path_cost(order, distance) == pytest.approx(best)


@settings(max_examples=10)
@given(distances(MOST_EXACT + 1, MOST_EXACT + 3))
def test_many_groups_come_once_each_and_not_worse_than_as_they_are(distance: np.ndarray) -> None:
    order = best_order(distance)
    assert sorted(order) == list(range(len(distance)))
    assert path_cost(order, distance) <= path_cost(tuple(range(len(distance))), distance)


def test_many_groups_in_a_row_are_found() -> None:
    places = np.random.default_rng(0).permutation(12).astype(float)
    distance = np.abs(places[:, None] - places[None, :])
    assert path_cost(best_order(distance), distance)[0] == 1


def test_one_group_is_an_order() -> None:
    assert best_order(np.zeros((1, 1))) == (0,)
