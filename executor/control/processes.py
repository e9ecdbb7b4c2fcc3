"""The state of all ranks' processes, as the launcher knows it: which run, which are lost, why a process has failed."""

import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from executor.control.control_server import ControlServer, Peer
from executor.core.control_channel import Message
from executor.core.failures import RankFailure, rank_name
from executor.core.hosts import Hosts
from executor.core.timeouts import timeouts
from planner.scenario.faults import Absence
from traces.common.errors import RunError

# The run ends if this many successive processes of a rank die soon after their start.
_MAX_EARLY_DEATHS = 3


@dataclass(eq=False, slots=True)
class RankState:
    """State of a rank's current process or, if the rank has none, of its next process.

    Attributes:
        incarnation: How many processes this rank had before.
        is_running: Whether the agent was told to start the process, and has not reported its end.
        has_ended: Whether the process has ended with status 0; its last messages may not have arrived yet.
        is_ready: Whether the process can join a session.
        peer: The process's connection to the control server; None if there is none.
        started_s: Monotonic time at which the agent was told to start the process.
        early_deaths: How many successive processes of the rank died soon after their start.
        has_sent_files: Whether the rank has sent all its files.
    """

    incarnation: int = 0
    is_running: bool = False
    has_ended: bool = False
    is_ready: bool = False
    peer: Peer | None = None
    started_s: float = 0.0
    early_deaths: int = 0
    has_sent_files: bool = False


@dataclass(eq=False)
class RankProcesses:
    """Has agents start a process for each rank, and replace lost processes if the run survives their loss.

    Args:
        devices: The names of the devices in rank order.
        hosts: The hosts of the job; None if this host has all ranks.
        documents: The job's documents, for agents of other hosts.
        absences: The absences of devices in the scenario.
        replaces: Whether the run survives the loss of ranks.

    Attributes:
        ranks: State of each rank's process.
        lost: Ranks whose process was lost, until they join the next session.
        due_s: Monotonic time at which the run ends with the failures reported so far; an earlier report of another
            failure may give their cause.
        origin_s: Monotonic time of second 0 of the run; None before the ranks have agreed on it.
        is_finished: Whether all steps are done, so that processes may end.
    """

    _devices: Sequence[str]
    _hosts: Hosts | None
    _server: ControlServer
    _documents: Mapping[str, Any]
    _absences: Sequence[Absence]
    _replaces: bool

    def __post_init__(self) -> None:
        self.ranks = [RankState() for _ in self._devices]
        self._agents: dict[str, Peer] = {}
        # Monotonic time at which the agent of a host was lost.
        self._left_s: dict[str, float] = {}
        self._are_started = False
        self._failures: list[RankFailure] = []
        self.lost: set[int] = set()
        self.due_s = math.inf
        self.origin_s: float | None = None
        self.is_finished = False

    # --- names and hosts of ranks ---

    def name(self, rank: int) -> str:
        """Return the name of a rank for messages: its number, device and host."""
        if self._hosts is None:
            return rank_name(rank, self._devices[rank])
        return f"rank {rank} (device '{self._devices[rank]}', host {self._hosts.host_of(rank)})"

    def _host_of(self, rank: int) -> str:
        return "" if self._hosts is None else self._hosts.host_of(rank)

    def _ranks_of(self, host: str) -> list[int]:
        return [rank for rank in range(len(self._devices)) if self._host_of(rank) == host]

    # --- agents ---

    @property
    def missing_hosts(self) -> list[str]:
        """The names of the hosts whose agents are not connected."""
        return [] if self._hosts is None else [part.name for part in self._hosts.parts if part.name not in self._agents]

    @property
    def agents(self) -> list[Peer]:
        """The connections of all agents."""
        return list(self._agents.values())

    def greet(self, agent: Peer) -> None:
        """Register an agent that has connected; if its host had one, the earlier agent counts as lost."""
        if (before := self._agents.get(agent.host)) is not None:
            self._server.drop(before)
            self.lose_agent(before)
        self._agents[agent.host] = agent
        is_own = self._hosts is None or agent.host == self._hosts.head
        own = {"ranks": self._ranks_of(agent.host), "count": len(self._devices)}
        fields = own if is_own else {"documents": self._documents}
        self._server.send(agent, "welcome", replaces=self._replaces, **fields)
        if self._are_started:
            for rank in self._ranks_of(agent.host):
                self._start(rank)

    def adopt(self, agent: Peer) -> None:
        """Register an agent that has kept the processes of its ranks since an earlier launcher ended."""
        self._agents[agent.host] = agent
        self._are_started = True
        for rank in self._ranks_of(agent.host):
            self.ranks[rank].is_running, self.ranks[rank].started_s = True, time.monotonic()

    def lose_agent(self, agent: Peer) -> None:
        """Register the loss of an agent and, with it, of the processes on its host."""
        if self._agents.get(agent.host) is not agent:
            return
        del self._agents[agent.host]
        self._left_s[agent.host] = time.monotonic()
        for rank in self._ranks_of(agent.host):
            if self.ranks[rank].is_running:
                self._end(rank)
                self._lose(rank)

    def start_all(self) -> None:
        """Have all agents start the processes of their ranks."""
        self._are_started = True
        for rank in range(len(self._devices)):
            self._start(rank)

    def signal(self, rank: int, number: int) -> None:
        """Have the agent of a rank's host send the rank's process the signal with this number."""
        if (agent := self._agents.get(self._host_of(rank))) is not None:
            self._server.send(agent, "signal", rank=rank, number=number)

    def _start(self, rank: int) -> None:
        state, agent = self.ranks[rank], self._agents.get(self._host_of(rank))
        if agent is not None and not self.is_finished:
            state.is_running, state.started_s = True, time.monotonic()
            self._server.send(agent, "start", rank=rank, incarnation=state.incarnation)

    # --- processes of ranks ---

    def connect(self, peer: Peer) -> bool:
        """Register the connection of a rank, and return True; close it and return False if its process is outdated."""
        state = self.ranks[peer.rank]
        if not state.is_running or state.incarnation != peer.incarnation:
            self._server.drop(peer)
            return False
        state.peer = peer
        return True

    def disconnect(self, peer: Peer) -> None:
        """Register the end of a rank's connection."""
        if self.is_current(peer):
            self.ranks[peer.rank].peer = None

    def is_current(self, peer: Peer) -> bool:
        """Return whether a connection is that of a rank's current process."""
        return self.ranks[peer.rank].peer is peer

    def peers(self, ranks: Iterable[int]) -> list[Peer]:
        """Return the connections of those of the given ranks that are connected."""
        return [peer for rank in ranks if (peer := self.ranks[rank].peer) is not None]

    def all_peers(self) -> list[Peer]:
        """Return the connections of all ranks."""
        return self.peers(range(len(self.ranks)))

    def end(self, agent: Peer, message: Message) -> None:
        """Handle an agent's message ``ended`` about a rank's process.

        Raises:
            RunError, InputError: The run cannot continue without the process.
            ValueError: The rank is not on the agent's host.
        """
        rank, status = message["rank"], message["status"]
        if type(rank) is not int or rank not in self._ranks_of(agent.host):
            raise ValueError(f"host '{agent.host}' has no rank {rank}")
        state = self.ranks[rank]
        if not state.is_running or state.incarnation != message["incarnation"]:
            return
        if status == 0:
            state.is_running, state.has_ended = False, True
            return
        self._end(rank)
        if status < 0 and self._replaces:
            self._count_death(rank, status)
            self._lose(rank)
            self._start(rank)
        elif message["failure"] is not None:
            self._fail(RankFailure(**message["failure"]))
        elif message["stuck"]:
            self._fail(RankFailure(f"{self.name(rank)}: {message['stuck']}"))
        else:
            self._fail(RankFailure.of_exit(self.name(rank), status, message["printed"]))

    def _count_death(self, rank: int, status: int) -> None:
        state = self.ranks[rank]
        is_early = time.monotonic() - state.started_s < timeouts().early_death_s
        state.early_deaths = state.early_deaths + 1 if is_early else 0
        if state.early_deaths >= _MAX_EARLY_DEATHS:
            failure = RankFailure.of_exit(self.name(rank), status, "")
            raise RunError(
                f"{failure.message}, as were the two processes of this rank before; each died within "
                f"{timeouts().early_death_s:.0f} s of its start"
            )

    def _end(self, rank: int) -> None:
        state = self.ranks[rank]
        state.is_running = state.is_ready = False
        state.peer = None

    def _lose(self, rank: int) -> None:
        """Mark a rank as lost, since its process has ended without a message."""
        self.ranks[rank].incarnation += 1
        self.lost.add(rank)
        if not self._replaces and not self.is_finished:
            message = f"{self.name(rank)} is lost, or its host cannot be reached; use '--backup-every' to survive this"
            self._fail(RankFailure(message, follows=1), at_once=False)

    # --- why the run cannot go on ---

    def _fail(self, failure: RankFailure, *, at_once: bool = True) -> None:
        self._failures.append(failure)
        if failure.explains and at_once:
            raise failure.to_error()
        self.due_s = min(self.due_s, time.monotonic() + timeouts().explanation_s)

    def raise_due(self) -> None:
        """Raise the reported failure that is closest to the cause, if the time for further reports is over."""
        if time.monotonic() >= self.due_s:
            raise min(self._failures, key=lambda failure: failure.follows).to_error()

    # --- who is there ---

    def has_brought_files(self, rank: int) -> bool:
        """Return whether a rank's files are on this host, or will not arrive since its process has ended."""
        state = self.ranks[rank]
        is_local = self._hosts is None or rank in self._hosts.local_ranks
        return is_local or state.has_sent_files or not (state.is_running or state.peer is not None)

    def missing_files(self, ranks: Iterable[int]) -> list[str]:
        """Return the names of the ranks on other hosts that have not sent all their files."""
        if self._hosts is None:
            return []
        remote = (rank for rank in ranks if rank not in self._hosts.local_ranks)
        return [self.name(rank) for rank in remote if not self.ranks[rank].has_sent_files]

    def has_returned(self, rank: int) -> bool:
        """Return whether a rank can join a session: its process is ready, and the scenario has no absence of it now."""
        return self.ranks[rank].is_ready and self.away_until_s(rank) is None

    def is_gone(self, rank: int) -> bool:
        """Return whether a rank never returns, by the scenario or since its host has been away longer than allowed."""
        host = self._host_of(rank)
        since_s = math.inf if self._hosts is None or host in self._agents else self._left_s.get(host, math.inf)
        is_late = self._hosts is not None and time.monotonic() - since_s > self._hosts.arrival_s
        return is_late or self.away_until_s(rank) == math.inf

    def absent(self, ranks: Collection[int]) -> list[str]:
        """Return the devices, sorted by name, of those ranks outside ``ranks`` that cannot join a session."""
        others = (rank for rank in range(len(self._devices)) if rank not in ranks)
        return sorted(self._devices[rank] for rank in others if not self.has_returned(rank))

    def away_until_s(self, rank: int) -> float | None:
        """Return the run second at which the present absence of a rank's device ends; None if it is not absent."""
        if self.origin_s is None:
            return None
        now_s, device = time.monotonic() - self.origin_s, self._devices[rank]
        own = (each for each in self._absences if each.device == device)
        return next((each.end_s for each in own if each.start_s <= now_s < each.end_s), None)
