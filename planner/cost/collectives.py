"""All-reduce algorithms as the messages that each participant sends and receives.

The ring (Patarasuk and Yuan, Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations, 2009): n
participants cut the elements into n chunks. In n - 1 rounds every chunk travels once around the ring and is summed
(reduce-scatter); in n - 1 more rounds the sums travel around it (all-gather). Each participant sends 2 (n - 1)/n of
the elements, the least possible, in 2 (n - 1) rounds.

The tree is recursive halving and doubling (Thakur, Rabenseifner and Gropp, Optimization of Collective Communication
Operations in MPICH, 2005), for links of long latency, on which rounds cost more than bytes. With p the largest power of
two that is not above n, and r = n - p:

    rounds                          2 log2 p, and 2 more if r > 0
    sent by each participant        2 (p - 1)/p of the elements, with two exceptions if r > 0:
    r participants                  send all elements to one partner each, and receive the sums from it
    these r partners                send all elements in addition to their 2 (p - 1)/p

Partners are 1, 2, 4, ... positions apart in rounds 1, 2, 3, ..., and the exchanged range halves each time: neighbours,
which tend to be in the same region, exchange most. Each chunk is summed by one participant, so that all participants
get bitwise equal sums.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

# Empty range of elements, for an exchange that only sends or only receives.
NOTHING = (0, 0)


@dataclass(frozen=True, slots=True)
class Exchange:
    """One participant's part of one round: it sends one range of elements, and after that waits for another range.

    A participant's exchanges are in the order of rounds. The exchanges of a message's sender and receiver have the same
    round and size.

    Attributes:
        round: Number of the round, from 0; a participant has at most one exchange in each round.
        send_to: Position of the receiver; None if nothing is sent.
        send: Start and stop of the elements to send.
        receive_from: Position of the sender; None if nothing is received.
        receive: Start and stop of the elements to receive.
        adds: Whether received values are added to the participant's own (True) or replace them (False).
    """

    round: int
    send_to: int | None
    send: tuple[int, int]
    receive_from: int | None
    receive: tuple[int, int]
    adds: bool

    @property
    def send_elements(self) -> int:
        """Number of elements sent."""
        return self.send[1] - self.send[0]

    @property
    def receive_elements(self) -> int:
        """Number of elements received."""
        return self.receive[1] - self.receive[0]

    def times(self, count: int) -> "Exchange":
        """Return the exchange of ``count`` times as many elements."""
        first_sent, end_sent = self.send
        first, end = self.receive
        return replace(self, send=(count * first_sent, count * end_sent), receive=(count * first, count * end))


def ring_exchanges(elements: int, participants: int, position: int) -> tuple[Exchange, ...]:
    """Return the 2 (n - 1) exchanges of the participant at ``position`` of a ring of n, in the order of rounds."""
    return ring_over(range(participants), even_bounds(0, elements, participants), position, first_round=0)


def ring_over(members: Sequence[int], bounds: Sequence[int], place: int, first_round: int) -> tuple[Exchange, ...]:
    """Return the exchanges of one member of a ring over some of the participants and a range of the elements.

    Args:
        members: Positions of the n participants, in ring order.
        bounds: Index of the first element of each of the n chunks, and the end of the last chunk; n + 1 entries.
        place: Index in ``members`` of the participant whose exchanges are returned.
        first_round: Round of the first exchange.
    """
    sums = reduce_scatter(members, bounds, place, first_round)
    return (*sums, *all_gather(members, bounds, place, first_round + len(sums)))


def reduce_scatter(members: Sequence[int], bounds: Sequence[int], place: int, first_round: int) -> tuple[Exchange, ...]:
    """Return the n - 1 exchanges after which the member at ``place`` has the sum of chunk ``(place + 1) % n``.

    Arguments are those of `ring_over`.
    """
    return _once_round(members, bounds, place, place, first_round, adds=True)


def all_gather(members: Sequence[int], bounds: Sequence[int], place: int, first_round: int) -> tuple[Exchange, ...]:
    """Return the n - 1 exchanges that give every member every chunk, after `reduce_scatter`.

    Arguments are those of `ring_over`.
    """
    return _once_round(members, bounds, place, place + 1, first_round, adds=False)


def _once_round(
    members: Sequence[int], bounds: Sequence[int], place: int, chunk: int, first_round: int, *, adds: bool
) -> tuple[Exchange, ...]:
    """Return n - 1 exchanges: the member sends ``chunk`` first, and in each later round what it received last."""
    count = len(members)
    ranges = [(bounds[index % count], bounds[index % count + 1]) for index in range(chunk, chunk - count, -1)]
    following, previous = members[(place + 1) % count], members[place - 1]
    return tuple(
        Exchange(first_round + turn, following, ranges[turn], previous, ranges[turn + 1], adds)
        for turn in range(count - 1)
    )


def even_bounds(start: int, stop: int, parts: int) -> list[int]:
    """Return the ``parts`` + 1 bounds that cut ``start`` to ``stop`` into parts whose sizes differ by one at most."""
    return [start + (stop - start) * part // parts for part in range(parts + 1)]


def tree_exchanges(elements: int, participants: int, position: int) -> tuple[Exchange, ...]:
    """Return the exchanges of the participant at ``position`` in recursive halving and doubling, in order of rounds."""
    levels = participants.bit_length() - 1
    # r = ``folded``. Even positions below 2r send all elements to the next position, and wait for the sums.
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
    """Return the exchanges of participant ``rank`` among the 2 ** levels that halve and double."""
    sums, copies = [], []
    start, stop = whole
    for level in range(levels):
        other = rank ^ (1 << level)
        partner = 2 * other + 1 if other < folded else other + folded
        middle = (start + stop) // 2
        keeps, gives = (start, middle), (middle, stop)
        if rank > other:
            keeps, gives = gives, keeps
        sums.append(Exchange(first_round + level, partner, gives, partner, keeps, adds=True))
        copies.append(Exchange(first_round + 2 * levels - 1 - level, partner, keeps, partner, gives, adds=False))
        start, stop = keeps
    return (*sums, *reversed(copies))


def hierarchical_exchanges(elements: int, regions: Sequence[str], position: int) -> tuple[Exchange, ...]:
    """Return the exchanges of one participant in an all-reduce that sums inside each region first.

    The elements are cut into as many slices as the smallest region has participants. In each region, one participant
    owns each slice.

    1. A ring reduce-scatter inside each region: each participant has one chunk of the region's sum.
    2. Regions with more participants than slices: the other chunks of a slice are sent to the slice's owner.
    3. A ring all-reduce of each slice among its owners, one in each region.
    4. The reverse of 2: owners send the summed chunks back.
    5. A ring all-gather inside each region.

    With g regions, at most k and at least m participants in a region, and therefore m slices:

        rounds                      2(k - 1) + 2(ceil(k/m) - 1) + 2(g - 1)
        sent between regions        2(g - 1) times the data in all; each region sends 2(g - 1)/g to the next one

    A ring over all n participants crosses regions at least g times, with 2(n - 1)/n of the data each time, which is at
    least as much. With one region, or with one participant in each region, the exchanges equal those of this ring.
    Steps 1, 3 and 5 are BlueConnect (Cho, Finkler, Serrano, Kung and Hunter, 2019); slices for regions of different
    sizes are our addition.

    ``regions`` is the region of each participant, and ``position`` the index of the one whose exchanges are returned.
    """
    members: dict[str, list[int]] = {}
    for index, region in enumerate(regions):
        members.setdefault(region, []).append(index)
    group = members[regions[position]]
    place = group.index(position)
    slices, widest = min(map(len, members.values())), max(map(len, members.values()))
    bounds = _chunk_bounds(elements, slices, len(group))
    # Each of steps 2 to 5 begins in the same round in all regions; participants of small regions skip rounds.
    gather_round = widest - 1
    between_round = gather_round + -(-widest // slices) - 1
    return_round = between_round + 2 * (len(members) - 1)
    spread_round = return_round + -(-widest // slices) - 1

    chunk = (place + 1) % len(group)
    slice_ = chunk * slices // len(group)
    between: tuple[Exchange, ...] = ()
    if chunk == _slice_chunks(slice_, slices, len(group))[0]:
        owners = [_owner(each, slice_, slices) for each in members.values()]
        parts = even_bounds(elements * slice_ // slices, elements * (slice_ + 1) // slices, len(owners))
        between = ring_over(owners, parts, owners.index(position), between_round)
    return (
        *reduce_scatter(group, bounds, place, 0),
        *_chunk_moves(group, bounds, place, slices, gather_round, inwards=True),
        *between,
        *_chunk_moves(group, bounds, place, slices, return_round, inwards=False),
        *all_gather(group, bounds, place, spread_round),
    )


def _chunk_moves(
    group: Sequence[int], bounds: Sequence[int], place: int, slices: int, first_round: int, *, inwards: bool
) -> Iterator[Exchange]:
    """Yield the exchanges of step 2 (``inwards``) or step 4: a slice's chunks to or from its owner, one per round."""
    chunk = (place + 1) % len(group)
    chunks = _slice_chunks(chunk * slices // len(group), slices, len(group))
    owner = group[chunks[0] - 1]
    for turn, moved in enumerate(chunks[1:]):
        part = (bounds[moved], bounds[moved + 1])
        holder = group[moved - 1]
        source, target = (holder, owner) if inwards else (owner, holder)
        if group[place] == source:
            yield Exchange(first_round + turn, target, part, None, NOTHING, adds=False)
        elif group[place] == target:
            yield Exchange(first_round + turn, None, NOTHING, source, part, adds=False)


def _owner(group: Sequence[int], slice_: int, slices: int) -> int:
    """Return the position of a slice's owner in a region: it has the slice's first chunk after the reduce-scatter."""
    return group[_slice_chunks(slice_, slices, len(group))[0] - 1]


def _slice_chunks(slice_: int, slices: int, chunks: int) -> range:
    """Return the indices of the chunks of a region's ring in a slice; chunk c is in slice c * slices // chunks."""
    return range(-(-slice_ * chunks // slices), -(-(slice_ + 1) * chunks // slices))


def _chunk_bounds(elements: int, slices: int, chunks: int) -> list[int]:
    """Return the bounds of the chunks of a region's ring, ``chunks`` + 1 entries; no chunk is in two slices."""
    bounds = []
    for slice_ in range(slices):
        start, stop = elements * slice_ // slices, elements * (slice_ + 1) // slices
        bounds += even_bounds(start, stop, len(_slice_chunks(slice_, slices, chunks)))[:-1]
    return [*bounds, elements]
