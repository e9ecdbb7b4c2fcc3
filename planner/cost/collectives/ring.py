"""The ring all-reduce (Patarasuk and Yuan, 2009), and its two halves.

n participants cut the numbers into n chunks. In n - 1 rounds every chunk travels round the ring and is summed;
in n - 1 more rounds the sums travel round. Each participant sends 2(n - 1)/n of the data, the least possible, in
2(n - 1) rounds.
"""

from collections.abc import Sequence

from planner.cost.collectives.exchange import Exchange


def ring_exchanges(elements: int, participants: int, position: int) -> tuple[Exchange, ...]:
    """Return the 2(n - 1) exchanges of the participant at ``position``, in order."""
    return ring_over(range(participants), even_bounds(0, elements, participants), position, first_round=0)


def ring_over(members: Sequence[int], bounds: Sequence[int], place: int, first_round: int) -> tuple[Exchange, ...]:
    """Return the exchanges of a ring among some of the participants over a part of the numbers.

    Args:
        members: Positions of the participants, in ring order.
        bounds: Where the n chunks begin and the last one ends, n + 1 elements.
        place: Index in ``members`` of the participant in question.
        first_round: Round of the first exchange.
    """
    sums = reduce_scatter(members, bounds, place, first_round)
    return (*sums, *all_gather(members, bounds, place, first_round + len(sums)))


def reduce_scatter(members: Sequence[int], bounds: Sequence[int], place: int, first_round: int) -> tuple[Exchange, ...]:
    """Return the n - 1 exchanges after which the member at ``place`` has the sum of chunk ``(place + 1) % n``.

    Arguments are those of `ring_over`.
    """
    count, (previous, following) = len(members), _beside(members, place)
    return tuple(
        Exchange(
            first_round + turn,
            following,
            _chunk(bounds, place - turn),
            previous,
            _chunk(bounds, place - turn - 1),
            adds=True,
        )
        for turn in range(count - 1)
    )


def all_gather(members: Sequence[int], bounds: Sequence[int], place: int, first_round: int) -> tuple[Exchange, ...]:
    """Return the n - 1 exchanges that give everyone every chunk, from where `reduce_scatter` leaves them.

    Arguments are those of `ring_over`.
    """
    count, (previous, following) = len(members), _beside(members, place)
    return tuple(
        Exchange(
            first_round + turn,
            following,
            _chunk(bounds, place + 1 - turn),
            previous,
            _chunk(bounds, place - turn),
            adds=False,
        )
        for turn in range(count - 1)
    )


def even_bounds(first: int, end: int, parts: int) -> list[int]:
    """Return the ``parts`` + 1 bounds that cut ``first`` to ``end`` into parts that differ by one at most."""
    return [first + (end - first) * part // parts for part in range(parts + 1)]


def _beside(members: Sequence[int], place: int) -> tuple[int, int]:
    return members[place - 1], members[(place + 1) % len(members)]


def _chunk(bounds: Sequence[int], index: int) -> tuple[int, int]:
    index %= len(bounds) - 1
    return bounds[index], bounds[index + 1]
