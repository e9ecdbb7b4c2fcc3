"""The file of ``ropebridge deploy --hosts``, which describes the hosts of a job."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from executor.core.control_channel import new_key
from executor.core.hosts import DEFAULT_PORT, HostPart, Hosts, ranks_by_host
from planner.files.documents import Document
from planner.files.parsing import STRICT, Name, Seconds, parse
from planner.scenario.cluster import Cluster
from traces.common.errors import InputError, find_by_name

Port = Annotated[int, Field(ge=1, le=65534)]
# Used as a word of scripts and in file names.
HostName = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$", max_length=40)]
Folder = Annotated[str, Field(pattern=r"^[A-Za-z0-9._/~@%+=:-]+$")]
EnvironmentName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


@dataclass(frozen=True, slots=True, config=STRICT)
class HostEntry:
    """The description of one host.

    Attributes:
        interface: The network interface over which the host reaches the others, such as ``wg0``.
        address: The host's address on that interface; the head's is required unless a batch system chooses the head.
        ssh: The host's name for ``ssh``; by default its own name.
        folder: The folder for jobs on the host, relative to the home folder.
        command: The command that runs ``ropebridge`` there.
        slurm: Options of ``sbatch`` for the host, such as ``--gres=gpu:1``.
        kubernetes: Fields of its TrainJob's trainer, such as ``image`` and ``resourcesPerNode``; ``pod``, further
            fields of its pod; ``claim``, a PersistentVolumeClaim in which the run's files outlive the pod.
        skypilot: The ``resources`` of its task, as SkyPilot defines them.
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
    """The hosts file.

    Attributes:
        hosts: The hosts by the name that the scenario's devices give as ``host``; a device without one is a host of
            its own name.
        head: The host that has the policy, the store and the run folder; by default the first one.
        port: The port of the head at which agents and ranks of other hosts connect.
        arrival: How long hosts wait for each other at the start, seconds.
        silence: How long a host may be silent before it counts as lost, seconds.
        secrets: Names of variables whose values are taken from the submitting environment and written nowhere.
        ssh_options: Further options of ``ssh`` and ``scp``, such as ``[-F, my-ssh-config]``.
        setup: Shell commands that prepare hosts which a cloud has just made, such as those that install ropebridge.
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


def read_hosts_file(path: Path) -> HostsFile:
    """Return the contents of a hosts file.

    Raises:
        InputError: The file is wrong; names the first place.
    """
    document = Document(path)
    found = parse(HostsFile, document, document.value)
    if not found.hosts:
        raise InputError("there is no host", where=document.where(("hosts",)), valid="name at least one")
    if found.head is not None:
        find_by_name(found.head, found.hosts, "host", where=document.where(("head",)))
    return found


def hosts_of(described: HostsFile, cluster: Cluster, devices: Sequence[str], where: str) -> Hosts:
    """Return the hosts of a job.

    Args:
        described: The hosts file.
        cluster: The cluster that the devices belong to.
        devices: Names of the job's devices, in rank order.
        where: Path of the hosts file, for messages.

    Raises:
        InputError: The file does not describe a device's host.
    """
    ranks = ranks_by_host(cluster, devices)
    for host in ranks:
        if host not in described.hosts:
            names = ", ".join(device for device in devices if cluster.by_name[device].machine == host)
            raise InputError(
                f"host '{host}', which has the device {names}, is not described",
                where=f"{where}: hosts",
                valid=f"add '{host}:' there; described are {', '.join(described.hosts)}",
            )
    head = described.head or next(iter(described.hosts))
    # A described host without ranks takes part only as the head.
    taking_part = [head, *(host for host in ranks if host != head)]
    parts = tuple(HostPart(name, ranks.get(name, ()), described.hosts[name].interface) for name in taking_part)
    address = described.hosts[head].address or ""
    return Hosts(head, address, described.port, described.arrival, described.silence, parts, new_key())
