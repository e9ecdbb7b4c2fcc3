"""The all-reduce for regions: sum inside each region first, so that each sum crosses between regions once.

The numbers are cut into as many lanes as the smallest region has participants; a lane has an owner in each region.

1. Inside each region a ring reduce-scatter leaves each participant with a chunk of the region's sum.
2. A region with more participants than lanes has several chunks in a lane: they go to the lane's owner.
3. The owners of each lane, one in each region, sum it over a ring of regions.
4. As 2, back to the chunks' participants.
5. Inside each region a ring all-gather.

With g regions of k participants at most and m at least (m lanes):

    rounds                      2(k - 1) + 2(ceil(k/m) - 1) + 2(g - 1)
    sent between regions        2(g - 1) times the data in all; each region sends 2(g - 1)/g to the next one

No ring over all participants sends less between regions: it crosses g times at least, with 2(n - 1)/n of the data.
With one region, or one participant in each, this is the ring over all. Reduce-scatter, all-reduce, all-gather is the
usual way over unlike links (BlueConnect: Cho, Finkler, Serrano, Kung and Hunter, 2019); lanes for regions of unequal
counts are our own.
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
    lanes, widest = min(map(len, members.values())), max(map(len, members.values()))
    bounds = _chunk_bounds(elements, lanes, len(group))
    # The rounds in which steps 2 to 5 begin are the same in all regions; small regions sit some out.
    gather_round = widest - 1
    cross_round = gather_round + -(-widest // lanes) - 1
    return_round = cross_round + 2 * (len(members) - 1)
    spread_round = return_round + -(-widest // lanes) - 1

    chunk = (place + 1) % len(group)
    lane = chunk * lanes // len(group)
    crossing: tuple[Exchange, ...] = ()
    if chunk == _lane_chunks(lane, lanes, len(group))[0]:
        owners = [_owner(each, lane, lanes) for each in members.values()]
        parts = even_bounds(elements * lane // lanes, elements * (lane + 1) // lanes, len(owners))
        crossing = ring_over(owners, parts, owners.index(position), cross_round)
    return (
        *reduce_scatter(group, bounds, place, 0),
        *_move(group, bounds, place, lanes, gather_round, inwards=True),
        *crossing,
        *_move(group, bounds, place, lanes, return_round, inwards=False),
        *all_gather(group, bounds, place, spread_round),
    )


def _move(
    group: Sequence[int], bounds: Sequence[int], place: int, lanes: int, first_round: int, *, inwards: bool
) -> Iterator[Exchange]:
    """Exchanges that bring the chunks of a lane to its owner, one after another, or back from there."""
    chunk = (place + 1) % len(group)
    chunks = _lane_chunks(chunk * lanes // len(group), lanes, len(group))
    owner = group[chunks[0] - 1]
    for turn, moved in enumerate(chunks[1:]):
        part = (bounds[moved], bounds[moved + 1])
        holder = group[moved - 1]
        source, target = (holder, owner) if inwards else (owner, holder)
        if group[place] == source:
            yield Exchange(first_round + turn, target, part, None, NOTHING, adds=False)
        elif group[place] == target:
            yield Exchange(first_round + turn, None, NOTHING, source, part, adds=False)


def _owner(group: Sequence[int], lane: int, lanes: int) -> int:
    """Position of the lane's owner in a region: the one that the reduce-scatter leaves with its first chunk."""
    return group[_lane_chunks(lane, lanes, len(group))[0] - 1]


def _lane_chunks(lane: int, lanes: int, chunks: int) -> range:
    """Which chunks of a region's ring lie in a lane: chunk c lies in lane c * lanes // chunks."""
    return range(-(-lane * chunks // lanes), -(-(lane + 1) * chunks // lanes))


def _chunk_bounds(elements: int, lanes: int, chunks: int) -> list[int]:
    """Bounds of the chunks of a region's ring, such that no chunk reaches over the end of a lane."""
    bounds = []
    for lane in range(lanes):
        first, end = elements * lane // lanes, elements * (lane + 1) // lanes
        bounds += even_bounds(first, end, len(_lane_chunks(lane, lanes, chunks)))[:-1]
    return [*bounds, elements]
