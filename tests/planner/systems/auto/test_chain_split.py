"""The search of chains over pools, against all chains."""

from collections.abc import Iterator
from itertools import combinations, pairwise, product
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.systems.auto.candidates.chain_split import Options, best_chain

MOST_STAGES = 4


@st.composite
def option_tables(draw: st.DrawFn) -> Options:
    """Two or three ways to use two pools, up to five layers."""
    layers, count = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    seconds = st.floats(0.1, 10)
    sizes = st.floats(0, 10)

    def until(values: st.SearchStrategy[float]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
        rows = [draw(st.lists(values, min_size=layers, max_size=layers)) for _ in range(count)]
        return np.array([[0.0, *np.cumsum(row)] for row in rows])

    between = st.lists(st.floats(0, 3), min_size=count * count * layers, max_size=count * count * layers)
    way_s = np.array(draw(between)).reshape(count, count, layers)
    return Options(
        np.array(sorted(draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))), np.int64),
        np.array(draw(st.lists(st.integers(1, 3), min_size=count, max_size=count)), np.int64),
        until(seconds),
        until(sizes),
        until(sizes),
        np.array(draw(st.lists(st.floats(5, 100), min_size=count, max_size=count))),
        draw(st.sampled_from([0.5, 1.0, 2.0])) * way_s,
        way_s,
        draw(st.sampled_from([0.0, 2.0])) * way_s,
        until(sizes),
    )


def all_chains(options: Options) -> Iterator[tuple[tuple[int, int, int], ...]]:
    """Every chain of (option, first layer, end layer), whether it fits or not."""
    count, layers = options.compute_s.shape[0], options.compute_s.shape[1] - 1
    for stages in range(1, min(MOST_STAGES, layers) + 1):
        for cuts in combinations(range(1, layers), stages - 1):
            bounds = [0, *cuts, layers]
            for ways in product(range(count), repeat=stages):
                if in_order(options, ways):
                    yield tuple(zip(ways, bounds, bounds[1:], strict=False))


def in_order(options: Options, ways: tuple[int, ...]) -> bool:
    """Pools come in their order, each used in one way only and for no more stages than it has devices for."""
    for left, right in pairwise(ways):
        if left != right and not options.pool[left] < options.pool[right]:
            return False
    return all(ways.count(way) <= options.most_stages[way] for way in ways)


def times_s(
    options: Options, chain: tuple[tuple[int, int, int], ...], microbatches: int, most_sum_s: float
) -> tuple[float, float]:
    """Pace and pass of a chain, infinite where it does not fit."""
    bottleneck_s = round_trip_s = 0.0
    for index, (way, first, end) in enumerate(chain):
        depth = min(microbatches, len(chain) - index)
        own = {
            name: table[way, end] - table[way, first] for name, table in options._asdict().items() if table.ndim == 2
        }
        if own["state_bytes"] + depth * own["activation_bytes"] > options.capacity_bytes[way] + 1e-9:
            return inf, inf
        if own["sum_s"] > most_sum_s:
            return inf, inf
        stage_s = own["compute_s"]
        round_trip_s += stage_s
        if index + 1 < len(chain):
            crossing = (way, chain[index + 1][0], end - 1)
            stage_s += options.blocked_s[crossing]
            round_trip_s += 2 * options.way_s[crossing]
            bottleneck_s = max(bottleneck_s, options.busy_s[crossing])
        bottleneck_s = max(bottleneck_s, stage_s)
    return bottleneck_s, round_trip_s


@settings(deadline=None, max_examples=150)
@given(option_tables(), st.sampled_from([1, 2, 8, 64]), st.sampled_from([inf, 15.0]))
def test_no_chain_is_clearly_better(options: Options, microbatches: int, most_sum_s: float) -> None:
    limit_s = 1e4 * microbatches
    found = best_chain(options, microbatches, MOST_STAGES, 0.0, limit_s, most_sum_s)
    every = (times_s(options, chain, microbatches, most_sum_s) for chain in all_chains(options))
    best_s = min(
        (
            (microbatches - 1) * bottleneck_s + round_trip_s
            for bottleneck_s, round_trip_s in every
            if round_trip_s < inf
        ),
        default=inf,
    )
    if best_s == inf:
        assert not found.option.size
        return
    ends = [*found.first_layer[1:].tolist(), options.compute_s.shape[1] - 1]
    chain = tuple(zip(found.option.tolist(), found.first_layer.tolist(), ends, strict=True))
    bottleneck_s, round_trip_s = times_s(options, chain, microbatches, most_sum_s)
    # The bound that is found is the pace, or no more than it can be in a grid.
    assert bottleneck_s <= found.bottleneck_s * (1 + 1e-9)
    assert round_trip_s == pytest.approx(found.round_trip_s)
    # Bounds come in a grid: the best one may lie between two of them.
    assert (microbatches - 1) * bottleneck_s + round_trip_s <= 1.1 * best_s


def test_with_one_microbatch_only_its_way_there_and_back_counts() -> None:
    # The first way alone takes 8 s. Two stages of 4 and 1 s would have a better pace, but the way between takes longer.
    options = Options(
        np.array([0, 1]),
        np.array([1, 1]),
        np.array([[0.0, 4.0, 8.0], [0.0, 9.0, 10.0]]),
        np.zeros((2, 3)),
        np.zeros((2, 3)),
        np.ones(2),
        np.zeros((2, 2, 2)),
        np.full((2, 2, 2), 2.0),
        np.zeros((2, 2, 2)),
        np.zeros((2, 3)),
    )
    assert best_chain(options, 1, 2, 0.0, 1e3, inf).first_layer.tolist() == [0]
    assert best_chain(options, 50, 2, 0.0, 1e3, inf).first_layer.tolist() == [0, 1]


def test_nothing_fits_and_nothing_is_found() -> None:
    tables = np.array([[0.0, 1.0]])
    nothing = np.zeros((1, 1, 1))
    options = Options(
        np.array([0]), np.array([1]), tables, tables, tables, np.array([0.5]), nothing, nothing, nothing, tables
    )
    assert not best_chain(options, 4, 1, 0.0, 1e3, inf).option.size
