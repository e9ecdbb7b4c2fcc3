"""The hosts of a job that runs on several machines: which ranks each has, and where they meet."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from planner.scenario.cluster import Cluster

# What opens on the head besides connections that others answer: keepers and clocks here, the store right after it.
DEFAULT_PORT = 29400


@dataclass(frozen=True, slots=True)
class HostPart:
    """One host's part in a job.

    Attributes:
        name: The host's, as the scenario's devices have it.
        ranks: Of the job, in the order of the processes there; none on a head that only steers.
        interface: The network interface over which its ranks reach the others, such as ``wg0``; several with commas.
    """

    name: str
    ranks: tuple[int, ...]
    interface: str


@dataclass(frozen=True, slots=True)
class Hosts:
    """All hosts of a job.

    Attributes:
        head: Name of the one that has the policy, the store and the run folder.
        address: Of the head, where the others reach it and to which alone it binds.
        port: Of the head, for keepers and clocks; the store has the next one.
        arrival_s: How long the head waits until all others are there, seconds.
        silence_s: A host that answers nothing for so long is lost, seconds.
        parts: The head's and the others'.
        job: Made up for each job, so that nobody takes part in another one that comes after it at the same address.
    """

    head: str
    address: str
    port: int
    arrival_s: float
    silence_s: float
    parts: tuple[HostPart, ...]
    job: str = ""

    def part(self, name: str) -> HostPart:
        """Return a host's part."""
        return next(part for part in self.parts if part.name == name)

    @property
    def rank_count(self) -> int:
        """How many ranks the job has."""
        return sum(len(part.ranks) for part in self.parts)

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks on the head."""
        return self.part(self.head).ranks

    def host_of(self, rank: int) -> str:
        """Return the name of the host that has a rank."""
        return next(part.name for part in self.parts if rank in part.ranks)

    def write(self, path: Path) -> None:
        """Write a file that `read_hosts` reads."""
        path.write_text(json.dumps(asdict(self)))


def read_hosts(path: Path) -> Hosts | None:
    """Return the hosts of a job; None if there is no such file, since the job runs on this machine alone."""
    if not path.exists():
        return None
    data = json.loads(path.read_text())
    parts = tuple(HostPart(each["name"], tuple(each["ranks"]), each["interface"]) for each in data.pop("parts"))
    return Hosts(**data, parts=parts)


def ranks_by_host(cluster: Cluster, devices: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return host to its ranks, in their order; ``devices`` are in rank order."""
    found: dict[str, list[int]] = {}
    for rank, device in enumerate(devices):
        found.setdefault(cluster.by_name[device].machine, []).append(rank)
    return {host: tuple(ranks) for host, ranks in found.items()}
