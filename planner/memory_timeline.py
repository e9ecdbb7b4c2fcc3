"""What each device held over a run, from its events."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.backend import RunRecord
from planner.compiled_step import compile_step
from planner.event_log import EventLog, as_log
from planner.events import EventKind
from planner.memory_use import memory_use
from planner.plan import Plan
from planner.schedules.orders import BACKWARD_WEIGHT, KINDS

# Turns before and after those of all actions that take no time.
_FIRST, _LAST = -1, np.iinfo(np.int64).max


@dataclass(frozen=True, eq=False, slots=True)
class MemoryTimeline:
    """One device's memory.

    Attributes:
        times_s: When it changes, rising, from the start of the run; the first is 0.
        held_bytes: From each of these times on, until the next.
    """

    times_s: NDArray[np.float64]
    held_bytes: NDArray[np.float64]


def memory_timelines(record: RunRecord) -> dict[str, MemoryTimeline]:
    """Return the memory of each device of the plan over the run."""
    log = as_log(record.events)
    compute = log.take(np.flatnonzero(log.is_a(EventKind.COMPUTE)))
    standing = _standing(record)
    parts = [_changes(compute, record, *segment) for segment in _segments(record)]
    device, time_s, turn, change = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    order = np.lexsort((turn, time_s, device))
    device, time_s, change = device[order], time_s[order], change[order]
    timelines = {}
    for name, base in standing.items():
        number = log.names.index(name) if name in log.names else -1
        first, end = np.searchsorted(device, [number, number + 1])
        held = base + np.concatenate(([0.0], np.cumsum(change[first:end])))
        timelines[name] = MemoryTimeline(np.concatenate(([0.0], time_s[first:end])), held)
    return timelines


def peak_memory_bytes(record: RunRecord) -> dict[str, int]:
    """Return the most that each device of the plan held at once."""
    return {name: round(float(line.held_bytes.max())) for name, line in memory_timelines(record).items()}


def _segments(record: RunRecord) -> Iterator[tuple[Plan, int, float]]:
    """Each plan of the run with the first step that ran it and the first one that did not."""
    plans = [(record.plan, 0), *((decision.plan, decision.first_step) for decision in record.decisions)]
    ends = [first_step for _, first_step in plans[1:]]
    for (plan, first_step), end_step in zip(plans, [*ends, np.inf], strict=True):
        yield plan, first_step, end_step


def _standing(record: RunRecord) -> dict[str, float]:
    """States and framework of each device; partners of a tensor-parallel group hold what its first one does."""
    plan = record.plan.without_overlap
    step, use = compile_step(plan, record.scenario), memory_use(plan, record.scenario)
    of_actor = dict(zip(step.actors, use.standing.tolist(), strict=True))
    return {device: of_actor[leader] for device, leader in leaders(record.plan).items()}


def leaders(plan: Plan) -> dict[str, str]:
    """Return each device of a plan with the one that sends and receives for it."""
    replicas = [replica for pipeline in plan.pipelines for stage in pipeline.stages for replica in stage.replicas]
    return {device: replica.device for replica in replicas for device in replica.devices}


def _changes(
    compute: EventLog, record: RunRecord, plan: Plan, first_step: int, end_step: float
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64], NDArray[np.float64]]:
    """Device, time, turn at this time, and change of memory at the start and end of each action in some steps.

    What ends at a moment comes first, then what takes no time, in the order of actions, then what starts.
    """
    plan = plan.without_overlap
    step, use = compile_step(plan, record.scenario), memory_use(plan, record.scenario)
    rows = (compute.columns["step"] >= first_step) & (compute.columns["step"] < end_step)
    rows &= compute.columns["microbatch"] >= 0
    events = compute.take(np.flatnonzero(rows))
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
    return (
        np.concatenate((columns["device"], columns["device"])),
        np.concatenate((columns["start_s"], columns["end_s"])),
        np.concatenate((np.where(lasts, _LAST, place), np.where(lasts, _FIRST, place + 1))),
        np.concatenate((use.taken[action] + use.workspace[action], -use.returned[action] - use.workspace[action])),
    )
