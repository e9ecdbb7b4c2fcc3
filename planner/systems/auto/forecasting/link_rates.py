"""Rates and latencies of links by their names, as declared or observed, and scenarios with such links."""

from collections.abc import Mapping
from dataclasses import replace

from planner.scenario.cluster import Cluster
from planner.scenario.scenario import Scenario

# Links are nearly the same if rates are within a factor of `NEAR`, and latencies too or within `NEAR_S` seconds.
NEAR = 1.5
NEAR_S = 0.0005

# Rate, bits per second, and one-way latency, seconds, of each link by its name.
Links = Mapping[str, tuple[float, float]]


def are_near(links: Links, others: Links) -> bool:
    """Return whether rates and latencies differ so little that no new search is needed."""
    pairs = [(*links[name], *others[name]) for name in links]
    return all(
        1 / NEAR <= rate_bps / other_bps <= NEAR
        and (abs(latency_s - other_s) <= NEAR_S or 1 / NEAR <= latency_s / max(other_s, NEAR_S) <= NEAR)
        for rate_bps, latency_s, other_bps, other_s in pairs
    )


def declared_links(scenario: Scenario) -> Links:
    """Return the declared links, but those inside a region or host, with what observed latencies include."""
    handover_s = scenario.effects.network.handover_s
    return {
        link.name: (link.bandwidth_bps, link.latency_s + link.jitter_s + handover_s)
        for link in scenario.cluster.links
        if link.source != link.target
    }


def with_links(scenario: Scenario, seen: Links) -> Scenario:
    """Return the scenario with constant links, those in ``seen`` at these rates and latencies."""
    handover_s = scenario.effects.network.handover_s
    links = []
    for link in scenario.cluster.links:
        if link.name in seen:
            rate_bps, latency_s = seen[link.name]
            # The scenario adds the hand-over itself.
            latency_s = max(0.0, latency_s - handover_s)
            link = replace(link, bandwidth_bps=rate_bps, latency_s=latency_s, jitter_s=0.0)
        links.append(replace(link, trace=None))
    return replace(scenario, cluster=Cluster(scenario.cluster.devices, tuple(links)))
