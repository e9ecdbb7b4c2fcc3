"""Which plan held when: the spells of a run in which it had the same devices and layers, or others."""

from collections.abc import Sequence
from dataclasses import dataclass

from planner.events.event import EventKind
from planner.events.log import EventLog
from planner.plan.plan import Plan
from planner.runs.record import RunRecord


@dataclass(frozen=True, slots=True)
class PlanInterval:
    """A stretch of a run with one plan.

    Attributes:
        plan: What it ran.
        first_step: Index of its first step.
        start_s: When the one before had ended its last step, or was given up since devices had gone; seconds from the
            start of the run. What travels for the plan does so in its time.
    """

    plan: Plan
    first_step: int
    start_s: float


def plan_spells(record: RunRecord, log: EventLog, step_ends_s: Sequence[float]) -> list[PlanInterval]:
    """Return the spells of a run in order; decisions that were overtaken, or came too late for a step, have none.

    Args:
        record: The run.
        log: Its events.
        step_ends_s: When each step ended.
    """
    # A run that goes on from a checkpoint begins with a later step.
    first = int(log.columns["step"][log.is_a(EventKind.COMPUTE, EventKind.SYNC)].min())
    spells = [PlanInterval(record.plan, first, 0.0)]
    times_s = answer_times_s(record, log)
    for number, decision in enumerate(record.decisions):
        since_first = decision.first_step - first
        if since_first >= len(step_ends_s):
            continue
        if decision.answers_departure:
            while spells[-1].start_s > times_s[number]:
                spells.pop()
            spells.append(PlanInterval(decision.plan, decision.first_step, times_s[number]))
        else:
            spells.append(PlanInterval(decision.plan, decision.first_step, step_ends_s[since_first - 1]))
    return spells


def answer_times_s(record: RunRecord, log: EventLog) -> dict[int, float]:
    """Return when decisions that answer a departure were made, by their number; seconds from the start of the run."""
    numbers = [number for number, decision in enumerate(record.decisions) if decision.answers_departure]
    # Both are in the order of time; the same step can have several of them.
    made_s = sorted(log.columns["end_s"][log.is_a(EventKind.DECISION)].tolist())
    return {number: made_s[number] for number in numbers}
