"""The hosts of a job that runs on several machines: which ranks each has, where they meet, and by which key."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from executor.core.control_channel import read_key, write_key
from planner.scenario.cluster import Cluster

# The one port of the head that other hosts connect to, besides the connections of gloo.
DEFAULT_PORT = 29400

# The file of the job's key, beside that of its hosts.
KEY_FILE = "key"


@dataclass(frozen=True, slots=True)
class HostPart:
    """One host's part in a job.

    Attributes:
        name: The host's name, as the scenario's devices have it.
        ranks: The job's ranks that it has, in the order of the processes there; none on a head that only steers.
        interface: The network interface over which its ranks reach the others, such as ``wg0``; several with commas.
    """

    name: str
    ranks: tuple[int, ...]
    interface: str


@dataclass(frozen=True, slots=True)
class Hosts:
    """All hosts of a job.

    Attributes:
        head: Name of the host that has the policy and the run folder.
        address: The head's address, at which the others reach it and to which alone it binds.
        port: The head's port for agents and ranks.
        arrival_s: How long the head waits until all others are there, in seconds.
        silence_s: A host that answers nothing for so long is lost, in seconds.
        key: The secret of this job, by which its hosts know each other; see executor/core/control_channel.py.
    """

    head: str
    address: str
    port: int
    arrival_s: float
    silence_s: float
    parts: tuple[HostPart, ...]
    key: bytes = field(default=b"", repr=False)

    def part(self, name: str) -> HostPart:
        """Return a host's part."""
        return next(part for part in self.parts if part.name == name)

    @property
    def others(self) -> list[str]:
        """The names of the hosts besides the head."""
        return [part.name for part in self.parts if part.name != self.head]

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks on the head."""
        return self.part(self.head).ranks

    def host_of(self, rank: int) -> str:
        """Return the name of the host that has a rank."""
        return next(part.name for part in self.parts if rank in part.ranks)

    def write(self, path: Path) -> None:
        """Write a new file that `read_hosts` reads, and the key beside it, which nobody else can read."""
        data = asdict(self)
        write_key(path.with_name(KEY_FILE), data.pop("key"))
        path.write_text(json.dumps(data))


def read_hosts(path: Path) -> Hosts | None:
    """Return the hosts of a job; None if there is no such file, since the job runs on this machine alone."""
    if not path.exists():
        return None
    data = json.loads(path.read_text())
    parts = tuple(HostPart(each["name"], tuple(each["ranks"]), each["interface"]) for each in data.pop("parts"))
    return Hosts(**data, parts=parts, key=read_key(path.with_name(KEY_FILE)))


def ranks_by_host(cluster: Cluster, devices: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return host to its ranks, in their order; ``devices`` are in rank order."""
    found: dict[str, list[int]] = {}
    for rank, device in enumerate(devices):
        found.setdefault(cluster.by_name[device].machine, []).append(rank)
    return {host: tuple(ranks) for host, ranks in found.items()}
