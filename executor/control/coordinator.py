"""The coordinator of a job, in the launcher: it handles messages of ranks and agents, and sends them instructions.

The ranks publish the event rows of each finished step. From the rows of step k the policy decides the plan of step k +
`DECISION_LAG_STEPS`, which the coordinator sends to the ranks.

A session is a set of ranks that are connected with each other. If ranks are lost, the session ends, and another one
begins from the newest step before which the remaining ranks have copies of all layers: with a new plan if the policy
returns one, otherwise with the old plan, after every lost process is replaced. If a new plan uses a device that has
returned, the session ends before the plan's first step, and the next session includes that device.
"""

import heapq
import math
import queue
import signal
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from executor.control.control_server import ControlServer, Peer
from executor.control.policy_driver import PolicyDriver
from executor.control.processes import RankProcesses
from executor.control.record.attempt_folder import AttemptFolder
from executor.control.sessions import Regrouping, SessionProgress, random_token
from executor.core.clock import read_origin
from executor.core.control_channel import AGENT, Message
from executor.core.hosts import Hosts
from executor.core.job import JobFolder
from executor.core.messages import SessionSpec
from executor.core.timeouts import timeouts
from executor.rank.handshake import Agreements, Disagreement
from planner.adapt.policy import DECISION_LAG_STEPS
from planner.scenario.faults import Absence, Hang
from traces.common.errors import RunError

# The longest wait for an event in seconds: a large number, since `queue.SimpleQueue.get` accepts no infinity.
_MAX_PAUSE_S = 3600.0


@dataclass(eq=False)
class Coordinator:
    """Runs one job, from the start of its processes to their end.

    Args:
        devices: The names of the devices in rank order.
        hosts: The hosts of the job; None if this host has all ranks.
        driver: Calls the policy; None in a job whose ranks receive no messages while they run.
        reached: The first step that an earlier launcher of the run has not finished; None if this is the first one.
    """

    _job: JobFolder
    _devices: Sequence[str]
    _hosts: Hosts | None
    _server: ControlServer
    _driver: PolicyDriver | None
    _reached: int | None = None

    def __post_init__(self) -> None:
        self._scenario, self._plan, self._config = self._job.read()
        self._recovers = self._config.backup_every > 0
        replaces = self._config.replaces
        absences = [fault for fault in self._scenario.faults if isinstance(fault, Absence)] if replaces else []
        documents = self._job.documents() if self._hosts is not None else {}
        self._processes = RankProcesses(
            self._devices,
            self._hosts,
            self._server,
            documents,
            [fault for fault in absences if fault.device in self._devices],
            replaces,
        )
        if self._reached is None:
            self._processes.greet(self._server.own_agent)
        else:
            self._processes.adopt(self._server.own_agent)
        self._agreements = Agreements(self._answer)
        self._heard: dict[str, tuple[float, str]] = {}
        # Heap of monotonic times, ranks, and numbers of signals to send at that time; number 0 sends no signal.
        self._signals: list[tuple[float, int, int]] = []
        self._values: dict[str, str] = {}
        self._local_delivery_s = 0.0
        run = self._config
        spec = SessionSpec.of_run(self._plan, len(self._devices), run, random_token())
        self._session = SessionProgress(spec, run.first_step if self._reached is None else self._reached)
        limits = (run.first_step, run.steps)
        self._regrouping = Regrouping(self._scenario, *limits, self._devices, self._processes, self._driver)

    def run(self) -> None:
        """Run the job to its end.

        Raises:
            InputError: A rank reported wrong input.
            RunError: A rank failed, or the run cannot continue.
        """
        if self._reached is None:
            self._await_hosts()
            self._processes.start_all()
        elif (origin_s := read_origin(self._job.origin)) is not None:
            self._start_run(origin_s)
        if self._driver is not None:
            if self._recovers:
                self._await_start(self._session.spec.ranks)
                self._begin(self._session.spec)
            while not self._follow_session():
                self._regroup()
        self._finish(self._session.spec.ranks)

    def _finish(self, ranks: Collection[int]) -> None:
        """Let all processes end, whose results are written; ``ranks`` are those whose files are needed."""
        self._processes.is_finished = True
        self._server.send(self._processes.all_peers(), "finished")
        self._wait(lambda: all(map(self._processes.has_brought_files, ranks)))
        until_s = time.monotonic() + timeouts().host_exit_s if self._hosts is not None else math.inf
        self._wait(lambda: not any(state.is_running for state in self._processes.ranks), until_s=until_s)
        if missed := self._processes.missing_files(ranks):
            raise RunError(
                f"{', '.join(missed)}: lost after the last step, before sending the files with its results; a job with "
                "'--checkpoint' can be resumed"
            )

    def dismiss(self, status: int, reason: str = "") -> None:
        """Send all agents the end of the job, so that they end the remaining processes."""
        self._server.send(self._processes.agents, "over", status=status, reason=reason)

    # --- events ---

    def _wait(self, condition: Callable[[], bool], *, in_session: bool = False, until_s: float = math.inf) -> bool:
        """Handle events until a condition holds, and return True; return False if the wait ends earlier.

        Args:
            condition: The condition to wait for.
            in_session: Whether to end the wait when the session loses a rank or a connection.
            until_s: When to end the wait, by the monotonic clock.
        """
        while not condition():
            now_s = time.monotonic()
            if now_s >= until_s:
                return False
            trouble_due_s = self._session.trouble_due_s if in_session else math.inf
            if in_session and (self._processes.lost & set(self._session.spec.ranks) or now_s >= trouble_due_s):
                return False
            self._handle_next(min(until_s, trouble_due_s))
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
                printed = self._job.last_printed()
                raise RunError(
                    f"the agent of this host has ended, and with it all ranks of this host{printed and f': {printed}'}"
                )
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
                if self._reached is not None:
                    self._bring_up_to_date(peer)
                if self._processes.is_finished:
                    # A process that has replaced a lost one at the very end was not there when all were told.
                    self._server.send(peer, "finished")
            return
        if not self._processes.is_current(peer):
            return
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
        elif kind == "files-sent":
            self._processes.ranks[rank].has_sent_files = True
        else:
            self._hear_session(rank, message)

    def _bring_up_to_date(self, peer: Peer) -> None:
        """Send a rank of an earlier launcher what that one may not have sent: plans, and which steps have arrived."""
        step = self._session.step
        self._server.send(peer, "heard", step=step - 1)
        if self._driver is not None and self._config.adapts:
            for upcoming in range(step, min(step + DECISION_LAG_STEPS, self._config.steps)):
                new = self._driver.plan_at(upcoming).to_data()
                self._server.send(peer, "plan", step=upcoming, new=new, durable=self._session.durable)

    def _hear_session(self, rank: int, message: Message) -> None:
        """Handle a rank's message about its session."""
        self._session.hear(rank, message)

    def _check_end(self, rank: int) -> None:
        """Raise if a rank's process has ended with status 0 before the run is finished."""
        state, steps = self._processes.ranks[rank], self._config.steps - self._config.first_step
        # Once the connection has ended too, all messages of the process have been handled.
        has_left = state.has_ended and state.peer is None and not self._processes.is_finished
        replaces = self._config.replaces
        if self._driver is not None and has_left and (replaces or self._session.publications[rank] < steps):
            raise RunError(f"{self._processes.name(rank)} ended before the end of the run")

    def _answer(self, rank: int, topic: str, outcome: Disagreement | None) -> None:
        """Send a rank the outcome of a topic; all ranks get the time and the token of the first answer."""
        now_s, token = self._heard.setdefault(topic, (time.monotonic(), random_token()))
        fields = {"topic": topic, "now_s": now_s, "token": token}
        error, wrong_input = (None, False) if outcome is None else (outcome.message, outcome.wrong_input)
        self._server.send(self._processes.peers([rank]), "agreed", error=error, wrong_input=wrong_input, **fields)

    def _start_run(self, origin_s: float) -> None:
        """Store second 0 of the run, and schedule the faults of the scenario relative to it."""
        self._processes.origin_s = origin_s
        if self._config.attempt:
            AttemptFolder(Path(self._config.attempt)).begin(origin_s, replaces=not self._config.first_step)
        if not self._config.replaces:
            return
        for fault in self._scenario.faults:
            if not isinstance(fault, Absence | Hang) or fault.device not in self._devices:
                continue
            # The end of an absence sends no signal (0), but wakes the loop: a `_wait` may wait for the device's return.
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
                f"host {names}: no agent has connected within {hosts.arrival_s:.0f} s; start the job there, and let it "
                f"reach {hosts.address}, port {hosts.port}"
            )

    def _await_start(self, ranks: Collection[int]) -> None:
        """Wait until all ranks can begin to train; a host that is lost before that must return within `arrival_s`."""

        def are_ready() -> bool:
            return all(map(self._processes.has_returned, ranks))

        while not are_ready():
            self._await_hosts()
            self._wait(lambda: are_ready() or bool(self._processes.missing_hosts))

    # --- a session, step by step ---

    def _begin(self, spec: SessionSpec) -> None:
        """Begin a session: mark its ranks as not lost, and have them connect with each other."""
        self._processes.lost -= set(spec.ranks)
        self._session = SessionProgress(spec, spec.first_step)
        self._values.clear()
        self._server.send(self._processes.peers(spec.ranks), "begin", **spec.to_data())

    def _follow_session(self) -> bool:
        """Follow the steps of a session; return True at the end of the run, False if the session ended earlier."""
        assert self._driver is not None
        current, regrouping = self._session, self._regrouping
        ranks, told = current.spec.ranks, current.step + len(current.spec.plans)
        while (step := current.step) < self._config.steps:
            if regrouping.joining is not None and regrouping.joining[0] == step:
                # Some may still wait for what other pipelines send, which the end of the session would cut off.
                self._wait(lambda: current.copied >= set(ranks), in_session=True)
                return False
            if not self._wait(lambda: current.is_published, in_session=True):
                return False
            parts = current.finish_step()
            # Ranks that are about to join count as present; `next_session` checks them when they join.
            there = {*ranks, *(regrouping.joining[1] if regrouping.joining is not None else ())}
            new = self._driver.finish_step(step, parts, self._processes.absent(there) if self._recovers else [])
            if self._config.outlives_launcher:
                self._job.note_reached(step + 1)
            self._push(ranks, "heard", step=step)
            if self._config.has_fixed_plan:
                continue
            upcoming = step + DECISION_LAG_STEPS
            if told <= upcoming < self._config.steps and regrouping.joining is None:
                if new is not None:
                    (new,) = regrouping.until_others_join([new], upcoming, ranks)
                data = None if new is None else new.to_data()
                self._push(ranks, "plan", step=upcoming, new=data, durable=current.durable)
        # Until all ranks have written their results, the steps of a lost rank may have to be repeated.
        return not self._recovers or self._wait(lambda: current.done >= set(ranks), in_session=True)

    def _push(self, ranks: Collection[int], kind: str, **fields: Any) -> None:
        """Send a message to those of the ranks that are not lost: a lost rank's new process is not in the session."""
        there = [rank for rank in ranks if rank not in self._processes.lost]
        self._server.send(self._processes.peers(there), kind, **fields)

    # --- from one session to the next ---

    def _regroup(self) -> None:
        """End the session, and begin another one with the remaining ranks and any that join."""
        last, joining = self._session, self._regrouping.joining
        self._push(last.spec.ranks, "ended")
        if self._processes.origin_s is None:
            # No rank has trained yet: begin the same session again.
            self._await_reports()
            self._await_start(last.spec.ranks)
            self._begin(replace(last.spec, number=last.spec.number + 1, store_prefix=random_token()))
            return
        unpublished: list[Any] | None = None
        copied_with = self._regrouping.plans_of_copies()
        while True:
            reports = self._await_reports()
            if unpublished is None:
                unpublished = [*last.incomplete, *(report["unpublished"] for report in reports.values())]
            spec = self._regrouping.next_session(
                last, reports, unpublished, joining, copied_with, self._local_delivery_s
            )
            self._await_processes(set(spec.ranks) - set(reports))
            unpublished = []
            # Repeat if another rank was lost meanwhile.
            if not self._processes.lost & set(reports):
                break
        self._begin(spec)

    def _await_reports(self) -> dict[int, dict[str, Any]]:
        """Wait for the messages ``report`` of all remaining ranks of the session; return them by rank."""

        def left() -> list[int]:
            return [rank for rank in self._session.spec.ranks if rank not in self._processes.lost]

        reports = self._session.reports
        self._wait(lambda: all(rank in reports for rank in left()))
        if not left() and self._processes.origin_s is not None:
            raise RunError(
                "all ranks are lost, and with them all copies of the layers in memory; a run with '--checkpoint' can "
                "be resumed"
            )
        return {rank: reports[rank] for rank in left()}

    def _await_processes(self, ranks: Collection[int]) -> None:
        """Wait until all given ranks can join a session; raise `RunError` if an absence of one of them has no end."""

        def are_there() -> bool:
            for rank in ranks:
                if self._processes.away_until_s(rank) == math.inf:
                    raise RunError(
                        f"device '{self._devices[rank]}': its absence in the scenario has no end, and the plan needs "
                        "the device; set an end, or choose a policy that plans without lost devices"
                    )
            return all(map(self._processes.has_returned, ranks))

        self._wait(are_there)
