"""A scenario with something better than it is: what a step would take there says what binds it."""

from collections.abc import Collection
from dataclasses import replace

from planner.scenario.cluster import Cluster, Device, Link
from planner.scenario.scenario import Scenario

# More than any plan needs.
_ENDLESS_BYTES = 2**60

# The ends of a link, whichever way it leads.
Ends = frozenset[str]


def ends_of(link: Link) -> Ends:
    """Return the ends of a link; a network interface ends at its host and at ``network``."""
    return frozenset((link.source, link.target))


def with_better_links(
    scenario: Scenario, rate_ratio: float = 1.0, latency_ratio: float = 1.0, only: Collection[Ends] | None = None
) -> Scenario:
    """Return the scenario with other links, network interfaces of hosts included; both ways, and without traces.

    Args:
        scenario: Stays as it is.
        rate_ratio: Bandwidths are so many times as high, curves over the size of a message too.
        latency_ratio: Latencies are so many times as long.
        only: The links that change; all of them if None.
    """

    def changes(ends: Ends) -> bool:
        return only is None or ends in only

    def device(each: Device) -> Device:
        changed = changes(frozenset((each.machine, "network")))
        return replace(each, interface_bps=rate_ratio * each.interface_bps) if changed else each

    links = (
        _better(link, rate_ratio, latency_ratio) if changes(ends_of(link)) else link for link in scenario.cluster.links
    )
    return replace(scenario, cluster=Cluster(tuple(map(device, scenario.cluster.devices)), tuple(links)))


def with_endless_memory(scenario: Scenario) -> Scenario:
    """Return the scenario with devices that hold everything."""
    devices = tuple(replace(device, memory_bytes=_ENDLESS_BYTES) for device in scenario.cluster.devices)
    return replace(scenario, cluster=Cluster(devices, scenario.cluster.links))


def _better(link: Link, rate_ratio: float, latency_ratio: float) -> Link:
    curve = link.size_curve
    if curve is not None:
        curve = replace(
            curve,
            quadratic=rate_ratio * curve.quadratic,
            linear=rate_ratio * curve.linear,
            constant=rate_ratio * curve.constant,
            ceiling_bps=rate_ratio * curve.ceiling_bps,
        )
    return replace(
        link,
        bandwidth_bps=rate_ratio * link.bandwidth_bps,
        latency_s=latency_ratio * link.latency_s,
        size_curve=curve,
        trace=None,
    )
