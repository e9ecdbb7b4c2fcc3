"""A scenario whose links are as they were observed: what a policy plans for."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from planner.cost.steady_path import ConstantRatePath
from planner.scenario.cluster import Cluster, Link
from planner.scenario.scenario import Scenario


def with_observed_links(scenario: Scenario, paths: Mapping[tuple[str, str], ConstantRatePath]) -> Scenario:
    """Return the scenario with the links of observed paths as steady as they were observed to be.

    A path that is slower than declared is put down to its narrowest link; one that is faster, to every link of it that
    is declared slower. A latency is put down to its links in proportion to what they declare, or to the narrowest where
    they declare none. Where several paths share a link, the fastest and the shortest of them count: the others had to
    wait for something else.

    Args:
        scenario: Stays as it is.
        paths: (source, target) device to the path as it would be with nothing else on it, in bits of payload per second
            and seconds.
    """
    network = scenario.effects.network
    rates_bps: defaultdict[str, list[float]] = defaultdict(list)
    latencies_s: defaultdict[str, list[float]] = defaultdict(list)
    for pair, seen in paths.items():
        links = scenario.cluster.path(*pair)
        if not links:
            continue
        rate_bps = seen.rate_bps / (network.share * network.payload_efficiency)
        narrowest = min(links, key=lambda link: link.bandwidth_bps)
        declared_s = sum(link.latency_s for link in links)
        for link in links:
            if link is narrowest or link.bandwidth_bps < rate_bps:
                rates_bps[link.name].append(rate_bps)
            if declared_s > 0:
                latencies_s[link.name].append(seen.latency_s * link.latency_s / declared_s)
            elif link is narrowest:
                latencies_s[link.name].append(seen.latency_s)
    observed = rates_bps.keys() | latencies_s.keys()
    links = tuple(
        _steady(link, rates_bps[link.name], latencies_s[link.name]) if link.name in observed else link
        for link in scenario.cluster.links
    )
    return replace(scenario, cluster=Cluster(scenario.cluster.devices, links))


def _steady(link: Link, rates_bps: list[float], latencies_s: list[float]) -> Link:
    return replace(
        link,
        bandwidth_bps=max(rates_bps, default=link.bandwidth_bps),
        latency_s=min(latencies_s, default=link.latency_s),
        trace=None,
    )
