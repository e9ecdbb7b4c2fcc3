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

from planner.cost.collectives.exchange import NOTHING, Exchange


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
