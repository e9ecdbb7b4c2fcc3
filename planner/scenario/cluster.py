"""Devices, the links between them, and the paths that bytes take."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from planner.scenario.size_curve import SizeCurve
from traces.common.errors import InputError
from traces.trace import LinkTrace

# Limit on the wait for a link at rate zero; a longer one is taken for a mistake in its trace, and the run ends.
LONGEST_OUTAGE_S = 86400.0


class ClusterError(InputError):
    """An error in one device or link.

    Attributes:
        location: Keys and indices of the wrong value below ``cluster``, for example ``("links", 2, "bandwidth")``.
    """

    def __init__(self, problem: str, location: tuple[int | str, ...], valid: str) -> None:
        self.location = location
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
        super().__init__(problem, f"cluster{place}", valid)
        self.args = (problem, location, valid)


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU (or CPU) that runs one process.

    Attributes:
        name: Name of the device, unique in the cluster and different from every region.
        kind: Device kind (``a100-40``, ``jetson-tx2``), the key into a layer's time tables.
        memory_bytes: Bytes of device memory, which a stage and its activations must fit into.
        price_per_hour: Rent in US dollars.
        host: Name of the machine that holds the device; empty if the device is alone in its machine. Devices of one
            host share its network interface.
        interface_bps: Rate of the host's network interface, bits per second each way; infinite for no limit.
    """

    name: str
    kind: str
    region: str
    memory_bytes: int
    price_per_hour: float = 0.0
    host: str = ""
    interface_bps: float = math.inf

    @property
    def machine(self) -> str:
        """Name of the host; the device's own name if ``host`` is empty."""
        return self.host or self.name


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a network path between two regions, hosts or devices, or inside a region or host.

    All concurrent flows over the link share its bandwidth.

    Attributes:
        source: Name of a region, a host or a device.
        target: Name of another one; the source itself for the link inside a region (its LAN) or a host (NVLink, PCIe).
        bandwidth_bps: Rate that planners assume, bits per second; the mean of the trace if there is one.
        latency_s: One-way latency, seconds.
        trace: Rate over time; None if the rate is constant.
        price_per_gb: Price of traffic, US dollars per 1e9 bytes.
        size_curve: Rate of a single message as a function of its size; None if every size reaches the link's rate.
        jitter_s: Largest additional delay of a packet, seconds, uniformly distributed; packets stay in order.
        loss: Share of the packets that are lost, below 1.
    """

    source: str
    target: str
    bandwidth_bps: float
    latency_s: float
    trace: LinkTrace | None = None
    price_per_gb: float = 0.0
    size_curve: SizeCurve | None = None
    jitter_s: float = 0.0
    loss: float = 0.0

    @property
    def name(self) -> str:
        """Name of the link, ``source->target``, unique in the cluster."""
        return f"{self.source}->{self.target}"

    def latency_at_s(self, time_s: float) -> float:
        """Return the one-way latency in seconds at ``time_s`` from the start of the run."""
        if self.trace is None or self.trace.latency_s is None:
            return self.latency_s
        return float(self.trace.latency_s[self.trace.piece_at(time_s)])


@dataclass(frozen=True, eq=False)
class Cluster:
    """Devices in regions, and directed links; a connection in both directions is two links.

    Raises:
        ClusterError: A device or link is named twice, a link ends at an unknown name, or a value is out of range.
    """

    devices: tuple[Device, ...]
    links: tuple[Link, ...]

    def __post_init__(self) -> None:
        _check_devices(self.devices)
        _check_links(self)

    @cached_property
    def by_name(self) -> Mapping[str, Device]:
        """Devices by name."""
        return {device.name: device for device in self.devices}

    @cached_property
    def regions(self) -> tuple[str, ...]:
        """Names of the regions, in the order of the devices."""
        return tuple(dict.fromkeys(device.region for device in self.devices))

    @cached_property
    def wan_links(self) -> frozenset[str]:
        """Names of the links whose two ends are in different regions, whether these are devices, hosts or regions."""
        region_of = {region: region for region in self.regions}
        for device in self.devices:
            region_of |= {device.name: device.region, device.machine: device.region}
        return frozenset(link.name for link in self.links if region_of[link.source] != region_of[link.target])

    @cached_property
    def _links(self) -> Mapping[tuple[str, str], Link]:
        return {(link.source, link.target): link for link in self.links}

    @cached_property
    def _paths(self) -> dict[tuple[str, str], tuple[Link, ...]]:
        return {}

    def crosses_regions(self, source: str, target: str) -> bool:
        """Return whether two devices are in different regions, so that traffic between them is WAN traffic."""
        return self.by_name[source].region != self.by_name[target].region

    def same_host(self, one: str, other: str) -> bool:
        """Return whether two devices are in one machine, so that no network is between them."""
        return self.by_name[one].machine == self.by_name[other].machine

    def path(self, source: str, target: str) -> tuple[Link, ...]:
        """Return the links that bytes take from one device to another.

        The path is the first of these that exists: the link between the two devices, the link between (or inside) their
        hosts, the route with the fewest links between their regions; of several such routes the one with the lowest
        latency, and of these the one whose slowest link is fastest. If the hosts differ, their network interfaces are
        added as the first and the last link. The path from a device to itself is empty.

        Raises:
            InputError: No links lead from ``source`` to ``target``.
        """
        key = (source, target)
        if key not in self._paths:
            self._paths[key] = self._find_path(source, target)
        return self._paths[key]

    def _find_path(self, source: str, target: str) -> tuple[Link, ...]:
        if source == target:
            return ()
        start_host, goal_host = self.by_name[source].machine, self.by_name[target].machine
        direct = self._links.get((source, target)) or self._links.get((start_host, goal_host))
        if start_host == goal_host:
            return (direct,) if direct is not None else self._between_regions(source, target)
        middle = (direct,) if direct is not None else self._between_regions(source, target)
        leaving, entering = self._interfaces.get(start_host), self._interfaces.get(goal_host)
        return (*(leaving[:1] if leaving else ()), *middle, *(entering[1:] if entering else ()))

    @cached_property
    def _interfaces(self) -> Mapping[str, tuple[Link, Link]]:
        """Two links (outwards, inwards) for the network interface of each machine whose rate is given."""
        return {
            device.machine: (
                Link(device.machine, "network", device.interface_bps, 0.0),
                Link("network", device.machine, device.interface_bps, 0.0),
            )
            for device in self.devices
            if device.interface_bps < math.inf
        }

    @property
    def interfaces(self) -> tuple[Link, ...]:
        """Links that stand for the network interfaces of machines, first and last on the paths between these."""
        return tuple(link for pair in self._interfaces.values() for link in pair)

    def _between_regions(self, source: str, target: str) -> tuple[Link, ...]:
        start, goal = self.by_name[source].region, self.by_name[target].region
        route = self._routes_from(start).get(goal)
        if route is not None:
            return route
        if start == goal:
            raise InputError(
                f"no link leads from device '{source}' to '{target}'",
                where="cluster.links",
                valid=f"add one inside region '{start}' or between the two devices",
            )
        raise InputError(
            f"no link leads from region '{start}' (device '{source}') to '{goal}' (device '{target}')",
            where="cluster.links",
            valid=f"add one with 'between: [{start}, {goal}]'",
        )

    @cached_property
    def _routes(self) -> dict[str, dict[str, tuple[Link, ...]]]:
        return {}

    @cached_property
    def _outgoing(self) -> Mapping[str, list[Link]]:
        """Links from each region to another."""
        outgoing: dict[str, list[Link]] = {region: [] for region in self.regions}
        for link in self.links:
            if link.source in outgoing and link.target in outgoing and link.source != link.target:
                outgoing[link.source].append(link)
        return outgoing

    def _routes_from(self, start: str) -> Mapping[str, tuple[Link, ...]]:
        """Return the route of `path` from a region to each region that can be reached.

        The route from the region to itself is the link inside the region.
        """
        if start not in self._routes:
            found: dict[str, tuple[Link, ...]] = {start: ()}
            newest = found
            while newest:
                longer: dict[str, tuple[Link, ...]] = {}
                for region, route in newest.items():
                    for link in self._outgoing[region]:
                        if link.target not in found:
                            offered = (*route, link)
                            longer[link.target] = min(longer.get(link.target, offered), offered, key=_slowness)
                found = found | longer
                newest = longer
            del found[start]
            inside = self._links.get((start, start))
            self._routes[start] = found if inside is None else {**found, start: (inside,)}
        return self._routes[start]


def _slowness(route: tuple[Link, ...]) -> tuple[float, float]:
    """Return a key that is lowest for the best of several routes with equally many links, however these are listed."""
    return sum(link.latency_s for link in route), -min(link.bandwidth_bps for link in route)


def _check_devices(devices: tuple[Device, ...]) -> None:
    if not devices:
        raise ClusterError("the cluster has no devices", ("devices",), "give at least one")
    regions = {device.region for device in devices}
    seen: dict[str, int] = {}
    for index, device in enumerate(devices):
        place = ("devices", index)
        if device.name in seen:
            raise ClusterError(
                f"device '{device.name}' is named twice",
                (*place, "name"),
                f"it is already devices[{seen[device.name]}]; give every device a name of its own",
            )
        if device.name in regions:
            raise ClusterError(f"'{device.name}' is both a device and a region", (*place, "name"), "rename one of them")
        if device.memory_bytes <= 0:
            raise ClusterError(f"device '{device.name}' has no memory", (*place, "memory"), "give for example '16 GiB'")
        seen[device.name] = index
    _check_hosts(devices, regions)


def _check_hosts(devices: tuple[Device, ...], regions: set[str]) -> None:
    first: dict[str, Device] = {}
    for index, device in enumerate(devices):
        other = first.setdefault(device.machine, device)
        if device.machine in regions:
            raise ClusterError(
                f"'{device.machine}' is both a host and a region", ("devices", index, "host"), "rename one of them"
            )
        if (device.region, device.interface_bps) != (other.region, other.interface_bps):
            raise ClusterError(
                f"devices '{other.name}' and '{device.name}' of host '{device.machine}' differ in region or interface",
                ("devices", index, "host"),
                "a host is in one region and has one network interface",
            )
        if not device.interface_bps > 0:
            raise ClusterError(
                f"the network interface of device '{device.name}' carries nothing",
                ("devices", index, "interface"),
                "give for example '25 Gbit/s'",
            )


def _check_links(cluster: Cluster) -> None:
    hosts = {device.host for device in cluster.devices if device.host}
    ends = {*cluster.by_name, *cluster.regions, *hosts}
    seen: set[str] = set()
    for index, link in enumerate(cluster.links):
        place = ("links", index)
        for end in (link.source, link.target):
            if end not in ends:
                raise ClusterError(
                    f"the link ends at '{end}', which is neither a region nor a host nor a device",
                    place,
                    f"choose among regions: {', '.join(cluster.regions)}; devices: {', '.join(cluster.by_name)}"
                    + (f"; hosts: {', '.join(sorted(hosts))}" if hosts else ""),
                )
        if link.name in seen:
            raise ClusterError(f"the link {link.name} is given twice", place, "keep one of the two")
        if not link.bandwidth_bps > 0:
            raise ClusterError(
                f"the link {link.name} carries nothing ({link.bandwidth_bps:g} bit/s)",
                (*place, "bandwidth"),
                "a link needs a mean rate above zero, for example '100 Mbit/s'",
            )
        if not 0 <= link.jitter_s < math.inf:
            raise ClusterError(
                f"the link {link.name} has a jitter of {link.jitter_s:g} s",
                (*place, "jitter"),
                "give a finite time that is not negative, for example '5 ms'",
            )
        if not 0 <= link.loss < 1:
            raise ClusterError(
                f"the link {link.name} loses {link.loss:g} of its packets",
                (*place, "loss"),
                "give a share of 0 or more and below 1, for example 0.001",
            )
        seen.add(link.name)
