"""Classes of interchangeable devices, and the options of a stage on one of them."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from planner.scenario.cluster import Cluster, Device
from planner.scenario.scenario import Scenario
from traces.common.errors import InputError

# Numbers of replicas of a stage that are tried. More pipelines side by side do the same as more replicas, except where
# device classes differ: there a stage on one device may feed one on several.
WIDTHS = (1, 2, 3, 4)

# Most consecutive stages on one device class: with more, a stage would hold hardly a layer.
MOST_STAGES_OF_CLASS = 12


@dataclass(frozen=True, eq=False, slots=True)
class DeviceClass:
    """Devices of one kind, memory size and price in one region.

    Attributes:
        hosts: Names of the devices, host by host.
        kind: Device kind in the model's profile.
        region: Region of the cluster.
        memory_bytes: Memory of each device.
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
        """Number of devices."""
        return sum(len(host) for host in self.hosts)

    @property
    def host_size(self) -> int:
        """Number of devices of the largest host."""
        return max(len(host) for host in self.hosts)

    def group_count(self, degree: int) -> int:
        """Return the number of groups that `groups` returns."""
        return sum(len(host) // degree for host in self.hosts)

    def groups(self, degree: int) -> list[tuple[str, ...]]:
        """Return disjoint groups of ``degree`` devices of one host; the remainder of a host is in none."""
        return [
            host[at : at + degree] for host in self.hosts for at in range(0, len(host) - len(host) % degree, degree)
        ]


def device_classes_of(cluster: Cluster, without: frozenset[str] = frozenset()) -> tuple[DeviceClass, ...]:
    """Return the device classes of a cluster, in the order in which its devices name them.

    Args:
        cluster: Cluster whose devices are grouped.
        without: Names of devices to leave out.
    """
    classes: dict[tuple[str, str, int, float, float], list[Device]] = defaultdict(list)
    for device in cluster.devices:
        if device.name not in without:
            key = (device.region, device.kind, device.memory_bytes, device.price_per_hour, device.interface_bps)
            classes[key].append(device)
    return tuple(_device_class(devices) for devices in classes.values())


def _device_class(devices: list[Device]) -> DeviceClass:
    hosts: dict[str, list[str]] = defaultdict(list)
    for device in devices:
        hosts[device.machine].append(device.name)
    first = devices[0]
    return DeviceClass(tuple(tuple(host) for host in hosts.values()), first.kind, first.region, first.memory_bytes)


@dataclass(frozen=True, eq=False, slots=True)
class StageOption:
    """A way in which the stages of a pipeline may use a device class.

    Attributes:
        device_class: Class whose devices hold the stages.
        degree: Devices that share each layer by tensor parallelism.
        width: Replicas of each stage.
        recompute: Whether stages keep only their input and recompute activations.
        most_stages: Most stages for which one pipeline's part of the class has devices.
    """

    device_class: DeviceClass
    degree: int
    width: int
    recompute: bool
    most_stages: int


def stage_options(
    device_classes: Sequence[DeviceClass], scenario: Scenario, pipelines: int, samples: int, recompute: bool
) -> tuple[StageOption, ...]:
    """Return the options that each of ``pipelines`` equal pipelines has on its part of each device class.

    Args:
        device_classes: Device classes in any order.
        scenario: Scenario that gives the model.
        pipelines: Number of pipelines that share the classes.
        samples: Samples of a microbatch; a replica takes one or more.
        recompute: Whether stages keep only their input.
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
    """Degrees of tensor parallelism within a host that the model was profiled with on the class's kind.

    Raises:
        InputError: The profile has no times for the kind at all.
    """
    scenario.model.times(0, len(scenario.model.layers), device_class.kind, 1)
    sharded = (degree for degree in sorted(scenario.model.sharded) if degree <= device_class.host_size)
    return (1, *(degree for degree in sharded if _is_profiled(scenario, degree, device_class.kind)))


def _is_profiled(scenario: Scenario, degree: int, kind: str) -> bool:
    try:
        scenario.model.at_degree(degree).times(0, len(scenario.model.layers), kind, 1)
    except InputError:
        return False
    return True
