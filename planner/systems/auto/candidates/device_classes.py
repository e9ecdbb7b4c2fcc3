"""Device classes, which are sets of interchangeable devices, and the options of a stage on a class."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from planner.cost.tensor_parallel import slowest_group
from planner.scenario.cluster import Cluster, Device
from planner.scenario.scenario import Scenario
from traces.common.errors import InputError

# Numbers of replicas of a stage that are tried. More are not needed: equal pipelines side by side do what replicas do,
# unless the stages of a pipeline are on different device classes and need different numbers of devices.
WIDTHS = (1, 2, 3, 4)

# Most consecutive stages of a pipeline on one device class. With more stages, each would have very few layers.
MOST_STAGES_OF_CLASS = 12


@dataclass(frozen=True, eq=False, slots=True)
class DeviceClass:
    """Devices of equal kind, memory size, price and network interface in one region.

    Interfaces are equal if they are faster than all links of the region.

    Attributes:
        hosts: Names of the devices of each host.
        kind: Device kind in the model's profile.
        region: Name of the region.
        memory_bytes: Memory of each device, bytes.
    """

    hosts: tuple[tuple[str, ...], ...]
    kind: str
    region: str
    memory_bytes: int

    @property
    def ends(self) -> tuple[str, str]:
        """Names of two devices, on different hosts if possible, whose path stands for all paths of the class."""
        return self.hosts[0][0], self.hosts[-1][-1]

    @property
    def size(self) -> int:
        """Number of devices."""
        return sum(len(host) for host in self.hosts)

    @property
    def host_size(self) -> int:
        """Largest number of devices of the class in one host."""
        return max(len(host) for host in self.hosts)

    def group_count(self, degree: int) -> int:
        """Return the number of groups that `groups` returns."""
        return sum(len(host) // degree for host in self.hosts)

    def groups(self, degree: int) -> list[tuple[str, ...]]:
        """Return disjoint groups of ``degree`` devices of one host; devices that are left over are in no group."""
        return [
            host[at : at + degree] for host in self.hosts for at in range(0, len(host) - len(host) % degree, degree)
        ]


def device_classes_of(cluster: Cluster, without: frozenset[str] = frozenset()) -> tuple[DeviceClass, ...]:
    """Return the device classes of a cluster, in the order of their first devices in the cluster.

    Args:
        cluster: Cluster whose devices are grouped.
        without: Names of devices to leave out.
    """
    classes: dict[tuple[str, str, int, float, float], list[Device]] = defaultdict(list)
    fastest_bps = _fastest_links(cluster)
    for device in cluster.devices:
        if device.name not in without:
            own_bps = min(device.interface_bps, fastest_bps[device.region])
            classes[device.region, device.kind, device.memory_bytes, device.price_per_hour, own_bps].append(device)
    return tuple(_device_class(devices) for devices in classes.values())


def _fastest_links(cluster: Cluster) -> dict[str, float]:
    """Return the highest rate of a link that begins or ends in each region, bits per second.

    Links inside hosts do not count.
    """
    region_of = {device.region: device.region for device in cluster.devices}
    for device in cluster.devices:
        region_of |= {device.name: device.region, device.machine: device.region}
    fastest_bps = dict.fromkeys(cluster.regions, 0.0)
    for link in cluster.links:
        if link.source != link.target or link.source in fastest_bps:
            for end in (link.source, link.target):
                fastest_bps[region_of[end]] = max(fastest_bps[region_of[end]], link.bandwidth_bps)
    return fastest_bps


def _device_class(devices: list[Device]) -> DeviceClass:
    hosts: dict[str, list[str]] = defaultdict(list)
    for device in devices:
        hosts[device.machine].append(device.name)
    first = devices[0]
    return DeviceClass(tuple(tuple(host) for host in hosts.values()), first.kind, first.region, first.memory_bytes)


@dataclass(frozen=True, slots=True)
class StageOption:
    """A way in which the stages of a pipeline may use a device class.

    Attributes:
        device_class: Class whose devices hold the stages.
        degree: Number of devices that share each layer by tensor parallelism.
        width: Number of replicas of each stage.
        recompute: Whether stages save only their input and recompute activations during backward.
        most_stages: Most stages of one pipeline on this class, limited by the number of devices and by
            `MOST_STAGES_OF_CLASS`. It is ignored when options are compared.
    """

    device_class: DeviceClass
    degree: int
    width: int
    recompute: bool
    most_stages: int = field(compare=False)

    def samples(self, microbatch: int) -> int:
        """Return how many samples of a microbatch a replica takes at most."""
        return -(-microbatch // self.width)


def stage_options(
    device_classes: Sequence[DeviceClass], scenario: Scenario, pipelines: int, samples: int, recompute: bool
) -> tuple[StageOption, ...]:
    """Return an option for every combination of class, degree and width that is possible for a pipeline.

    Args:
        device_classes: Device classes, whose devices are divided evenly among the pipelines.
        scenario: Scenario that gives the model.
        pipelines: Number of equal pipelines.
        samples: Samples of a microbatch, which limit the number of replicas.
        recompute: Whether stages save only their input and recompute activations during backward.

    Raises:
        InputError: The profile has no times for the kind of a class.
    """
    options = []
    for each in device_classes:
        for degree in _degrees(scenario, each):
            groups = each.group_count(degree) // pipelines
            for width in (width for width in WIDTHS if width <= min(samples, groups)):
                options.append(StageOption(each, degree, width, recompute, min(MOST_STAGES_OF_CLASS, groups // width)))
    return tuple(options)


@lru_cache(maxsize=256)
def _degrees(scenario: Scenario, device_class: DeviceClass) -> tuple[int, ...]:
    """Return the tensor-parallel degrees that a host has enough devices for and the profile has times for, 1 first.

    Raises:
        InputError: The profile has no times for the class's kind at degree 1.
    """
    scenario.model.times(0, len(scenario.model.layers), device_class.kind, 1)
    sharded = (degree for degree in sorted(scenario.model.sharded) if degree <= device_class.host_size)
    return (1, *(degree for degree in sharded if _is_profiled(scenario, degree, device_class.kind)))


def _is_profiled(scenario: Scenario, degree: int, kind: str) -> bool:
    try:
        scenario.model.at_degree(degree).times(0, len(scenario.model.layers), kind, 1)
        slowest_group(scenario, kind, degree)
    except InputError:
        return False
    return True
