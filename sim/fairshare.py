"""Max-min fair shares: nobody can get more without somebody who has no more getting less.

Progressive filling (Bertsekas and Gallager, Data Networks, 1992, section 6.5): all rates grow together; the flows
on the first link that fills up keep their rate, the others grow on.
"""

from collections.abc import Mapping, Sequence


def max_min_rates(paths: Sequence[Sequence[str]], capacity_bps: Mapping[str, float]) -> list[float]:
    """Return the rate of each flow in bits per second.

    Args:
        paths: Names of the links that each flow takes, at least one.
        capacity_bps: Bits per second of each link that some flow takes.
    """
    rates = [0.0] * len(paths)
    remaining_bps = dict(capacity_bps)
    growing = set(range(len(paths)))
    while growing:
        users = {link: sum(link in paths[flow] for flow in growing) for link in remaining_bps}
        shares = {link: remaining_bps[link] / count for link, count in users.items() if count}
        share = min(shares.values())
        full = {link for link, value in shares.items() if value == share}
        for link, count in users.items():
            remaining_bps[link] = max(0.0, remaining_bps[link] - share * count)
        for flow in growing:
            rates[flow] += share
        growing = {flow for flow in growing if full.isdisjoint(paths[flow])}
    return rates
