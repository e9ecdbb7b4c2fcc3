"""All chains of stages on few devices: where there are not too many, nothing need be left out."""

from collections.abc import Iterator
from functools import lru_cache
from itertools import combinations
from math import comb

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def count_chains(devices: int, layers: int) -> int:
    """Return how many chains there are: ordered, disjoint sets of devices, each with a range of the layers."""
    return sum(comb(layers - 1, len(groups) - 1) for groups in _ordered_groups((1 << devices) - 1))


@lru_cache(maxsize=8)
def every_chain(devices: int, layers: int) -> tuple[Ints, Ints]:
    """Return the sets of devices, as numbers whose bits are devices, and first layers of all stages of all chains.

    Returns:
        Two arrays [chains, devices]; the set is 0 after the last stage.
    """
    chains = [
        (groups, (0, *cuts))
        for groups in _ordered_groups((1 << devices) - 1)
        for cuts in combinations(range(1, layers), len(groups) - 1)
    ]
    group = np.zeros((len(chains), devices), np.int64)
    first_layer = np.zeros((len(chains), devices), np.int64)
    for number, (groups, firsts) in enumerate(chains):
        group[number, : len(groups)], first_layer[number, : len(firsts)] = groups, firsts
    return group, first_layer


def _ordered_groups(devices: int) -> Iterator[tuple[int, ...]]:
    """Every sequence of disjoint sets of some of the devices."""
    group = devices
    while group:
        yield (group,)
        yield from ((group, *others) for others in _ordered_groups(devices & ~group))
        group = (group - 1) & devices
