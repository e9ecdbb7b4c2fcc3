"""Where the agent hears from the keepers of the ranks (executor/control/keeper.py) what becomes of their processes."""

import os
import queue
import socket
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from executor.core.clock_sync import answer_clock
from executor.core.control_store import listen
from executor.core.json_lines import AGENT_ADDRESS, JOB, SILENCE, KeeperLine

# Between two looks at whether those who wait are still there.
_LOOK_S = 0.5

NOTHING: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class RankExit:
    """A rank's process that is gone.

    Attributes:
        rank: Of the job.
        incarnation: Which process of this rank it was, from 0.
    """

    rank: int
    incarnation: int


class AgentServer:
    """Listens to the keepers; each has a line of its own. A line that is gone takes the rank's process with it.

    Args:
        address: Where they reach this process, and to which alone it binds: host and port; 0 for any.
        ranks: Of the job.
        away_until_s: Says of a rank until which second of the run its device is gone, and its new process must wait;
            None if it is there.
        welcome: What keepers of other machines need to know besides: ``store_port``, of the store of the job, on this
            machine; ``job``, the documents of its folder.
        silence_s: How long a machine may answer nothing, seconds; 0 where all are on this one.
        ended: Called with a rank and what it said when its process ends by itself.
        lost: Called with each departure as soon as it is known.
        job: Which it is; keepers of others are sent away.
    """

    def __init__(
        self,
        address: tuple[str, int],
        ranks: int,
        away_until_s: Callable[[int], float | None] = lambda _: None,
        welcome: Mapping[str, Any] = NOTHING,
        silence_s: float = 0.0,
        ended: Callable[[int, dict[str, Any]], None] = lambda *_: None,
        lost: Callable[[RankExit], None] = lambda _: None,
        job: str = "",
    ) -> None:
        self.away_until_s = away_until_s
        self._welcome = welcome
        self._ranks = ranks
        self._job = job
        self._silence_s = silence_s
        self._ended = ended
        self._lost = lost
        self._socket = listen(address)
        self._departures: queue.SimpleQueue[RankExit] = queue.SimpleQueue()
        self._lines: dict[int, KeeperLine] = {}
        # Which process of a rank is, or will be, there.
        self._incarnations: dict[int, int] = {}
        self._changed = threading.Condition()
        self._are_let_go = False
        host, port, *_ = self._socket.getsockname()
        os.environ[AGENT_ADDRESS] = f"{host}:{port}"
        os.environ[SILENCE] = str(silence_s)
        os.environ[JOB] = job
        threading.Thread(target=self._accept, name="keepers", daemon=True).start()

    def heard(self) -> list[RankExit]:
        """Return the departures of which nobody has been told yet."""
        found = []
        while not self._departures.empty():
            found.append(self._departures.get())
        return found

    def await_all(self, ranks: Collection[int], patience_s: float) -> list[int]:
        """Wait until the keepers of all ranks are there, and let them start their processes.

        Returns:
            The ranks that have not come; then none is let go.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._missing(ranks) == [], patience_s)
            missing = self._missing(ranks)
            if not missing:
                self.let_go()
            return missing

    def await_ends(self, patience_s: float) -> None:
        """Wait until no keeper is there any more."""
        with self._changed:
            self._changed.wait_for(lambda: not self._lines, patience_s)

    def let_go(self) -> None:
        """Let keepers start their processes as they come."""
        with self._changed:
            self._are_let_go = True
            self._changed.notify_all()

    def _missing(self, ranks: Collection[int]) -> list[int]:
        return sorted(set(ranks) - set(self._lines))

    def _accept(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            threading.Thread(target=self._listen, args=(connection,), name="keeper", daemon=True).start()

    def _listen(self, connection: socket.socket) -> None:
        line = KeeperLine(connection, self._silence_s)
        hello = line.hear() or {}
        if hello.get("clock"):
            line.say(clock=True)
            answer_clock(connection)
        rank = hello.get("rank")
        if isinstance(rank, int) and 0 <= rank < self._ranks and hello.get("job") == self._job:
            self._attend(rank, line)
        elif "rank" in hello:
            # Who waits for another job's head has come to the wrong one, and may try again.
            line.say(stranger=True)
        line.close()

    def has(self, rank: int) -> bool:
        """Return whether the keeper of a rank is there, and its process has not ended."""
        with self._changed:
            return rank in self._lines

    def dismiss(self, status: int) -> None:
        """Tell all keepers that the job is over, with the exit status of the head."""
        with self._changed:
            for line in self._lines.values():
                line.say(over=True, status=status)

    def _attend(self, rank: int, line: KeeperLine) -> None:
        """Hear a rank's keeper to its end."""
        with self._changed:
            if (before := self._lines.pop(rank, None)) is not None:
                # Its machine has come back before anybody noticed that it was gone.
                before.close()
                if self._are_let_go:
                    self._depart(rank)
            self._lines[rank] = line
            self._changed.notify_all()
            while not self._are_let_go:
                self._changed.wait(_LOOK_S)
                if line.is_gone():
                    # It was never there.
                    if self._lines.get(rank) is line:
                        del self._lines[rank]
                    return
        is_over = False
        line.say(incarnation=self._incarnations.setdefault(rank, 0), **self._welcome)
        for said in line:
            if "gone" in said:
                with self._changed:
                    self._depart(rank)
            else:
                is_over = True
                self._ended(rank, said)
        with self._changed:
            if self._lines.get(rank) is line:
                del self._lines[rank]
                if not is_over:
                    self._depart(rank)
                self._changed.notify_all()

    def _depart(self, rank: int) -> None:
        departure = RankExit(rank, self._incarnations.setdefault(rank, 0))
        self._incarnations[rank] += 1
        self._departures.put(departure)
        self._lost(departure)
