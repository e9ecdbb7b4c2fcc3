"""Which regions become workers of their own, and which train together or not at all."""

from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np

from planner.scenario.convergence import Floats

_MOST_JOINED = 2

# How many times as fast exchanges have to be in each set without the slowest links.
_QUICKER = 1.5


def partial_partitions(regions: Sequence[str]) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Yield every way to put some of the regions into disjoint blocks of one or two.

    >>> list(partial_partitions(["a", "b"]))
    [(), (('b',),), (('a',),), (('a',), ('b',)), (('a', 'b'),)]
    """
    if not regions:
        yield ()
        return
    first, rest = regions[0], regions[1:]
    yield from partial_partitions(rest)
    for count in range(_MOST_JOINED):
        for others in combinations(rest, count):
            left = [region for region in rest if region not in others]
            for blocks in partial_partitions(left):
                yield ((first, *others), *blocks)


def without_slowest_links(between_s: Floats) -> Iterator[tuple[int, ...]]:
    """Yield sets of workers that are left if one after the other is taken away that has the slowest exchange.

    Of the two ends of the slowest exchange the one goes whose exchanges take longer together. A set is yielded if its
    slowest exchange is so many times as fast as that of the set before as `_QUICKER` says.

    Args:
        between_s: Time of an exchange between every two workers, seconds, [workers, workers].

    >>> list(without_slowest_links(np.array([[0.0, 1.0, 9.0], [1.0, 0.0, 9.0], [9.0, 9.0, 0.0]])))
    [(0, 1)]
    """
    both_ways_s = np.maximum(between_s, between_s.T)
    left, limit_s = list(range(len(both_ways_s))), both_ways_s.max() / _QUICKER
    while len(left) > 2:
        among_s = both_ways_s[np.ix_(left, left)]
        ends = np.unravel_index(among_s.argmax(), among_s.shape)
        del left[max(ends, key=lambda end: float(among_s[end].sum()))]
        slowest_s = both_ways_s[np.ix_(left, left)].max()
        if slowest_s <= limit_s:
            limit_s = slowest_s / _QUICKER
            yield tuple(left)
