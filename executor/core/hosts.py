"""The hosts of a job that runs on several machines: the ranks of each, the head's address, and the job's key."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from executor.core.control_channel import read_key, write_key
from planner.files.documents import read_json
from planner.scenario.cluster import Cluster
from traces.common.atomic import write_private_text
from traces.common.errors import InputError

# The head's port for agents and ranks of other hosts; gloo's connections use further ports.
DEFAULT_PORT = 29400

# Name of the file with the job's key, in the same folder as hosts.json.
KEY_FILE = "key"


@dataclass(frozen=True, slots=True)
class HostPart:
    """One host's part in a job.

    Attributes:
        name: The host's name, as in the field ``machine`` of the scenario's devices.
        ranks: The job's ranks on this host, in increasing order; empty on a head without devices.
        interface: The network interface of the ranks' connections, such as ``wg0``; several separated by commas.
    """

    name: str
    ranks: tuple[int, ...]
    interface: str


@dataclass(frozen=True, slots=True)
class Hosts:
    """All hosts of a job.

    Attributes:
        head: Name of the host with the launcher, the policy and the run folder.
        address: The only address at which the head listens, and at which other hosts connect to the head.
        port: The head's port for agents and ranks.
        arrival_s: How long the head waits for the agents of all other hosts, in seconds.
        silence_s: How long a host may not answer before it counts as lost, in seconds.
        key: The secret with which the hosts authenticate each other; see executor/core/control_channel.py.
    """

    head: str
    address: str
    port: int
    arrival_s: float
    silence_s: float
    parts: tuple[HostPart, ...]
    key: bytes = field(default=b"", repr=False)

    def part(self, name: str) -> HostPart:
        """Return the part of the host with this name."""
        return next(part for part in self.parts if part.name == name)

    @property
    def others(self) -> list[str]:
        """The names of all hosts but the head."""
        return [part.name for part in self.parts if part.name != self.head]

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks on the head."""
        return self.part(self.head).ranks

    def host_of(self, rank: int) -> str:
        """Return the name of the host that has a rank."""
        return next(part.name for part in self.parts if rank in part.ranks)

    def write(self, path: Path) -> None:
        """Write a JSON file for `read_hosts`, and the key to `KEY_FILE` in the same folder, both with mode 0600."""
        data = asdict(self)
        write_key(path.with_name(KEY_FILE), data.pop("key"))
        write_private_text(path, json.dumps(data))


def read_hosts(path: Path) -> Hosts | None:
    """Return the hosts of a job; None if the file is missing, which means that the job runs on this machine alone."""
    if not path.exists():
        return None
    try:
        found = TypeAdapter(Hosts).validate_python(read_json(path))
    except ValidationError as error:
        (first, *_) = error.errors()
        raise InputError(
            f"the file does not describe the hosts of a job: {'.'.join(map(str, first['loc']))}: {first['msg']}",
            where=str(path),
            valid="the file that 'ropebridge deploy' wrote",
        ) from None
    return replace(found, key=read_key(path.with_name(KEY_FILE)))


def links_in_the_clear(hosts: Hosts) -> str:
    """Return a line for the user that says which links of a job are encrypted, and which only if the network is."""
    interfaces = ", ".join(f"{part.name} ({part.interface})" for part in hosts.parts if part.ranks)
    line = (
        "control messages between hosts are encrypted with the job's key; tensors are sent by gloo in the clear, over "
        f"the interfaces of {interfaces}, which therefore must be private, such as WireGuard's"
    )
    own = [name for name in hosts.part(hosts.head).interface.split(",") if not _is_wireguard(name)]
    return f"{line}; on this host {' and '.join(own)} is no interface of WireGuard" if own else line


def _is_wireguard(interface: str) -> bool:
    try:
        return "DEVTYPE=wireguard" in Path(f"/sys/class/net/{interface}/uevent").read_text().splitlines()
    except (OSError, ValueError):
        return False


def ranks_by_host(cluster: Cluster, devices: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return the ranks of each host, in increasing order, by host name; ``devices`` are in rank order."""
    found: dict[str, list[int]] = {}
    for rank, device in enumerate(devices):
        found.setdefault(cluster.by_name[device].machine, []).append(rank)
    return {host: tuple(ranks) for host, ranks in found.items()}
