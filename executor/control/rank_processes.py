"""Which processes of the ranks are there, as the coordinator knows it: who is lost, who has come instead."""

import math
import time
from collections.abc import Collection, Sequence

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from executor.control.agent_server import AgentServer
from executor.core.control_store import invitation_key, ready_key
from traces.common.errors import RunError

_PAUSE_S = 0.002


class RankProcesses:
    """A process of each rank at a time; the keepers start another one where one is gone.

    Args:
        store: Of the job.
        devices: In rank order.
        keepers: Tell which processes are gone; None in a run that ends with the first of them.
    """

    def __init__(self, store: TCPStore, devices: Sequence[str], keepers: AgentServer | None) -> None:
        self._store = store
        self._devices = devices
        self._keepers = keepers
        self._incarnations = dict.fromkeys(range(len(devices)), 0)
        self._lost: set[int] = set()

    @property
    def are_replaced(self) -> bool:
        """Whether the run goes on when one is lost."""
        return self._keepers is not None

    @property
    def lost(self) -> frozenset[int]:
        """Ranks whose processes are gone, and others not yet taken in."""
        return frozenset(self._lost)

    def take_in(self, ranks: Collection[int]) -> None:
        """Take note that these belong to a generation: none of them is lost any more."""
        self._lost -= set(ranks)

    @property
    def lost_names(self) -> str:
        """The devices of those that are lost, for people."""
        return ", ".join(self._devices[rank] for rank in sorted(self._lost))

    def hear(self) -> set[int]:
        """Take note of processes that are gone; return the ranks of those that are news."""
        news = set()
        for departure in self._keepers.heard() if self._keepers is not None else ():
            self._incarnations[departure.rank] = departure.incarnation + 1
            news.add(departure.rank)
        self._lost |= news
        return news

    def absent(self, ranks: Collection[int]) -> list[str]:
        """Return the devices of all ranks besides these that have no process which waits to be invited."""
        others = (rank for rank in range(len(self._devices)) if rank not in ranks)
        return sorted(self._devices[rank] for rank in others if not self.has_returned(rank))

    def has_returned(self, rank: int) -> bool:
        """Return whether there is a process that can take the place of one that has gone."""
        ready = ready_key(rank, self._incarnations[rank])
        return self._away_until_s(rank) is None and bool(self._store.check([ready]))

    def await_all(self, ranks: Collection[int]) -> None:
        """Wait for processes that can take the places of those that have gone.

        Raises:
            RunError: The scenario has one of them leave for ever.
        """
        while missing := [rank for rank in ranks if not self.has_returned(rank)]:
            for rank in missing:
                if self._away_until_s(rank) == math.inf:
                    raise RunError(f"device '{self._devices[rank]}' never returns, and no policy goes on without it")
            self.hear()
            time.sleep(_PAUSE_S)

    def invite(self, ranks: Collection[int], generation: int) -> None:
        """Tell processes that wait for it to which generation they belong."""
        for rank in ranks:
            self._store.set(invitation_key(rank, self._incarnations[rank]), str(generation))

    def _away_until_s(self, rank: int) -> float | None:
        assert self._keepers is not None, "without keepers no rank is ever missed"
        return self._keepers.away_until_s(rank)
