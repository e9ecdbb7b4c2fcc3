"""What happened in a step, as events in columns."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from planner.compiled_step import CompiledStep
from planner.event_log import FIELDS, EventLog
from planner.events import SYNC_ACTION, UPDATE_ACTION, Event, EventKind
from planner.schedules.orders import KINDS
from planner.step_tables import SYNC
from sim.advance import StepState

Columns = dict[str, NDArray[np.float64] | NDArray[np.int64]]


class Recorder:
    """Turns finished steps into rows.

    Args:
        devices: Of the plan, tensor-parallel partners included.
        partners: Each device that leads others to those.
    """

    def __init__(self, devices: Sequence[str], partners: Mapping[str, Sequence[str]]) -> None:
        actions = [*(str(kind) for kind in KINDS), SYNC_ACTION, UPDATE_ACTION]
        self._names = tuple(dict.fromkeys([*EventKind, *actions, *devices, ""]))
        self._number = {name: number for number, name in enumerate(self._names)}
        self._partners = partners
        self._action = np.array([self._number[name] for name in actions], np.int64)
        self._parts: list[Columns] = []
        self._others: list[Event] = []

    def add(self, event: Event) -> None:
        """Write down something that is not part of a step."""
        self._others.append(event)

    def finish(self, step: int, compiled: CompiledStep, state: StepState) -> EventLog:
        """Write a finished step down, and return its events."""
        parts = [
            self._compute(step, compiled, state),
            self._sends(step, compiled, state),
            self._receives(step, compiled, state),
            self._syncs(step, compiled, state),
        ]
        self._parts += parts
        return EventLog(self._names, _join(parts))

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

    def _compute(self, step: int, compiled: CompiledStep, state: StepState) -> Columns:
        actions, device = compiled.actions, self._devices(compiled)
        rows = np.flatnonzero(actions.kind != SYNC)
        # Where sums overlap with an action, it is in pieces.
        identity = np.stack([actions.actor, actions.kind, actions.pipeline, actions.stage, actions.microbatch])[:, rows]
        begins = np.append(True, (identity[:, 1:] != identity[:, :-1]).any(axis=0))[: len(rows)]
        ends = np.append(begins[1:], True)[: len(rows)]
        last_rows, rows = rows[ends], rows[begins]
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
        for leader, partners in self._partners.items():
            own = columns["device"] == self._number[leader]
            for partner in partners:
                copied: Columns = {name: column[own] for name, column in columns.items()}
                copied["device"] = np.full(int(own.sum()), self._number[partner], np.int64)
                parts.append(copied)
        return _join(parts)

    def _sends(self, step: int, compiled: CompiledStep, state: StepState) -> Columns:
        actions, messages, device = compiled.actions, compiled.messages, self._devices(compiled)
        away = np.flatnonzero(device[actions.actor[messages.sender]] != device[actions.actor[messages.receiver]])
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
            start_s=state.handed_s[away],
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
