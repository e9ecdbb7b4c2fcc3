"""The agent of a job of several machines, on the head: keepers of all ranks report here, and the store is here."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any, TextIO

from executor.control.agent_server import AgentServer, RankExit
from executor.control.coordinator import Coordinator
from executor.control.processes import run_ranks
from executor.core.control_store import announce_store, collect, reach_control_store
from executor.core.failures import RankFailure, is_explained
from executor.core.hosts import Hosts
from executor.core.job import JobFolder
from executor.rank.handshake import Job
from traces.common.errors import RunError

# After the first rank that fails others may say why it did.
_VERDICT_S = 2.0
# Ranks of other machines that have handed everything over still have to end.
_GRACE_S = 10.0
_PAUSE_S = 0.1


class _DeafError(RunError):
    """The head cannot listen."""


class Head:
    """Runs the ranks of this machine, and steers those of all.

    Args:
        job: Its folder.
        hosts: Of the job.
        devices: In rank order.
        outbound: To the launcher.
        inbound: From it.
    """

    def __init__(self, job: JobFolder, hosts: Hosts, devices: Sequence[str], outbound: TextIO, inbound: TextIO) -> None:
        self._job = job
        self._hosts = hosts
        self._devices = devices
        self._pipes = outbound, inbound
        self._lost: list[int] = []

    def run(self) -> int:
        """Run the job to its end; return the exit status."""
        try:
            return self._open_and_run()
        except _DeafError as error:
            self._job.run_failure.write_text(str(error))
            return 1

    def _open_and_run(self) -> int:
        hosts, given = self._hosts, self._job.read()
        recovers = given[2].backup_every > 0
        store = hosts.address, hosts.port + 1
        with self._listening():
            keepers = AgentServer(
                (hosts.address, hosts.port),
                len(self._devices),
                welcome={"store_port": store[1], "job": self._job.documents()},
                silence_s=hosts.silence_s,
                job=hosts.job,
                ended=self._hear_end,
                lost=(lambda _: None) if recovers else self._lose,
            )
        status = 1
        try:
            status = self._run(given, keepers, keepers if recovers else None, store)
        finally:
            keepers.dismiss(status)
        return status

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Around what opens sockets that others reach."""
        try:
            yield
        except OSError as error:
            hosts = self._hosts
            raise _DeafError(
                f"the head cannot listen at {hosts.address}, ports {hosts.port} and {hosts.port + 1}: "
                f"{error.strerror or error}; correct its 'address' or 'port' in hosts.yaml, or end what has them"
            ) from error

    def _run(self, given: Job, keepers: AgentServer, replaced: AgentServer | None, store: tuple[str, int]) -> int:
        hosts, (scenario, plan, orders) = self._hosts, given
        with self._listening():
            coordinator = Coordinator(store, scenario, plan, self._devices, orders, *self._pipes, replaced, self.fail)
        announce_store(*store)
        threading.Thread(target=partial(self._await_all, keepers), name="arrivals", daemon=True).start()
        # A head that only steers has none.
        own, ranks = hosts.local_ranks, hosts.rank_count
        if own and (failed := run_ranks(self._job, "executor.control.keeper", own, ranks, {})):
            self._await_explanation()
            # What they left says more than their status.
            self._job.failure.write_text(json.dumps({rank: max(code, 1) for rank, code in failed.items()}))
            return 1
        reached, missed = reach_control_store(store), []
        for rank in sorted(set(coordinator.finish()) - set(hosts.local_ranks)):
            if not collect(reached, self._job, rank, partial(keepers.has, rank)):
                missed.append(self._name(rank))
        keepers.await_ends(_GRACE_S)
        if missed:
            self._job.run_failure.write_text(
                f"{', '.join(missed)} was lost after the last step, and with it what it had to hand over; a job with "
                "'--checkpoint' can be taken up again"
            )
        return 1 if missed else 0

    def fail(self, reason: str) -> None:
        """Have the launcher hear why the run cannot go on, and end."""
        if not self._job.run_failure.exists():
            self._job.run_failure.write_text(reason)
        os.kill(os.getpid(), signal.SIGTERM)

    def _await_explanation(self) -> None:
        """Where ranks of this machine have only lost others, hear of these."""
        until_s = time.monotonic() + _VERDICT_S
        while not is_explained(self._job, len(self._devices)) and time.monotonic() < until_s:
            if self._lost and not self._job.run_failure.exists():
                self._job.run_failure.write_text(self._loss())
            time.sleep(_PAUSE_S)

    def _await_all(self, keepers: AgentServer) -> None:
        missing = keepers.await_all(range(len(self._devices)), self._hosts.arrival_s)
        if missing:
            names = sorted({self._hosts.host_of(rank) for rank in missing})
            self.fail(
                f"after {self._hosts.arrival_s:.0f} s nobody has come from {', '.join(names)}: start the job there, "
                f"and let it reach {self._hosts.address}, ports {self._hosts.port} and {self._hosts.port + 1}"
            )

    def _lose(self, departure: RankExit) -> None:
        """A rank is gone without a word: because another one of its machine has failed, or for no reason of ours."""
        self._lost.append(departure.rank)
        verdict = threading.Timer(_VERDICT_S, self._end_without_lost)
        # A run that has come to its end meanwhile has all it needs.
        verdict.daemon = True
        verdict.start()

    def _end_without_lost(self) -> None:
        if not is_explained(self._job, len(self._devices)):
            self.fail(self._loss())

    def _loss(self) -> str:
        return f"{self._name(self._lost[0])} is lost, or its machine is out of reach; '--backup-every' outlives that"

    def _hear_end(self, rank: int, said: dict[str, Any]) -> None:
        """A rank's process has ended by itself."""
        if not said["status"]:
            return
        error, path = said["error"] or {}, self._job.error(rank)
        if not path.exists():
            words = error if "message" in error else asdict(self._printed(rank, said["status"], error))
            # Clocks of several machines say nothing of who was first; when they were heard does.
            path.write_text(json.dumps({**words, "time_s": time.monotonic()}))
        threading.Timer(_VERDICT_S, os.kill, (os.getpid(), signal.SIGTERM)).start()

    def _printed(self, rank: int, status: int, error: dict[str, Any]) -> RankFailure:
        lines = error.get("printed", "").strip().splitlines()
        message = f"{self._name(rank)} ended with status {status}: {' | '.join(lines[-3:]) or 'no message'}"
        return RankFailure(0.0, message, follows=1, wrong_input=False, trace="\n".join(lines))

    def _name(self, rank: int) -> str:
        return f"rank {rank} (device '{self._devices[rank]}', host {self._hosts.host_of(rank)})"
