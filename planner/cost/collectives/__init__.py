"""Sums over several participants, as each one's list of exchanges: what both backends carry out."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from planner.cost.collectives.exchange import Exchange
from planner.cost.collectives.hierarchical import hierarchical_exchanges
from planner.cost.collectives.ring import ring_exchanges
from planner.cost.collectives.tree import tree_exchanges

__all__ = ["Exchange", "all_reduce"]

_ALGORITHMS: Mapping[str, Callable[[int, tuple[str, ...], int], tuple[Exchange, ...]]] = {
    "ring": lambda elements, regions, position: ring_exchanges(elements, len(regions), position),
    "tree": lambda elements, regions, position: tree_exchanges(elements, len(regions), position),
    "hierarchical": hierarchical_exchanges,
}


def all_reduce(algorithm: str, elements: int, regions: Sequence[str], position: int) -> tuple[Exchange, ...]:
    """Return what one participant sends and receives, in order, until it has the sum over all of them.

    Args:
        algorithm: One of `planner.plan.plan.ALGORITHMS`.
        elements: Numbers to sum.
        regions: Where each participant stands.
        position: Of the participant in question, an index into ``regions``.
    """
    return _remembered(algorithm, elements, tuple(regions), position)


# Every device asks in every step.
@lru_cache(maxsize=1024)
def _remembered(algorithm: str, elements: int, regions: tuple[str, ...], position: int) -> tuple[Exchange, ...]:
    return _ALGORITHMS[algorithm](elements, regions, position)
