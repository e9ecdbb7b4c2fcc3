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
# Without characters that are special in shell scripts or file names.
HostName = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$", max_length=40)]
# A host's name or address of IPv4 or IPv6.
Address = Annotated[str, Field(pattern=r"^[A-Za-z0-9.:_%-]+$", max_length=253)]
Folder = Annotated[str, Field(pattern=r"^[A-Za-z0-9._/~@%+=:-]+$")]
# As it is in options of Slurm and in labels of Kubernetes.
GpuName = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$", max_length=63)]
GpuLabel = Annotated[str, Field(pattern=r"^([a-z0-9.-]+/)?[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$")]
EnvironmentName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


@dataclass(frozen=True, slots=True, config=STRICT)
class HostEntry:
    """The description of one host.

    Attributes:
        interface: The network interface over which the host reaches the other hosts, such as ``wg0``.
        address: The host's address on that interface; required for the head unless a batch system chooses the head.
        ssh: The host's name for ``ssh``; None for the name in the hosts file.
        folder: The folder for jobs on the host, relative to the home folder.
        command: The command that runs ``ropebridge`` on the host.
        slurm: Options of ``sbatch`` for the host, such as ``--partition=gpu``.
        kubernetes: Fields of the trainer in the host's TrainJob, such as ``image`` and ``resourcesPerNode``; in
            addition ``pod``, fields of the pod, and ``claim``, a PersistentVolumeClaim that keeps the run's files.
        skypilot: The ``resources`` of the host's task, as SkyPilot defines them.
    """

    interface: Name
    address: Address | None = None
    ssh: Name | None = None
    folder: Folder = "ropebridge-jobs"
    command: Name = "ropebridge"
    slurm: tuple[str, ...] = ()
    kubernetes: Mapping[str, Any] | None = None
    skypilot: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, config=STRICT)
class HostsFile:
    """The contents of a hosts file.

    Attributes:
        hosts: The entries by host name: the field ``host`` of the scenario's devices, or the device's own name.
        head: Name of the host with the launcher, the policy and the run folder; None for the first host.
        port: The port of the head at which agents and ranks of other hosts connect.
        arrival: How long hosts wait for each other at the start, seconds.
        silence: How long a host may not answer before it counts as lost, seconds.
        gpus: The scheduler's names for kinds of GPUs: types in Slurm, values of a label in Kubernetes, accelerators in
            SkyPilot.
        gpu_label: The label of Kubernetes nodes whose value is the name of the node's GPUs.
        environment: Environment variables of the job on each host.
        secrets: Names of variables whose values are taken from the submitting environment and written nowhere.
        ssh_options: Additional options of ``ssh`` and ``scp``, such as ``[-F, my-ssh-config]``.
        setup: Shell commands that prepare hosts which a cloud has just created, such as ``pip install ropebridge``.
    """

    hosts: Mapping[HostName, HostEntry]
    head: HostName | None = None
    port: Port = DEFAULT_PORT
    arrival: Seconds = 600.0
    silence: Seconds = 15.0
    gpus: Mapping[Name, GpuName] = Field(default_factory=dict)
    gpu_label: GpuLabel | None = None
    environment: Mapping[EnvironmentName, str] = Field(default_factory=dict)
    secrets: tuple[EnvironmentName, ...] = ()
    ssh_options: tuple[str, ...] = ()
    setup: str = ""


def read_hosts_file(path: Path) -> HostsFile:
    """Return the contents of a hosts file; raise `InputError` with the place of the first mistake."""
    document = Document(path)
    found = parse(HostsFile, document, document.value)
    if not found.hosts:
        raise InputError("there is no host", where=document.where(("hosts",)), valid="name at least one host")
    if found.head is not None:
        find_by_name(found.head, found.hosts, "host", where=document.where(("head",)))
    return found


def hosts_of(described: HostsFile, cluster: Cluster, devices: Sequence[str], where: str) -> Hosts:
    """Return the hosts of a job with a new key.

    Args:
        described: The contents of the hosts file.
        cluster: The cluster that the devices belong to.
        devices: Names of the job's devices, in rank order.
        where: Path of the hosts file, for messages.

    Raises:
        InputError: The host of a device has no entry in the file.
    """
    ranks = ranks_by_host(cluster, devices)
    for host in ranks:
        if host not in described.hosts:
            names = ", ".join(device for device in devices if cluster.by_name[device].machine == host)
            raise InputError(
                f"host '{host}', which has the device {names}, is not described",
                where=f"{where}: hosts",
                valid=f"add an entry '{host}:'; the file describes {', '.join(described.hosts)}",
            )
    head = described.head or next(iter(described.hosts))
    # A host without ranks takes part in the job only if it is the head.
    taking_part = [head, *(host for host in ranks if host != head)]
    parts = tuple(HostPart(name, ranks.get(name, ()), described.hosts[name].interface) for name in taking_part)
    address = described.hosts[head].address or ""
    return Hosts(head, address, described.port, described.arrival, described.silence, parts, new_key())
