"""The GPUs that a job needs on each of its hosts, and the names that the scheduler has for them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from executor.core.job import ComputeMode
from executor.deploy.hosts_file import HostsFile
from planner.scenario.cluster import Cluster
from planner.scenario.datasheet import DATASHEET, is_gpu
from traces.common.errors import find_by_name


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs that a deployment asks for.

    Attributes:
        by_host: Numbers of GPUs by host and kind; without the hosts that need none.
        names: The scheduler's names by kind, as far as the hosts file gives them.
        label: The label of Kubernetes nodes whose value is the name of the node's GPUs; empty if it is unknown.
    """

    by_host: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    label: str = ""

    def kinds(self, host: str) -> Mapping[str, int]:
        """Return the numbers of a host's GPUs by kind."""
        return self.by_host.get(host, {})

    def count(self, host: str) -> int:
        """Return the number of a host's GPUs."""
        return sum(self.kinds(host).values())


def gpus_of(described: HostsFile, cluster: Cluster, devices: Sequence[str], compute: ComputeMode, where: str) -> Gpus:
    """Return the GPUs of a job: one for each of its devices that is a GPU, and none for paced compute.

    Args:
        described: The contents of the hosts file.
        cluster: The cluster that the devices belong to.
        devices: Names of the job's devices.
        compute: The mode of compute.
        where: Path of the hosts file, for messages.

    Raises:
        InputError: The hosts file names a kind that neither the cluster nor the datasheet has.
    """
    known = dict.fromkeys((*(device.kind for device in cluster.devices), *DATASHEET))
    for kind in described.gpus:
        find_by_name(kind, known, "device kind", where=f"{where}: gpus")
    found: dict[str, Counter[str]] = {}
    for name in devices if compute == "real" else ():
        device = cluster.by_name[name]
        if is_gpu(device.kind):
            found.setdefault(device.machine, Counter())[device.kind] += 1
    by_host = {host: dict(kinds) for host, kinds in found.items()}
    return Gpus(by_host, dict(described.gpus), described.gpu_label or "")
