"""A message on its way over links that others may use too."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class Flow:
    """Bits that share links.

    Attributes:
        links: Names of the links it takes.
        bits: Still to go.
        weight: Shares that it gets: its TCP connections.
        ceiling_bps: What one of these connections carries at most.
        departed: Called with the time when the last bit has left.
    """

    links: tuple[str, ...]
    bits: float
    weight: int
    ceiling_bps: float
    departed: Callable[[float], None]


def max_min_rates(flows: Sequence[Flow], capacity_bps: Mapping[str, float]) -> list[float]:
    """Return the rate of each flow in bits per second, over all its connections.

    Args:
        flows: Each takes at least one link, with ``weight`` connections of at most ``ceiling_bps`` each.
        capacity_bps: Bits per second of each link that some flow takes.
    """
    rates = [0.0] * len(flows)
    remaining_bps = dict(capacity_bps)
    users: dict[str, int] = dict.fromkeys(remaining_bps, 0)
    for flow in flows:
        for link in flow.links:
            users[link] += flow.weight
    growing = list(range(len(flows)))
    level = 0.0
    while growing:
        room = min(remaining_bps[link] / count for link, count in users.items() if count)
        reached = min(flows[index].ceiling_bps for index in growing)
        step = min(room, reached - level)
        level += step
        full = set()
        for link, count in users.items():
            if count:
                share = remaining_bps[link] / count
                remaining_bps[link] = max(0.0, remaining_bps[link] - step * count)
                if share <= step:
                    full.add(link)
        still = []
        for index in growing:
            flow = flows[index]
            rates[index] = level * flow.weight
            if flow.ceiling_bps > level and full.isdisjoint(flow.links):
                still.append(index)
            else:
                for link in flow.links:
                    users[link] -= flow.weight
        growing = still
    return rates


def first_come_rates(flows: Sequence[Flow], capacity_bps: Mapping[str, float]) -> list[float]:
    """Return the rate of each flow in bits per second where what windows let through queues before links.

    Who waits for one of its links holds nobody up on the others.

    Args:
        flows: By when they came; each takes what those before it leave.
        capacity_bps: Bits per second of each link that some flow takes.
    """
    remaining_bps = dict(capacity_bps)
    rates = []
    for flow in flows:
        rate_bps = min([flow.ceiling_bps * flow.weight, *(remaining_bps[link] for link in flow.links)])
        for link in flow.links:
            remaining_bps[link] -= rate_bps
        rates.append(rate_bps)
    return rates
