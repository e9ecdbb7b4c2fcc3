"""A way to use a pool of devices."""

from collections import defaultdict
from dataclasses import dataclass

from planner.scenario.cluster import Cluster, Device


@dataclass(frozen=True, eq=False, slots=True)
class DeviceClass:
    """Devices of one kind and memory in one region.

    Attributes:
        hosts: Its devices, host by host.
        kind: Of all of them.
        region: Of all of them.
        memory_bytes: Of each.
    """

    hosts: tuple[tuple[str, ...], ...]
    kind: str
    region: str
    memory_bytes: int

    @property
    def devices(self) -> tuple[str, ...]:
        """All devices, host by host."""
        return tuple(device for host in self.hosts for device in host)

    @property
    def ends(self) -> tuple[str, str]:
        """The first device and the last one: in different hosts, if there are several."""
        return self.hosts[0][0], self.hosts[-1][-1]

    @property
    def size(self) -> int:
        """How many devices it has."""
        return sum(len(host) for host in self.hosts)

    @property
    def host_size(self) -> int:
        """How many devices its largest host has."""
        return max(len(host) for host in self.hosts)

    def group_count(self, degree: int) -> int:
        """Return how many groups of so many devices of one host there are."""
        return sum(len(host) // degree for host in self.hosts)

    def groups(self, degree: int) -> list[tuple[str, ...]]:
        """Return groups of so many devices of one host; what is left over in a host is in none."""
        return [
            host[at : at + degree] for host in self.hosts for at in range(0, len(host) - len(host) % degree, degree)
        ]


def device_classes_of(cluster: Cluster, without: frozenset[str] = frozenset()) -> tuple[DeviceClass, ...]:
    """Return the pools of a cluster in the order in which devices name them.

    Args:
        cluster: All devices.
        without: Those that may not be used.
    """
    alike: dict[tuple[str, str, int, float, float], list[Device]] = defaultdict(list)
    for device in cluster.devices:
        if device.name not in without:
            key = (device.region, device.kind, device.memory_bytes, device.price_per_hour, device.interface_bps)
            alike[key].append(device)
    return tuple(_pool(devices) for devices in alike.values())


def _pool(devices: list[Device]) -> DeviceClass:
    hosts: dict[str, list[str]] = defaultdict(list)
    for device in devices:
        hosts[device.machine].append(device.name)
    first = devices[0]
    return DeviceClass(tuple(tuple(host) for host in hosts.values()), first.kind, first.region, first.memory_bytes)


@dataclass(frozen=True, eq=False, slots=True)
class StageOption:
    """A way to use a pool.

    Attributes:
        pool: The pool.
        degree: Devices that share each layer by tensor parallelism.
        width: Replicas of each stage.
        recompute: Whether stages keep only their input.
        most_stages: As many as one pipeline's part of the pool has devices for.
    """

    device_class: DeviceClass
    degree: int
    width: int
    recompute: bool
    most_stages: int
