"""The memory of each device over a run, computed from its events."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.events.event import EventKind
from planner.events.log import EventLog, parts_of
from planner.plan.plan import Plan
from planner.runs.event_totals import EventTotals, event_totals
from planner.runs.metrics import PlanInterval, answer_times_s, plan_intervals
from planner.runs.record import RunRecord
from planner.scenario.scenario import Scenario
from planner.schedules.kernel.problem import BACKWARD_WEIGHT, KINDS
from planner.step.memory import memory_use

# A turn orders changes at the same time. These two turns come before and after the turns of actions without duration.
_FIRST, _LAST = -1, np.iinfo(np.int64).max


@dataclass(frozen=True, eq=False, slots=True)
class MemoryTimeline:
    """The memory of one device over a run.

    Attributes:
        times_s: Times at which the bytes held change, rising, the first 0, seconds from the start of the run;
            float64 [changes].
        held_bytes: Bytes held from each of these times until the next; float64 [changes].
    """

    times_s: NDArray[np.float64]
    held_bytes: NDArray[np.float64]


class _Changes(NamedTuple):
    """Changes of memory as columns of shape [changes].

    Attributes:
        turn: Order among changes at the same time.
        change: Bytes allocated, or freed where negative.
        begun_s: Start of the action that causes the change, seconds; minus infinity if no action does.
    """

    device: NDArray[np.int64]
    time_s: NDArray[np.float64]
    turn: NDArray[np.int64]
    change: NDArray[np.float64]
    begun_s: NDArray[np.float64]


_NO_CHANGES = _Changes(np.empty(0, np.int64), np.empty(0), np.empty(0, np.int64), np.empty(0), np.empty(0))


def memory_timelines(record: RunRecord) -> dict[str, MemoryTimeline]:
    """Return the memory over time of each device of the run's plans, by name.

    Assumption: at a change of plan, devices release the layers of the old plan and allocate the layers of the new plan
    when the transfers of layers start. If devices leave, all devices release the memory of the interrupted step when
    the next plan is decided.
    """
    windows = list(_windows(record))
    return {
        name: MemoryTimeline(
            np.concatenate([window[name].times_s for window in windows]),
            np.concatenate([window[name].held_bytes for window in windows]),
        )
        for name in windows[0]
    }


def peak_memory_bytes(record: RunRecord) -> dict[str, int]:
    """Return the most bytes that each device held at once; only a part of the run's events is in memory at a time."""
    peaks: dict[str, float] = {}
    for window in _windows(record):
        for name, line in window.items():
            peaks[name] = max(peaks.get(name, 0.0), float(line.held_bytes.max(initial=0.0)))
    return {name: round(peak) for name, peak in peaks.items()}


def _windows(record: RunRecord) -> Iterator[dict[str, MemoryTimeline]]:
    """Yield the memory of each device in one window of time after the other."""
    totals = event_totals(record.events)
    intervals = plan_intervals(record, totals, totals.step_ends_s)
    resident = [_resident_bytes(interval.plan, record.scenario) for interval in intervals]
    held: dict[str, float] = {}
    for changes, numbers in _changes_in_windows(record, totals, intervals, resident):
        order = np.lexsort((changes.turn, changes.time_s, changes.device))
        device, time_s, change = changes.device[order], changes.time_s[order], changes.change[order]
        window = {}
        for name, number in numbers.items():
            first, end = np.searchsorted(device, [number, number + 1])
            sums = np.cumsum(np.concatenate(([held.get(name, 0.0)], change[first:end])))
            # The first window begins with what the device holds at the start of the run.
            begin = 1 if name in held else 0
            times_s = np.concatenate(([0.0], time_s[first:end]))
            window[name] = MemoryTimeline(times_s[begin:], resident[0].get(name, 0.0) + sums[begin:])
            held[name] = float(sums[-1])
        yield window


def _changes_in_windows(
    record: RunRecord,
    totals: EventTotals,
    intervals: Sequence[PlanInterval],
    resident: Sequence[Mapping[str, float]],
) -> Iterator[tuple[_Changes, dict[str, int]]]:
    """Yield the changes of each window of time, and the number of each device.

    A window reaches from the first start in a part of the events to the first one in the next part.
    """
    devices = list(dict.fromkeys(name for each in resident for name in each))
    answers_s = answer_times_s(record, totals)
    unanswered = list(answers_s.values())
    # Those of actions, answers and new plans, in this order where the device, the time and the turn are the same.
    waiting = [_NO_CHANGES, _NO_CHANGES, _NO_CHANGES]
    # Bytes taken and not freed by the actions so far that started after the latest answer, by device.
    taken: dict[int, float] = {}
    numbers: dict[str, int] = {}
    for log, end_s in _with_ends(parts_of(record.events)):
        if not numbers:
            numbers = {name: log.names.index(name) if name in log.names else -1 - i for i, name in enumerate(devices)}
            for interval, (old, new) in zip(intervals[1:], pairwise(resident), strict=True):
                waiting[2] = _join([waiting[2], _replaced(interval.start_s, old, new, numbers)])
        compute = log.take(np.flatnonzero(log.is_a(EventKind.COMPUTE) & (log.columns["microbatch"] >= 0)))
        changes = _join([_changes(*segment, record.scenario) for segment in _segments(compute, record, answers_s)])
        waiting[0] = _join([waiting[0], changes])
        while unanswered and unanswered[0] <= end_s:
            answer_s = unanswered.pop(0)
            before = changes.begun_s < answer_s
            _add(taken, _select(changes, before))
            waiting[1] = _join([waiting[1], _released(taken, answer_s)])
            taken = dict.fromkeys(taken, 0.0)
            changes = _select(changes, ~before)
        _add(taken, changes)
        are_ready = [(each.time_s < end_s) | (end_s == np.inf) for each in waiting]
        yield _join([_select(each, rows) for each, rows in zip(waiting, are_ready, strict=True)]), numbers
        waiting = [_select(each, ~rows) for each, rows in zip(waiting, are_ready, strict=True)]


def _with_ends(logs: Iterator[EventLog]) -> Iterator[tuple[EventLog, float]]:
    """Yield each log with the start of the first event of the next one, seconds; infinity for the last one."""
    for log, later in pairwise(chain(logs, (None,))):
        assert log is not None
        yield log, float(later.columns["start_s"][0]) if later is not None else np.inf


def _segments(compute: EventLog, record: RunRecord, answers_s: Mapping[int, float]) -> Iterator[tuple[EventLog, Plan]]:
    """Yield pairs (compute events, plan) for the plans of the run, the last plan first."""
    step, start_s = compute.columns["step"], compute.columns["start_s"]
    left = np.full(len(compute), True)
    for number, decision in reversed(list(enumerate(record.decisions))):
        # After an answer to a departure, steps before the decision's first one may be repeated with its plan.
        own = left & (start_s >= answers_s[number] if number in answers_s else step >= decision.first_step)
        left &= ~own
        if own.any():
            yield compute.take(np.flatnonzero(own)), decision.plan
    yield compute.take(np.flatnonzero(left)), record.plan


def _resident_bytes(plan: Plan, scenario: Scenario) -> dict[str, float]:
    """Return the bytes that each device holds for the whole time of a plan: model states and framework, no activations.

    All devices of a tensor-parallel group hold the same number.
    """
    use = memory_use(plan, scenario)
    of_actor = dict(zip(use.step.actors, use.resident.tolist(), strict=True))
    return {device: of_actor[leader] for device, leader in leaders(plan).items()}


def _join(parts: Sequence[_Changes]) -> _Changes:
    return _Changes(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def _select(changes: _Changes, rows: NDArray[np.bool_]) -> _Changes:
    return _Changes(
        changes.device[rows], changes.time_s[rows], changes.turn[rows], changes.change[rows], changes.begun_s[rows]
    )


def _add(taken: dict[int, float], changes: _Changes) -> None:
    """Add changes to the bytes that each device holds."""
    for device in np.unique(changes.device).tolist():
        taken[device] = taken.get(device, 0.0) + float(changes.change[changes.device == device].sum())


def _released(taken: Mapping[int, float], answer_s: float) -> _Changes:
    """Return changes that release, at ``answer_s``, all bytes that devices hold for actions that started before."""
    devices, held = np.array(list(taken), np.int64), np.array(list(taken.values()), np.float64)
    times_s = np.full(len(devices), answer_s)
    return _Changes(devices, times_s, np.full(len(devices), _FIRST), -held, np.full(len(devices), -np.inf))


def _replaced(
    time_s: float, old: Mapping[str, float], new: Mapping[str, float], numbers: Mapping[str, int]
) -> _Changes:
    """Return the changes of resident bytes from one plan to the next, at ``time_s``."""
    differences = {name: new.get(name, 0.0) - old.get(name, 0.0) for name in {**old, **new}}
    changed = [(numbers[name], difference) for name, difference in differences.items() if difference]
    count = len(changed)
    return _Changes(
        np.array([number for number, _ in changed], np.int64),
        np.full(count, time_s),
        np.full(count, _FIRST),
        np.array([difference for _, difference in changed], np.float64),
        np.full(count, -np.inf),
    )


def leaders(plan: Plan) -> dict[str, str]:
    """Return, for each device of a plan, the device of its tensor-parallel group that sends and receives."""
    return {device: replica.device for replica in plan.replicas for device in replica.devices}


def _changes(events: EventLog, plan: Plan, scenario: Scenario) -> _Changes:
    """Return the memory changes at the start and the end of each action of a plan.

    Changes at the same time are ordered by turn: ends of actions first, actions without duration next, starts last.
    """
    use = memory_use(plan, scenario)
    step = use.step
    first, number = leaders(plan), {name: actor for actor, name in enumerate(step.actors)}
    actor_of = np.array([number[first[name]] if name in first else -1 for name in events.names], np.int64)
    kinds = {str(kind): place for place, kind in enumerate(KINDS)}
    kind_of = np.array([kinds.get(name, -1) for name in events.names], np.int64)

    def keys(
        actor: NDArray[np.int64], kind: NDArray[np.int64], stage: NDArray[np.int64], microbatch: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        return ((actor * 4 + kind) * (1 + int(step.actions.stage.max())) + stage) * (
            1 + int(step.actions.microbatch.max())
        ) + microbatch

    own = np.flatnonzero(step.actions.kind <= BACKWARD_WEIGHT)
    known = keys(
        step.actions.actor[own],
        step.actions.kind[own].astype(np.int64),
        step.actions.stage[own],
        step.actions.microbatch[own],
    )
    by_key = np.argsort(known)
    columns = events.columns
    wanted = keys(actor_of[columns["device"]], kind_of[columns["action"]], columns["stage"], columns["microbatch"])
    action = own[by_key[np.searchsorted(known, wanted, sorter=by_key)]]
    lasts = columns["end_s"] > columns["start_s"]
    place = 2 * (columns["step"] * len(step.actions.kind) + action)
    return _Changes(
        np.concatenate((columns["device"], columns["device"])),
        np.concatenate((columns["start_s"], columns["end_s"])),
        np.concatenate((np.where(lasts, _LAST, place), np.where(lasts, _FIRST, place + 1))),
        np.concatenate((use.taken[action] + use.workspace[action], -use.returned[action] - use.workspace[action])),
        np.concatenate((columns["start_s"], columns["start_s"])),
    )
