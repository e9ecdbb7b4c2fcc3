"""The head of a job in the tests' own process: its control server, with the test in place of the agent."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from executor.control.control_server import ControlServer
from executor.core.control_channel import Channel, listen, read_key
from executor.core.hosts import Hosts
from executor.core.job import JobFolder


@dataclass(frozen=True)
class Served:
    """A control server, where it listens, and the end of its own host's agent; connections are closed at the end."""

    server: ControlServer
    address: tuple[str, int]
    agent: Channel
    key: bytes
    connections: list[socket.socket] = field(default_factory=list)


@contextmanager
def serving(
    job: JobFolder, ranks: int, hosts: Hosts | None = None, listening: socket.socket | None = None
) -> Iterator[Served]:
    listening = listening or listen(("127.0.0.1", 0))
    address = listening.getsockname()[:2]
    own, agents = socket.socketpair()
    key = read_key(job.key)
    server = ControlServer(listening, own, key, job, ranks, hosts)
    served = Served(server, address, Channel(agents), key)
    try:
        yield served
    finally:
        server.close()
        for each in (agents, own, *served.connections):
            each.close()
