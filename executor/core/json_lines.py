"""The line between a keeper (executor/control/keeper.py) and the agent of the job (agent_server.py): objects of JSON.

A keeper says hello with its rank, hears which process of this rank to start and where the store is, and says what
becomes of it. Both ends notice by the kernel's own probes when the other machine is gone without a word.
"""

import json
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

# Where the agent listens: HOST:PORT.
AGENT_ADDRESS = "ROPEBRIDGE_AGENT"
# Where the store of the job is: HOST:PORT.
STORE_ADDRESS = "ROPEBRIDGE_STORE"
# Which job this is: executor/core/hosts.py.
JOB = "ROPEBRIDGE_JOB"
# How long a machine may answer nothing, seconds; 0 where both ends are on one.
SILENCE = "ROPEBRIDGE_SILENCE"

# Longer than what is said: a scenario with its traces is the most.
_MOST_BYTES = 1 << 26
_PROBES = 3


class KeeperLine:
    """One end of the line, which closes it.

    Args:
        connection: A connected socket.
        silence_s: How long the other machine may answer nothing, seconds; 0 if it is this one.
    """

    def __init__(self, connection: socket.socket, silence_s: float) -> None:
        self._connection = connection
        self._words = connection.makefile("rb")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if silence_s:
            _probe(connection, silence_s)

    def say(self, **words: Any) -> None:
        """Say something; where the line is gone, who hears it knows."""
        with suppress(OSError):
            self._connection.sendall(json.dumps(words).encode() + b"\n")

    def hear(self) -> dict[str, Any] | None:
        """Return the next thing that is said; None if the line is gone, or nobody speaks this language there."""
        try:
            said = json.loads(self._words.readline(_MOST_BYTES))
        except (OSError, ValueError):
            return None
        return said if isinstance(said, dict) else None

    def is_gone(self) -> bool:
        """Return whether the other end is, where it has nothing to say for now."""
        try:
            return self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while (said := self.hear()) is not None:
            yield said

    def close(self) -> None:
        """End the line, also for a thread that listens."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def _probe(connection: socket.socket, silence_s: float) -> None:
    """Have the kernel ask the other machine for signs of life."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform != "linux":
        return
    every_s = max(1, round(silence_s / (_PROBES + 1)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * silence_s))
