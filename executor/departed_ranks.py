"""Where the agent hears from the keepers of the ranks (executor/keeper.py) that a process is gone."""

import os
import queue
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

from executor.keeper import AGENT_ADDRESS


@dataclass(frozen=True, slots=True)
class Departure:
    """A rank's process that is gone.

    Attributes:
        rank: Of the job.
        incarnation: Which process of this rank it was, from 0.
    """

    rank: int
    incarnation: int


class DepartedRanks:
    """Listens to the keepers; each tells by a line of its connection, in the order in which processes go.

    Args:
        host: Where they reach this process.
        away_until_s: Says of a rank until which second of the run its device is gone, and its new process must wait;
            None if it is there.
    """

    def __init__(self, host: str, away_until_s: Callable[[int], float | None]) -> None:
        self.away_until_s = away_until_s
        self._socket = socket.create_server((host, 0))
        self._heard: queue.SimpleQueue[Departure] = queue.SimpleQueue()
        os.environ[AGENT_ADDRESS] = f"{host}:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._accept, name="keepers", daemon=True).start()

    def heard(self) -> list[Departure]:
        """Return those of which nobody has been told yet."""
        found = []
        while not self._heard.empty():
            found.append(self._heard.get())
        return found

    def _accept(self) -> None:
        while True:
            line, _ = self._socket.accept()
            threading.Thread(target=self._listen, args=(line,), name="keeper", daemon=True).start()

    def _listen(self, line: socket.socket) -> None:
        with line, line.makefile() as words:
            for said in words:
                self._heard.put(Departure(*map(int, said.split())))
