"""The all-reduce for regions: sum inside each region first, so that each sum travels between regions once.

The elements are cut into as many slices as the smallest region has participants; a slice has an owner in each region.

1. Inside each region a ring reduce-scatter leaves each participant with a chunk of the region's sum.
2. A region with more participants than slices has several chunks in a slice: they go to the slice's owner.
3. The owners of each slice, one in each region, sum it over a ring of regions.
4. As 2, back to the chunks' participants.
5. Inside each region a ring all-gather.

With g regions of k participants at most and m at least (m slices):

    rounds                      2(k - 1) + 2(ceil(k/m) - 1) + 2(g - 1)
    sent between regions        2(g - 1) times the data in all; each region sends 2(g - 1)/g to the next one

A ring over all participants sends no less between regions: it leaves a region g times at least, with 2(n - 1)/n of
the data each time.
With one region, or one participant in each, this is the ring over all. Reduce-scatter, all-reduce, all-gather is usual
over links of different speeds (BlueConnect: Cho, Finkler, Serrano, Kung and Hunter, 2019); slices for regions of
different sizes are our own.
"""

from collections.abc import Iterator, Sequence

from planner.cost.collectives import NOTHING, Exchange, all_gather, even_bounds, reduce_scatter, ring_over


def hierarchical_exchanges(elements: int, regions: Sequence[str], position: int) -> tuple[Exchange, ...]:
    """Return the exchanges of the participant at ``position``, in order; ``regions`` are those of all participants."""
    members: dict[str, list[int]] = {}
    for index, region in enumerate(regions):
        members.setdefault(region, []).append(index)
    group = members[regions[position]]
    place = group.index(position)
    slices, widest = min(map(len, members.values())), max(map(len, members.values()))
    bounds = _chunk_bounds(elements, slices, len(group))
    # Steps 2 to 5 begin in the same rounds in all regions; small regions skip some rounds.
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
    """Exchanges that send the chunks of a slice to its owner, one after another, or back."""
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
    """Position of the slice's owner in a region: the one that the reduce-scatter leaves with its first chunk."""
    return group[_slice_chunks(slice_, slices, len(group))[0] - 1]


def _slice_chunks(slice_: int, slices: int, chunks: int) -> range:
    """Which chunks of a region's ring lie in a slice: chunk c lies in slice c * slices // chunks."""
    return range(-(-slice_ * chunks // slices), -(-(slice_ + 1) * chunks // slices))


def _chunk_bounds(elements: int, slices: int, chunks: int) -> list[int]:
    """Bounds of the chunks of a region's ring, such that no chunk belongs to two slices."""
    bounds = []
    for slice_ in range(slices):
        start, stop = elements * slice_ // slices, elements * (slice_ + 1) // slices
        bounds += even_bounds(start, stop, len(_slice_chunks(slice_, slices, chunks)))[:-1]
    return [*bounds, elements]
