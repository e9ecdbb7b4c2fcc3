"""What happened in a step, as events in columns."""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from planner.adapt.policy import Decision
from planner.events.event import SYNC_ACTION, UPDATE_ACTION, Event, EventKind
from planner.events.log import FIELDS, EventLog
from planner.schedules.kernel.problem import KINDS
from planner.step.compile import CompiledStep
from planner.step.tables import SYNC
from sim.kernel.advance import StepState
from sim.step import first_pieces

Columns = dict[str, NDArray[np.float64] | NDArray[np.int64]]

# Each device of a plan that leads a tensor-parallel group, to the others of it.
Partners = Mapping[str, Sequence[str]]


class Recorder:
    """Turns finished steps into rows.

    Args:
        devices: All that any plan of the run may name.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        actions = [*(str(kind) for kind in KINDS), SYNC_ACTION, UPDATE_ACTION]
        self._names = tuple(dict.fromkeys([*EventKind, *actions, *devices, ""]))
        self._number = {name: number for number, name in enumerate(self._names)}
        self._action = np.array([self._number[name] for name in actions], np.int64)
        self._parts: list[Columns] = []
        self._others: list[Event] = []

    def add(self, event: Event) -> None:
        """Write down something that is not part of a step."""
        self._others.append(event)

    def decide(self, decision: Decision, time_s: float) -> None:
        """Write down that something was decided at a time."""
        step = decision.observed_step
        self.add(Event(EventKind.DECISION, "", "", -1, -1, -1, step, "", time_s, time_s, 0))

    def finish(self, step: int, compiled: CompiledStep, state: StepState, partners: Partners) -> EventLog:
        """Write a finished step down, and return its events."""
        parts = self._rows(step, compiled, state, partners)
        self._parts += parts
        return EventLog(self._names, _join(parts))

    def until(self, time_s: float, step: int, compiled: CompiledStep, state: StepState, partners: Partners) -> EventLog:
        """Return what of a step had ended at a time.

        The step is going to be lost: who has updated its parameters takes that back, and there is no row of it.
        """
        columns = _join(self._rows(step, compiled, state, partners))
        kept = (columns["end_s"] <= time_s) & (columns["action"] != self._number[UPDATE_ACTION])
        return EventLog(self._names, {name: column[kept] for name, column in columns.items()})

    def keep(self, events: EventLog) -> None:
        """Write down what `until` returned."""
        self._parts.append(events.columns)

    def _rows(self, step: int, compiled: CompiledStep, state: StepState, partners: Partners) -> list[Columns]:
        return [
            self._compute(step, compiled, state, partners),
            self._sends(step, compiled, state),
            self._receives(step, compiled, state),
            self._syncs(step, compiled, state),
        ]

    def log(self) -> EventLog:
        """Return all events in order."""
        others = EventLog.from_events(self._others)
        names = tuple(dict.fromkeys([*self._names, *others.names]))
        number = np.array([names.index(name) for name in others.names], np.int64)
        columns: Columns = dict(others.columns)
        for field in ("kind", "device", "peer", "action"):
            columns[field] = number[others.columns[field]] if len(others) else others.columns[field]
        return EventLog(names, _join([*self._parts, columns])).in_order()

    def _devices(self, compiled: CompiledStep) -> NDArray[np.int64]:
        return np.array([self._number[actor] for actor in compiled.actors], np.int64)

    def _compute(self, step: int, compiled: CompiledStep, state: StepState, followers: Partners) -> Columns:
        actions, device = compiled.actions, self._devices(compiled)
        rows, last_rows = _computed(compiled)
        columns = self._columns(
            EventKind.COMPUTE,
            step,
            device=device[actions.actor[rows]],
            pipeline=actions.pipeline[rows],
            stage=actions.stage[rows],
            microbatch=actions.microbatch[rows],
            action=self._action[actions.kind[rows]],
            start_s=state.start_s[rows],
            end_s=state.end_s[last_rows],
        )
        parts = [columns]
        for leader, partners in followers.items():
            own = columns["device"] == self._number[leader]
            for partner in partners:
                copied: Columns = {name: column[own] for name, column in columns.items()}
                copied["device"] = np.full(int(own.sum()), self._number[partner], np.int64)
                parts.append(copied)
        return _join(parts)

    def _sends(self, step: int, compiled: CompiledStep, state: StepState) -> Columns:
        actions, messages, device = compiled.actions, compiled.messages, self._devices(compiled)
        away = _away(compiled)
        sender, receiver = messages.sender[away], messages.receiver[away]
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
            start_s=state.sent_s[away],
            end_s=state.departed_s[away],
            size_bytes=messages.size_bytes[away],
        )

    def _receives(self, step: int, compiled: CompiledStep, state: StepState) -> Columns:
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

    def _syncs(self, step: int, compiled: CompiledStep, state: StepState) -> Columns:
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

    def _columns(self, kind: EventKind, step: int, **given: NDArray[np.int64] | NDArray[np.float64]) -> Columns:
        """All columns from those given; the others say that nothing applies."""
        count = len(given["start_s"])
        blank = {"pipeline": -1, "stage": -1, "microbatch": -1, "size_bytes": 0, "staleness": -1}
        fixed = {**blank, "kind": self._number[kind], "peer": self._number[""], "step": step}
        return {name: given[name] if name in given else np.full(count, fixed[name], np.int64) for name in FIELDS}


def _join(parts: Sequence[Columns]) -> Columns:
    return {name: np.concatenate([part[name] for part in parts]) for name in FIELDS}


# A run records the same step time after time.
@lru_cache(maxsize=32)
def _computed(compiled: CompiledStep) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The first and the last piece of each action that computes; it is in pieces where sums overlap with it."""
    rows = np.flatnonzero(compiled.actions.kind != SYNC)
    begins = first_pieces(compiled)[rows] == rows
    ends = np.append(begins[1:], True)[: len(rows)]
    return rows[begins], rows[ends]


@lru_cache(maxsize=32)
def _away(compiled: CompiledStep) -> NDArray[np.int64]:
    """The messages that leave a device: not what it and its lane tell each other."""
    names, actor = np.array(compiled.actors), compiled.actions.actor
    return np.flatnonzero(names[actor[compiled.messages.sender]] != names[actor[compiled.messages.receiver]])
