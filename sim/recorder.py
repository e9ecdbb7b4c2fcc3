"""Records finished steps as events in columns."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from planner.adapt.observation import PROBE_BYTES, probe_turn
from planner.adapt.policy import Decision
from planner.events.event import PROBE_ACTION, SYNC_ACTION, UPDATE_ACTION, Event, EventKind, is_exchange
from planner.events.file import PART_ROWS, EventFile, EventSpool
from planner.events.log import FIELDS, TEXTS, TIMES, EventLog, join_columns
from planner.plan.plan import Plan
from planner.schedules.kernel.problem import KINDS
from planner.step.compile import CompiledStep, first_segments
from planner.step.tables import SYNC
from sim.network.link_probes import LinkProbes
from sim.step import StepRun

Columns = dict[str, NDArray[np.float64] | NDArray[np.int64]]


class Recorder:
    """Collects the events of a run.

    Args:
        probes: Whether each step probes its paths, as in the executor (`planner.adapt.observation`).
        link_probes: The probes of unused links; None if these are not measured.
        spool: Takes the events, so that they need not stay in memory; None to keep them.
    """

    def __init__(
        self,
        devices: Sequence[str],
        *,
        probes: bool = False,
        link_probes: LinkProbes | None = None,
        spool: EventSpool | None = None,
    ) -> None:
        self._has_probes = probes
        self._link_probes = link_probes
        self._spool = spool
        # By path, as the product of its devices' numbers: the first step that used it.
        self._first_step: dict[int, int] = {}
        self._unobserved: list[Event] = []
        actions = [*(str(kind) for kind in KINDS), SYNC_ACTION, UPDATE_ACTION, PROBE_ACTION]
        self._names = tuple(dict.fromkeys([*EventKind, *actions, *devices, ""]))
        # Names that only single events have come last.
        self._number = {str(name): number for number, name in enumerate(self._names)}
        self._action = np.array([self._number[name] for name in actions], np.int64)
        self._parts: list[Columns] = []
        self._others: list[Event] = []
        self._rows = 0

    def add(self, event: Event) -> None:
        """Record an event that is not part of a step's graph."""
        self._others.append(event)
        self._count(1)
        if event.kind in (EventKind.BACKUP, EventKind.MIGRATE) or is_exchange(event):
            self._unobserved.append(event)

    def decide(self, decision: Decision, time_s: float) -> None:
        """Record a decision of the policy, made at ``time_s`` seconds of the run."""
        step = decision.observed_step
        self.add(Event(EventKind.DECISION, "", "", -1, -1, -1, step, "", time_s, time_s, 0))

    def finish(self, step: StepRun) -> Iterable[Event]:
        """Record a finished step; return its events, and the late ones since the last finished step."""
        events, others = self._events(step), self._unobserved
        self.keep(events)
        self._unobserved = []
        if self._link_probes is not None:
            begun_s = zip(step.compiled.actors, step.begun_s.tolist(), strict=True)
            self._link_probes.send(step.plan, step.number, dict(begun_s))
            for probe in self._link_probes.arrived(step.over_s):
                self.add(probe)
                others.append(probe)
        return chain(events, others) if others else events

    def finish_part(self, step: StepRun) -> None:
        """Record what has happened of a step that not all devices have taken."""
        events = self._events(step)
        self.keep(events.take(np.flatnonzero(~np.isnan(events.columns["end_s"]))))

    def until(self, time_s: float, step: StepRun) -> EventLog:
        """Return the events of an unfinished step that ended by ``time_s``, when the step may be lost.

        Optimizer updates are left out, because devices revert them when the step is lost.
        """
        events = self._events(step)
        ended = events.columns["end_s"] <= time_s
        events = events.take(np.flatnonzero(ended & (events.columns["action"] != self._number[UPDATE_ACTION])))
        arrived_s = events.columns["arrived_s"]
        seen_s = np.where(arrived_s <= time_s, arrived_s, -1.0)
        return EventLog(events.names, {**events.columns, "arrived_s": seen_s})

    def keep(self, events: EventLog) -> None:
        """Record events of a step."""
        self._parts.append(events.columns)
        self._count(len(events))

    def log(self) -> EventLog | EventFile:
        """Return all events in order."""
        columns = self._collected()
        if self._spool is None:
            return EventLog(tuple(self._number), columns).in_order()
        if len(columns["start_s"]):
            self._spool.append(columns)
        return self._spool.sort(tuple(self._number))

    def _count(self, rows: int) -> None:
        """Count new events, and hand all collected ones to the spool if they are many."""
        self._rows += rows
        if self._spool is not None and self._rows >= PART_ROWS:
            self._spool.append(self._collected())
            self._rows = 0

    def _collected(self) -> Columns:
        """Return the events that have been collected, and collect from the beginning."""
        others = EventLog.from_events(self._others)
        number = np.array([self._number.setdefault(name, len(self._number)) for name in others.names], np.int64)
        columns: Columns = dict(others.columns)
        if len(others):
            columns |= {field: number[others.columns[field]] for field in TEXTS}
        joined = join_columns([*self._parts, columns])
        self._parts, self._others = [], []
        return joined

    def _events(self, step: StepRun) -> EventLog:
        parts = [self._compute(step), self._sends(step), self._receives(step), self._syncs(step)]
        if self._has_probes:
            parts.append(self._probes(step))
        return EventLog(self._names, join_columns(parts))

    def _devices(self, compiled: CompiledStep) -> NDArray[np.int64]:
        """Return the number of each actor's device, [actors]."""
        return np.array([self._number[actor] for actor in compiled.actors], np.int64)

    def _compute(self, step: StepRun) -> Columns:
        actions, device = step.compiled.actions, self._devices(step.compiled)
        first, last = _computed(step.compiled)
        columns = self._columns(
            EventKind.COMPUTE,
            step,
            device=device[actions.actor[first]],
            pipeline=actions.pipeline[first],
            stage=actions.stage[first],
            microbatch=actions.microbatch[first],
            action=self._action[actions.kind[first]],
            start_s=step.state.start_s[first],
            end_s=step.state.end_s[last],
        )
        parts = [columns]
        for leader, partners in _partners(step.plan):
            own = columns["device"] == self._number[leader]
            for partner in partners:
                copied: Columns = {name: column[own] for name, column in columns.items()}
                copied["device"] = np.full(int(own.sum()), self._number[partner], np.int64)
                parts.append(copied)
        return join_columns(parts)

    def _sends(self, step: StepRun) -> Columns:
        compiled, state = step.compiled, step.state
        actions, messages, device = compiled.actions, compiled.messages, self._devices(compiled)
        sent = _sent(compiled)
        sender, receiver = messages.sender[sent], messages.receiver[sent]
        exchanged = actions.kind[sender] == SYNC
        return self._columns(
            EventKind.SEND,
            step,
            device=device[actions.actor[sender]],
            peer=device[actions.actor[receiver]],
            pipeline=np.where(exchanged, compiled.pipeline[actions.actor[sender]], actions.pipeline[sender]),
            stage=np.where(exchanged, compiled.stage[actions.actor[sender]], actions.stage[sender]),
            microbatch=actions.microbatch[sender],
            action=self._action[actions.kind[receiver]],
            start_s=state.sent_s[sent],
            end_s=state.departed_s[sent],
            arrived_s=state.arrival_s[sent],
            size_bytes=messages.size_bytes[sent],
        )

    def _probes(self, step: StepRun) -> Columns:
        """Return the sends of the step's probes.

        A probe is sent with one of the messages of its path. It leaves after the earlier messages of the path, and has
        the propagation delay of that message; it is too small to delay any other message.
        """
        compiled, state = step.compiled, step.state
        actions, messages, device = compiled.actions, compiled.messages, self._devices(compiled)
        sent = _sent(compiled)
        sender, receiver = actions.actor[messages.sender[sent]], actions.actor[messages.receiver[sent]]
        path = device[sender] * len(self._names) + device[receiver]
        order = np.lexsort((state.sent_s[sent], path))
        paths, first, count = np.unique(path[order], return_index=True, return_counts=True)
        since = (step.number - self._first_step.setdefault(each, step.number) for each in paths.tolist())
        turn = np.array([probe_turn(*each) for each in zip(since, count.tolist(), strict=True)], np.int64)
        with_message = sent[order[first + turn]]
        earlier = sent[order[first + turn - 1]]
        start_s = state.sent_s[with_message]
        # nan, as for other messages, if the earlier message has not left.
        left_s = np.where(turn > 0, np.maximum(state.departed_s[earlier], start_s), start_s)
        delay_s = state.arrival_s[with_message] - state.departed_s[with_message]
        here = order[first]
        return self._columns(
            EventKind.SEND,
            step,
            device=device[sender[here]],
            peer=device[receiver[here]],
            pipeline=compiled.pipeline[sender[here]],
            stage=compiled.stage[sender[here]],
            action=np.full(len(here), self._number[PROBE_ACTION], np.int64),
            start_s=start_s,
            end_s=left_s,
            arrived_s=left_s + delay_s,
            size_bytes=np.full(len(here), PROBE_BYTES, np.int64),
        )

    def _receives(self, step: StepRun) -> Columns:
        compiled, state = step.compiled, step.state
        actions, messages, device = compiled.actions, compiled.messages, self._devices(compiled)
        rows = np.flatnonzero((state.arrival_s > state.wait_s) & (actions.kind[messages.receiver] != SYNC))
        sender, receiver = messages.sender[rows], messages.receiver[rows]
        return self._columns(
            EventKind.RECEIVE,
            step,
            device=device[actions.actor[receiver]],
            peer=device[actions.actor[sender]],
            pipeline=actions.pipeline[receiver],
            stage=actions.stage[receiver],
            microbatch=actions.microbatch[receiver],
            action=self._action[actions.kind[receiver]],
            start_s=state.wait_s[rows],
            end_s=state.arrival_s[rows],
            size_bytes=messages.size_bytes[rows],
        )

    def _syncs(self, step: StepRun) -> Columns:
        compiled, state = step.compiled, step.state
        device, spans = self._devices(compiled), compiled.spans
        actor = np.array([span.actor for span in spans], np.int64)
        return self._columns(
            EventKind.SYNC,
            step,
            device=device[actor],
            pipeline=compiled.pipeline[actor],
            stage=compiled.stage[actor],
            action=np.full(len(spans), self._number[SYNC_ACTION], np.int64),
            start_s=state.start_s[np.array([span.first_action for span in spans], np.int64)],
            end_s=state.end_s[np.array([span.end_action - 1 for span in spans], np.int64)],
            size_bytes=np.array([span.sent_bytes for span in spans], np.int64),
        )

    def _columns(self, kind: EventKind, step: StepRun, **given: NDArray[np.int64] | NDArray[np.float64]) -> Columns:
        """Return all columns of events; columns that are not given hold -1, 0 or an empty name for 'not applicable'."""
        count = len(given["start_s"])
        blank = {
            "pipeline": -1,
            "stage": -1,
            "microbatch": -1,
            "size_bytes": 0,
            "staleness": -1,
            "arrived_s": -1,
            "late_s": 0,
        }
        fixed = {**blank, "kind": self._number[kind], "peer": self._number[""], "step": step.number}
        return {name: given[name] if name in given else _constant(name, fixed[name], count) for name in FIELDS}


def _constant(name: str, value: int, count: int) -> NDArray[np.float64] | NDArray[np.int64]:
    """Return a column with the same value in every row."""
    return np.full(count, value, np.float64) if name in TIMES else np.full(count, value, np.int64)


# Cached, because a run records many steps of the same plan.
@lru_cache(maxsize=32)
def _partners(plan: Plan) -> list[tuple[str, tuple[str, ...]]]:
    """Return pairs (leader, partners): the first device of each tensor-parallel group, and its other devices."""
    return [(replica.device, replica.partners) for replica in plan.replicas if replica.partners]


@lru_cache(maxsize=32)
def _computed(compiled: CompiledStep) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first and the last segment of each action that computes."""
    rows = np.flatnonzero(compiled.actions.kind != SYNC)
    begins = first_segments(compiled)[rows] == rows
    ends = np.append(begins[1:], True)[: len(rows)]
    return rows[begins], rows[ends]


@lru_cache(maxsize=32)
def _sent(compiled: CompiledStep) -> NDArray[np.int64]:
    """Return the indices of messages between different devices, not between a device and its communication stream."""
    names, actor = np.array(compiled.actors), compiled.actions.actor
    return np.flatnonzero(names[actor[compiled.messages.sender]] != names[actor[compiled.messages.receiver]])
