"""What a person says of the hosts of a job: the file of ``ropebridge deploy --hosts``."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from secrets import token_hex
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from executor.core.hosts import DEFAULT_PORT, HostPart, Hosts, ranks_by_host
from planner.files.documents import Document
from planner.files.parsing import STRICT, Name, Seconds, parse
from planner.scenario.cluster import Cluster
from traces.common.errors import InputError
from traces.common.names import find_by_name

Port = Annotated[int, Field(ge=1, le=65534)]
# A word in scripts and names of files.
HostName = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$", max_length=40)]
Folder = Annotated[str, Field(pattern=r"^[A-Za-z0-9._/~@%+=:-]+$")]
EnvironmentName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


@dataclass(frozen=True, slots=True, config=STRICT)
class HostEntry:
    """One host.

    Attributes:
        interface: The network interface over which it reaches the others, such as ``wg0``.
        address: Its address there; the head's must be given, except where a batch system chooses the head.
        ssh: What ``ssh`` calls it; its own name if absent.
        folder: Where jobs go on it; relative to the home folder.
        command: What ``ropebridge`` is called there.
        slurm: Options of ``sbatch`` for it, such as ``--gres=gpu:1``.
        kubernetes: Fields of its TrainJob's trainer, such as ``image`` and ``resourcesPerNode``; ``pod``, what else its
            pod has; ``claim``, a PersistentVolumeClaim in which what the run writes outlives the pod.
        skypilot: Its ``resources``, as in a task of SkyPilot.
    """

    interface: Name
    address: Name | None = None
    ssh: Name | None = None
    folder: Folder = "ropebridge-jobs"
    command: Name = "ropebridge"
    slurm: tuple[str, ...] = ()
    kubernetes: Mapping[str, Any] | None = None
    skypilot: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, config=STRICT)
class HostsFile:
    """All hosts.

    Attributes:
        hosts: By the names that the scenario's devices have as ``host``; a device without one is a host of its name.
        head: Which has the policy, the store and the run folder; the first if absent.
        port: Of the head, which listens there and at the next one.
        arrival: How long hosts wait for each other at the start.
        silence: A host that answers nothing for so long is lost.
        environment: Variables for all processes.
        secrets: Names of variables whose values are taken from the environment of who deploys, and written nowhere.
        ssh_options: Of ``ssh`` and ``scp``, such as ``[-F, my-ssh-config]``.
        setup: Shell commands for hosts that a cloud has just made, such as those that install ropebridge.
    """

    hosts: Mapping[HostName, HostEntry]
    head: HostName | None = None
    port: Port = DEFAULT_PORT
    arrival: Seconds = 600.0
    silence: Seconds = 15.0
    environment: Mapping[EnvironmentName, str] = Field(default_factory=dict)
    secrets: tuple[EnvironmentName, ...] = ()
    ssh_options: tuple[str, ...] = ()
    setup: str = ""

    @property
    def head_name(self) -> str:
        """The head."""
        return self.head or next(iter(self.hosts))


def read_hosts_file(path: Path) -> HostsFile:
    """Return what a file says.

    Raises:
        InputError: The first thing in it that is wrong.
    """
    document = Document(path)
    found = parse(HostsFile, document, document.value)
    if not found.hosts:
        raise InputError("there is no host", where=document.where(("hosts",)), valid="name at least one")
    if found.head is not None:
        find_by_name(found.head, found.hosts, "host", where=document.where(("head",)))
    return found


def hosts_of(described: HostsFile, cluster: Cluster, devices: Sequence[str], where: str) -> Hosts:
    """Return the hosts of a job whose devices are in rank order.

    Args:
        described: What a person says of them.
        cluster: Has the devices.
        devices: In rank order.
        where: The file, for messages.

    Raises:
        InputError: A device's host is not described.
    """
    ranks = ranks_by_host(cluster, devices)
    for host in ranks:
        if host not in described.hosts:
            names = ", ".join(device for device in devices if cluster.by_name[device].machine == host)
            raise InputError(
                f"nothing is said of host '{host}', which has the device {names}",
                where=f"{where}: hosts",
                valid=f"add '{host}:' there; described are {', '.join(described.hosts)}",
            )
    head = described.head_name
    # What is described and not needed is left alone, except a head that only steers.
    taking_part = [head, *(host for host in ranks if host != head)]
    parts = tuple(HostPart(name, ranks.get(name, ()), described.hosts[name].interface) for name in taking_part)
    address = described.hosts[head].address or ""
    return Hosts(head, address, described.port, described.arrival, described.silence, parts, token_hex(8))
