"""The order of groups along a pipeline whose worst consecutive distance is least: a bottleneck Hamiltonian path.

Assumed, where DeepCEE's public text is silent: of orders with the same bottleneck the one with the least sum. Exact for
`MOST_EXACT` groups and fewer, by dynamic programming over subsets; beyond that nearest neighbours from every start,
then 2-opt.
"""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MOST_EXACT = 9


def best_order(distance: Floats) -> tuple[int, ...]:
    """Return the order of all groups, the end with the lower index first.

    Args:
        distance: Of every two groups, symmetric, not negative, in any unit, [groups, groups].
    """
    count = len(distance)
    if count <= MOST_EXACT:
        worst, _ = _best_path(distance, max)
        order = _best_path(np.where(distance <= worst, distance, np.inf), lambda a, b: a + b)[1]
    else:
        order = min((_two_opt(_nearest_from(start, distance), distance) for start in range(count)), key=_cost(distance))
    return order if order[0] <= order[-1] else order[::-1]


def path_cost(order: tuple[int, ...], distance: Floats) -> tuple[float, float]:
    """Return the largest and the sum of the distances between neighbours, in the unit of ``distance``."""
    steps = [float(distance[a, b]) for a, b in pairwise(order)]
    return max(steps, default=0.0), sum(steps)


def _cost(distance: Floats) -> Callable[[tuple[int, ...]], tuple[float, float]]:
    return lambda order: path_cost(order, distance)


def _best_path(distance: Floats, join: Callable[[float, float], float]) -> tuple[float, tuple[int, ...]]:
    """The least cost of a path through all, with its order; ``join`` adds a distance to the cost of a path."""
    count = len(distance)
    best: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {(1 << i, i): (0.0, (i,)) for i in range(count)}
    for visited in range(1, 1 << count):
        for last in range(count):
            if (visited, last) not in best:
                continue
            cost, order = best[visited, last]
            for following in (each for each in range(count) if not visited >> each & 1):
                longer = (join(cost, float(distance[last, following])), (*order, following))
                key = (visited | 1 << following, following)
                if key not in best or longer < best[key]:
                    best[key] = longer
    return min(best[(1 << count) - 1, last] for last in range(count))


def _nearest_from(start: int, distance: Floats) -> tuple[int, ...]:
    order, left = [start], set(range(len(distance))) - {start}
    while left:
        order.append(min(left, key=lambda each: (distance[order[-1], each], each)))
        left.remove(order[-1])
    return tuple(order)


def _two_opt(order: tuple[int, ...], distance: Floats) -> tuple[int, ...]:
    """Turn pieces of the order around as long as that helps."""
    cost = _cost(distance)
    while True:
        turned = (
            (*order[:first], *order[first:end][::-1], *order[end:])
            for first in range(len(order))
            for end in range(first + 2, len(order) + 1)
        )
        better = next((each for each in turned if cost(each) < cost(order)), None)
        if better is None:
            return order
        order = better
