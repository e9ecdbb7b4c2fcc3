"""Steers the processes of a job, in its launcher: what ranks and agents say comes in, what they must do goes out.

The ranks publish what happened in a finished step; from that the policy decides what step k + `DECISION_LAG_STEPS`
runs, and the ranks are told. Where ranks are lost, their session ends, the newest step is found of which those that are
left have everything, and another session begins from there: with the plan that the policy answers, or with the old one
when a new process has come for each that is gone. Where a plan has a device that has come back, the session ends with
the step before, and the next one has that device's process too.
"""

import heapq
import math
import queue
import secrets
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from executor.control.control_server import ControlServer, Peer
from executor.control.policy_driver import PolicyDriver
from executor.control.processes import RankProcesses
from executor.core.control_channel import AGENT, Message
from executor.core.hosts import Hosts
from executor.core.job import JobFolder
from executor.core.messages import NewPlan, SessionSpec
from executor.core.timeouts import timeouts
from executor.rank.handshake import Agreements, Disagreement
from executor.recovery.backups import Copies, missing_layers, newest_complete, restoring_moves
from planner.adapt.policy import DECISION_LAG_STEPS
from planner.plan.plan import Plan
from planner.scenario.faults import Absence, Hang
from traces.common.errors import RunError

# Longest wait for an event; nothing depends on it.
_MAX_PAUSE_S = 3600.0


class Coordinator:
    """Runs one job, from the start of its processes to their end.

    Args:
        devices: The names of the devices in rank order.
        hosts: The hosts of the job; None if this one has all ranks.
        driver: Asks the policy; None in a job that is not steered.
    """

    def __init__(
        self,
        job: JobFolder,
        devices: Sequence[str],
        hosts: Hosts | None,
        server: ControlServer,
        driver: PolicyDriver | None,
    ) -> None:
        self._scenario, self._plan, self._config = job.read()
        self._devices = devices
        self._hosts = hosts
        self._server = server
        self._driver = driver
        self._recovers = self._config.backup_every > 0
        absences = [fault for fault in self._scenario.faults if isinstance(fault, Absence)] if self._recovers else []
        documents = job.documents() if hosts is not None else {}
        self._processes = RankProcesses(devices, hosts, server, documents, absences, replaces=self._recovers)
        self._processes.greet(server.own_agent)
        self._agreements = Agreements(self._answer)
        self._heard: dict[str, tuple[float, str]] = {}
        # When a signal goes to which rank, by the monotonic clock, and its number: 0 sends none.
        self._signals: list[tuple[float, int, int]] = []
        self._values: dict[str, str] = {}
        self._local_delivery_s = 0.0
        # Of the session that is under way.
        run = self._config
        self._session = SessionSpec.of_run(self._plan, len(devices), run.first_step, run.steps, _token())
        self._step = run.first_step
        self._published: defaultdict[int, dict[int, dict[str, Any]]] = defaultdict(dict)
        self._publications: defaultdict[int, int] = defaultdict(int)
        self._reports: dict[int, dict[str, Any]] = {}
        self._done: set[int] = set()
        self._trouble_due_s = math.inf
        # The step before which ranks join that the session does not have, and which.
        self._joining: tuple[int, frozenset[int]] | None = None
        self._durable = run.first_step

    def run(self) -> None:
        """Run the job to its end.

        Raises:
            InputError: A rank found the input wrong.
            RunError: A rank failed, or the run cannot go on.
        """
        self._await_hosts()
        self._processes.start_all()
        if self._driver is not None:
            if self._recovers:
                self._wait(lambda: all(map(self._processes.has_returned, self._session.ranks)))
                self._begin(self._session)
            while not self._follow_session():
                self._regroup()
        self._processes.is_finished = True
        self._server.send(self._processes.all_peers(), "finished")
        ranks = self._session.ranks
        self._wait(lambda: all(map(self._processes.has_brought_files, ranks)))
        until_s = time.monotonic() + timeouts().host_exit_s if self._hosts is not None else math.inf
        self._wait(lambda: not any(state.is_running for state in self._processes.ranks), until_s=until_s)
        if missed := self._processes.missing_files(ranks):
            raise RunError(
                f"{', '.join(missed)} was lost after the last step, and with it what it had to bring; a job with "
                "'--checkpoint' can be resumed"
            )

    def dismiss(self, status: int, reason: str = "") -> None:
        """Tell all agents that the job is over, so that they end what is left of it."""
        self._server.send(self._processes.agents, "over", status=status, reason=reason)

    # --- events ---

    def _wait(self, condition: Callable[[], bool], *, in_session: bool = False, until_s: float = math.inf) -> bool:
        """Handle events until a condition holds; return whether it does.

        It does not where ``until_s``, by the monotonic clock, comes first, or ``in_session`` the loss of a rank or of a
        connection of the session.
        """
        while not condition():
            now_s = time.monotonic()
            if now_s >= until_s:
                return False
            if in_session and (self._processes.lost & set(self._session.ranks) or now_s >= self._trouble_due_s):
                return False
            self._handle_next(min(until_s, self._trouble_due_s if in_session else math.inf))
        return True

    def _handle_next(self, until_s: float) -> None:
        signal_s = self._signals[0][0] if self._signals else math.inf
        pause_s = min(until_s, signal_s, self._processes.due_s, self._agreements.due_s) - time.monotonic()
        try:
            peer, message = self._server.events.get(timeout=max(0.0, min(pause_s, _MAX_PAUSE_S)))
        except queue.Empty:
            pass
        else:
            self._handle(peer, message)
        while self._signals and self._signals[0][0] <= time.monotonic():
            _, rank, number = heapq.heappop(self._signals)
            if number:
                self._processes.signal(rank, number)
        self._agreements.give_up_late()
        self._processes.raise_due()

    def _handle(self, peer: Peer, message: Message | None) -> None:
        try:
            if peer.role == AGENT:
                self._hear_agent(peer, message)
            elif message is not None:
                self._hear_rank(peer, message)
            else:
                self._processes.disconnect(peer)
                self._check_end(peer.rank)
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            speaker = f"host '{peer.host}'" if peer.role == AGENT else self._processes.name(peer.rank)
            raise RunError(f"{speaker} has sent a malformed message: {type(error).__name__}: {error}") from error

    def _hear_agent(self, agent: Peer, message: Message | None) -> None:
        if message is None:
            if agent is self._server.own_agent:
                raise RunError("the agent of this host has ended")
            self._processes.lose_agent(agent)
        elif message["kind"] == "hello":
            self._processes.greet(agent)
        elif message["kind"] == "ended":
            self._processes.end(agent, message)
            self._agreements.forget(message["rank"])
            self._check_end(message["rank"])
        elif message["kind"] == "failed":
            raise RunError(str(message["reason"]))

    def _hear_rank(self, peer: Peer, message: Message) -> None:
        rank, kind = peer.rank, message["kind"]
        if kind == "hello":
            if self._processes.connect(peer):
                for key, value in self._values.items():
                    self._server.send(peer, "store", key=key, value=value)
            return
        if not self._processes.is_current(peer):
            return
        is_current = message.get("session") == self._session.number
        if kind == "agree":
            self._agreements.state(rank, message)
        elif kind == "store":
            self._values[message["key"]] = message["value"]
            self._server.send(self._processes.all_peers(), "store", key=message["key"], value=message["value"])
        elif kind == "ready":
            self._processes.ranks[rank].is_ready = True
        elif kind == "origin":
            self._local_delivery_s = float(message["local_delivery_s"])
            self._start_run(float(message["origin_s"]))
        elif kind == "step" and is_current:
            self._published[int(message["step"])][rank] = message["part"]
            self._publications[rank] += 1
        elif kind == "trouble" and is_current:
            self._trouble_due_s = min(self._trouble_due_s, time.monotonic() + timeouts().trouble_s)
        elif kind == "report" and is_current:
            self._reports[rank] = message
        elif kind == "done" and is_current:
            self._done.add(rank)
        elif kind == "files-sent":
            self._processes.ranks[rank].has_sent_files = True

    def _check_end(self, rank: int) -> None:
        """Refuse that a process ends by itself before the run does."""
        state, steps = self._processes.ranks[rank], self._config.steps - self._config.first_step
        # All that it has said was heard when its connection has ended too.
        has_left = state.has_ended and state.peer is None and not self._processes.is_finished
        if self._driver is not None and has_left and (self._recovers or self._publications[rank] < steps):
            raise RunError(f"{self._processes.name(rank)} ended before the run did")

    def _answer(self, rank: int, topic: str, outcome: Disagreement | None) -> None:
        """Tell a rank what has become of a topic; all hear the same time and token, as of the first of them."""
        now_s, token = self._heard.setdefault(topic, (time.monotonic(), _token()))
        fields = {"topic": topic, "now_s": now_s, "token": token}
        error, wrong_input = (None, False) if outcome is None else (outcome.message, outcome.wrong_input)
        self._server.send(self._processes.peers([rank]), "agreed", error=error, wrong_input=wrong_input, **fields)

    def _start_run(self, origin_s: float) -> None:
        """Take note of second 0 of the run, from which on the scenario's faults are carried out."""
        self._processes.origin_s = origin_s
        if not self._recovers:
            return
        for fault in self._scenario.faults:
            if not isinstance(fault, Absence | Hang) or fault.device not in self._devices:
                continue
            # At the end of an absence nothing is sent; but who is back may be what somebody waits for.
            first, last = (signal.SIGKILL, 0) if isinstance(fault, Absence) else (signal.SIGSTOP, signal.SIGCONT)
            for time_s, number in ((fault.start_s, first), (fault.end_s, last)):
                if time_s < math.inf:
                    heapq.heappush(self._signals, (origin_s + time_s, self._devices.index(fault.device), number))

    def _await_hosts(self) -> None:
        hosts = self._hosts
        if hosts is None:
            return
        until_s = time.monotonic() + hosts.arrival_s
        if not self._wait(lambda: not self._processes.missing_hosts, until_s=until_s):
            names = ", ".join(sorted(self._processes.missing_hosts))
            raise RunError(
                f"after {hosts.arrival_s:.0f} s nobody has come from {names}: "
                f"start the job there, and let it reach {hosts.address}, port {hosts.port}"
            )

    # --- a session, step by step ---

    def _begin(self, spec: SessionSpec) -> None:
        """Begin a session: its ranks are no longer lost, and connect with each other."""
        self._processes.lost -= set(spec.ranks)
        self._session, self._durable = spec, spec.durable
        self._published.clear()
        self._reports.clear()
        self._done.clear()
        self._values.clear()
        self._trouble_due_s = math.inf
        self._server.send(self._processes.peers(spec.ranks), "begin", **spec.to_data())

    def _follow_session(self) -> bool:
        """Follow the steps of a session; return whether it has come to the end of the run."""
        assert self._driver is not None
        current = self._session
        self._step, told = current.first_step, current.first_step + len(current.plans)
        while self._step < self._config.steps:
            step = self._step
            if self._joining is not None and self._joining[0] == step:
                return False
            if not self._wait(lambda: len(self._published[self._step]) == len(current.ranks), in_session=True):
                return False
            published = self._published.pop(step)
            parts = [published[rank] for rank in current.ranks]
            # No rank goes back to before what is said here; what happened in later steps may be lost with a rank.
            kept = [part["kept"] for part in parts if part["kept"] is not None]
            self._durable = max(self._durable, min([step + 1, *kept]))
            # Whether those are still there who are about to join is asked when they do.
            there = {*current.ranks, *(self._joining[1] if self._joining is not None else ())}
            new = self._driver.finish_step(step, parts, self._processes.absent(there) if self._recovers else [])
            upcoming = step + DECISION_LAG_STEPS
            if told <= upcoming < self._config.steps and self._joining is None:
                if new is not None:
                    (new,) = self._until_others_join([new], upcoming, current.ranks)
                data = None if new is None else new.to_data()
                self._push(current.ranks, "plan", step=upcoming, new=data, durable=self._durable)
            self._step += 1
        # Until all have written down what is left, the part of a rank that is lost has to be done again.
        return not self._recovers or self._wait(lambda: self._done >= set(current.ranks), in_session=True)

    def _push(self, ranks: Collection[int], kind: str, **fields: Any) -> None:
        """Send ranks of the session a message; a new process of one that is lost does not belong to it."""
        there = [rank for rank in ranks if rank not in self._processes.lost]
        self._server.send(self._processes.peers(there), kind, **fields)

    # --- from one session to the next ---

    def _regroup(self) -> None:
        """End a session, and begin another one with those who are left, or with all."""
        self._push(self._session.ranks, "ended")
        joining = self._joining
        if self._processes.origin_s is None:
            # Nobody has trained yet: as if this session had never been.
            self._await_reports()
            self._wait(lambda: all(map(self._processes.has_returned, self._session.ranks)))
            self._begin(replace(self._session, number=self._session.number + 1, store_prefix=_token()))
            return
        unpublished: list[Any] | None = None
        while True:
            reports = self._await_reports()
            if unpublished is None:
                unpublished = [report["unpublished"] for report in reports.values()]
            spec = self._next_session(reports, unpublished, joining)
            unpublished = []
            # Somebody else may have been lost meanwhile.
            if not self._processes.lost & set(reports):
                break
        self._begin(spec)

    def _await_reports(self) -> dict[int, dict[str, Any]]:
        """Return what the ranks that are left say, by rank; of more that are lost meanwhile nothing."""

        def left() -> list[int]:
            return [rank for rank in self._session.ranks if rank not in self._processes.lost]

        self._wait(lambda: all(rank in self._reports for rank in left()))
        if not left() and self._processes.origin_s is not None:
            raise RunError("all ranks are lost")
        return {rank: self._reports[rank] for rank in left()}

    def _next_session(
        self,
        reports: dict[int, dict[str, Any]],
        unpublished: list[Any],
        joining: tuple[int, frozenset[int]] | None,
    ) -> SessionSpec:
        """Return with what those who have reported begin again, and those who join or for whom they wait."""
        assert self._driver is not None
        before, processes = self._session, self._processes
        copies = {self._devices[rank]: _copies(report) for rank, report in reports.items()}
        resumed = self._resumed(copies)
        gone = {rank for rank in before.ranks if rank not in reports}
        if joining is not None and joining[0] == resumed:
            gone |= {rank for rank in joining[1] if not processes.has_returned(rank)}
        names = sorted(self._devices[rank] for rank in gone)
        away = sorted({*names, *processes.absent(reports)})
        now_s = max(float(report["now_s"]) for report in reports.values())
        plans = self._driver.lose_devices(resumed, names, away, unpublished, now_s)[: self._config.steps - resumed]
        plan = plans[0].plan
        others = self._beyond(plan, reports)
        self._await_processes(others)
        copies |= {self._devices[rank]: {} for rank in others}
        plans[0] = NewPlan(plan, restoring_moves(plan, self._scenario, resumed, copies).moves)
        ranks = tuple(sorted({*reports, *others}))
        # Those who join begin with layers of which nobody has a second copy yet: older ones are kept until then.
        durable = min(self._durable, resumed)
        told = self._until_others_join(plans, resumed, ranks)
        origin_s = self._processes.origin_s
        return SessionSpec(before.number + 1, ranks, resumed, durable, told, _token(), origin_s, self._local_delivery_s)

    def _await_processes(self, ranks: Collection[int]) -> None:
        """Wait for processes that can take the places of those that have gone.

        Raises:
            RunError: The scenario has one of them leave for ever.
        """

        def are_there() -> bool:
            for rank in ranks:
                if self._processes.away_until_s(rank) == math.inf:
                    raise RunError(f"device '{self._devices[rank]}' never returns, and no policy goes on without it")
            return all(map(self._processes.has_returned, ranks))

        self._wait(are_there)

    def _until_others_join(self, plans: Sequence[NewPlan], first: int, ranks: Collection[int]) -> tuple[NewPlan, ...]:
        """Return those of the plans of steps from ``first`` on that a session of these ranks hears of."""
        self._joining = None
        for step, new in enumerate(plans, first):
            if beyond := self._beyond(new.plan, ranks):
                self._joining = (step, beyond)
                return (*plans[: step - first], replace(new, joins=True))
        return tuple(plans)

    def _beyond(self, plan: Plan, ranks: Collection[int]) -> frozenset[int]:
        """Return the ranks that a plan has besides these."""
        return frozenset(map(self._devices.index, plan.devices)) - frozenset(ranks)

    def _resumed(self, copies: dict[str, Copies]) -> int:
        """Return the newest step before which the state of all layers is there.

        Raises:
            RunError: Some layers are lost.
        """
        layers = len(self._scenario.model.layers)
        resumed = newest_complete(copies.values(), layers, self._step)
        if resumed is None:
            missing = ", ".join(map(str, missing_layers(copies.values(), layers, self._step)))
            lost = ", ".join(self._devices[rank] for rank in sorted(self._processes.lost))
            raise RunError(
                f"with {lost} all copies of the layers {missing} are lost: nobody that is left has their state"
            )
        return resumed


def _token() -> str:
    return secrets.token_hex(8)


def _copies(report: dict[str, Any]) -> Copies:
    return {int(step): frozenset(layers) for step, layers in report["copies"].items()}
