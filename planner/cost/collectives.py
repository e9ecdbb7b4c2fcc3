"""The all-reduce of few rounds: recursive halving and doubling (Thakur, Rabenseifner and Gropp, 2005).

Over links whose latency is long, rounds cost more than bytes. A binomial tree to a root and back has as few rounds,
but sends all the data in each of them; here the trees of all chunks run at once, each with a root of its own.

With p the largest power of two that is not above n, and r = n - p:

    rounds              2 log2 p, and 2 more if r > 0
    sent by each        2 (p - 1)/p of the data
    and if r > 0        r participants send all the data instead, and their r partners all the data besides

Partners are one position apart first, then two, then four, while what they exchange halves: neighbours, which tend
to stand in the same region, exchange most. Each chunk is summed in one place, so that all end with the same bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

# The part of one that sends nothing, or receives nothing.
NOTHING = (0, 0)


@dataclass(frozen=True, slots=True)
class Exchange:
    """One participant's part of one round: hand over a part as it is now, then wait for another part.

    Rounds of one participant rise. A message has the same round at its sender and at its receiver, and both know
    its size.

    Attributes:
        round: Counts from 0; a participant may sit rounds out, and has one exchange in a round at most.
        send_to: Position of the receiver; None if nothing is sent.
        send: (first, end) element to send.
        receive_from: Position of the sender; None if nothing is received.
        receive: (first, end) element to receive.
        adds: Whether what arrives is added to what is there, or replaces it.
    """

    round: int
    send_to: int | None
    send: tuple[int, int]
    receive_from: int | None
    receive: tuple[int, int]
    adds: bool

    @property
    def send_elements(self) -> int:
        """How many elements are sent."""
        return self.send[1] - self.send[0]

    @property
    def receive_elements(self) -> int:
        """How many elements are received."""
        return self.receive[1] - self.receive[0]


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


def tree_exchanges(elements: int, participants: int, position: int) -> tuple[Exchange, ...]:
    """Return the exchanges of the participant at ``position``, in order."""
    levels = participants.bit_length() - 1
    # Of the first 2r positions the even ones hand all they have to the next one, and wait for the result.
    folded = participants - (1 << levels)
    whole = (0, elements)
    last_round = 2 * levels + 1
    if position < 2 * folded and position % 2 == 0:
        partner = position + 1
        return (
            Exchange(0, partner, whole, None, NOTHING, adds=True),
            Exchange(last_round, None, NOTHING, partner, whole, adds=False),
        )
    first_round = 1 if folded else 0
    exchanges = _halve_and_double(whole, levels, folded, position - min((position + 1) // 2, folded), first_round)
    if position >= 2 * folded:
        return exchanges
    return (
        Exchange(0, None, NOTHING, position - 1, whole, adds=True),
        *exchanges,
        Exchange(last_round, position - 1, whole, None, NOTHING, adds=False),
    )


def _halve_and_double(
    whole: tuple[int, int], levels: int, folded: int, rank: int, first_round: int
) -> tuple[Exchange, ...]:
    """Exchanges of one of the 2 ** levels participants that are left: its number among them is ``rank``."""
    sums, copies = [], []
    first, end = whole
    for level in range(levels):
        other = rank ^ (1 << level)
        partner = 2 * other + 1 if other < folded else other + folded
        middle = (first + end) // 2
        keeps, gives = (first, middle), (middle, end)
        if rank > other:
            keeps, gives = gives, keeps
        sums.append(Exchange(first_round + level, partner, gives, partner, keeps, adds=True))
        copies.append(Exchange(first_round + 2 * levels - 1 - level, partner, keeps, partner, gives, adds=False))
        first, end = keeps
    return (*sums, *reversed(copies))
