"""Join the parts of the record that the attempts at a run have left."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from executor.control.record.attempts import (
    WORK,
    Attempt,
    attempt_folders,
    beginning_of,
    counting,
    decisions_of,
    kept_attempts,
)
from executor.core.job import CheckpointConfig
from planner.adapt.gradient_noise import GradientNorms
from planner.adapt.policy import Decision, describe_change
from planner.events.event import Event, EventKind, in_order
from planner.files.plan import parse_plan
from planner.plan.plan import Plan
from planner.runs.record import Interruption, RunRecord
from traces.common.errors import InputError

# What reading files that a killed process or a full disk has left may raise.
_DAMAGES = (OSError, ValueError, LookupError, TypeError)


def with_earlier_attempts(record: RunRecord, checkpoints: Path, tell: Callable[[str], None]) -> RunRecord:
    """Return the record of a whole run, of which ``record`` is the last attempt's part.

    The steps of earlier attempts come first, each step once. Times are those since the beginning of the first attempt,
    as far as the clocks of the machines tell.

    Args:
        record: The record of the attempt that has just ended.
        checkpoints: The folder of the run's checkpoints.
        tell: Called with a line if rows of earlier attempts are missing, or are of devices that the scenario lacks.
    """
    folders = attempt_folders(checkpoints)
    if record.plan.synchronisation.is_decoupled:
        if len(folders) > 1:
            tell("the record has the last attempt only: pipelines at their own speed have no step in common")
        return record
    try:
        about, began_s = beginning_of(folders[-1])
        first_step = int(about["first_step"])
        earlier = list(kept_attempts(folders[:-1], first_step, record.scenario.faults))[::-1]
    except _DAMAGES as error:
        problem = str(error).partition("\n")[0]
        tell(f"the record has no earlier attempts, since their files are damaged: {problem}")
        return record
    return _with(earlier, record, first_step, began_s, tell)


def is_recorded(checkpoints: Path, steps: int) -> bool:
    """Return whether an attempt at a run has left the rows and losses of all its steps up to step ``steps``.

    Of pipelines at their own speed this is not known.
    """
    try:
        kept = kept_attempts(attempt_folders(checkpoints), steps, ())
        return any(not attempt.plan.synchronisation.is_decoupled for attempt in kept)
    except _DAMAGES:
        return False


def plans_before(checkpoints: CheckpointConfig, plan: Plan) -> Iterator[Plan]:
    """Yield the plans with which attempts of a run began, the last one first, that led to ``plan`` by decisions.

    Where an attempt began with a plan that the one before had neither begun with nor decided, the user gave another
    one: nothing before it counts. Orders of actions do not matter. Damaged files count as no attempt.

    Args:
        checkpoints: The folder of the run's checkpoints, and the first step of the attempt that begins.
        plan: The plan of this step.
    """
    stop = checkpoints.first_step
    for folder in reversed(attempt_folders(checkpoints.folder)):
        try:
            if (found := counting(folder, stop)) is None:
                continue
            about, _ = found
            began, stop = parse_plan(about["plan"]), int(about["first_step"])
            known = [began, *(decision.plan for decision, _ in decisions_of(folder))]
        except _DAMAGES:
            return
        if _unordered(plan) not in map(_unordered, known):
            return
        yield began
        plan = began


def _unordered(plan: Plan) -> Plan:
    return replace(plan, schedule="", order="")


def finished_record(record: RunRecord, checkpoints: CheckpointConfig, tell: Callable[[str], None]) -> RunRecord:
    """Return the record of a run that had ended after its last step, from what its attempts have left.

    Args:
        record: What else is known of the run, without events.
        checkpoints: The folder of the run's checkpoints, and the step after the last one, which `is_recorded`.
        tell: As in `with_earlier_attempts`.

    Raises:
        InputError: The last attempt had devices that the scenario lacks.
    """
    folders = attempt_folders(checkpoints.folder)
    *earlier, last = list(kept_attempts(folders, checkpoints.first_step, record.scenario.faults))[::-1]
    if not {*last.plan.devices} <= record.scenario.cluster.by_name.keys():
        advice = "resume with the scenario that the run had"
        raise InputError("the run had devices that the scenario lacks", str(checkpoints.folder), advice)
    part = replace(
        record,
        plan=last.plan,
        events=tuple(in_order([*last.events, *(_decided(each, made_s) for each, made_s in last.decisions)])),
        decisions=tuple(decision for decision, _ in last.decisions),
        losses=tuple(last.losses[step] for step in sorted(last.losses)),
        gradient_norms=tuple(last.norms[step] for step in sorted(last.norms)),
        samples_before=last.first_sample,
    )
    return _with(earlier, part, last.first_step, last.began_s, tell)


def _with(
    earlier: Sequence[Attempt], record: RunRecord, first_step: int, began_s: float, tell: Callable[[str], None]
) -> RunRecord:
    """Return the record of the earlier attempts and of the last one, which began with ``first_step``."""
    if begins := earlier[0].first_step if earlier else first_step:
        tell(f"the record begins with step {begins + 1}: nothing is left of the attempts before")
    if not earlier:
        return record
    known = record.scenario.cluster.by_name
    if any(device not in known for attempt in earlier for device in attempt.plan.devices):
        tell(f"the record begins with step {first_step + 1}: earlier attempts had devices that the scenario lacks")
        return record
    return _joined(earlier, record, began_s)


def _joined(earlier: Sequence[Attempt], record: RunRecord, began_s: float) -> RunRecord:
    events: list[Event] = []
    decisions: list[Decision] = []
    interruptions: list[Interruption] = []
    losses: dict[int, float] = {}
    norms: dict[int, GradientNorms] = {}
    end_s = 0.0
    following = [*((each.began_s, each.plan) for each in earlier[1:]), (began_s, record.plan)]
    firsts = [*(_first_s(each.events) for each in earlier[1:]), _first_s(record.events)]
    offset_s = 0.0
    for attempt, (next_began_s, next_plan), next_first_s in zip(earlier, following, firsts, strict=True):
        events += (_later(event, offset_s) for event in attempt.events)
        for decision, made_s in attempt.decisions:
            decisions.append(decision)
            events.append(_decided(decision, made_s + offset_s))
        losses |= attempt.losses
        norms |= attempt.norms
        end_s = attempt.end_s + offset_s
        # Clocks may have been set back between two attempts.
        offset_s = max(next_began_s - earlier[0].began_s, end_s - next_first_s)
        interruptions.append(Interruption(attempt.stop, end_s, offset_s + next_first_s))
        if next_plan != attempt.last_plan:
            change = f"resumed with another plan: {describe_change(attempt.last_plan, next_plan)}"
            decisions.append(Decision(attempt.stop - 1, attempt.stop, next_plan, change))
            events.append(_decided(decisions[-1], end_s))
    events += (_later(event, offset_s) for event in record.events)
    norms |= {each.step: each for each in record.gradient_norms}
    return replace(
        record,
        plan=earlier[0].plan,
        events=tuple(in_order(events)),
        decisions=(*decisions, *record.decisions),
        losses=(*(losses[step] for step in sorted(losses)), *record.losses),
        gradient_norms=tuple(norms[step] for step in sorted(norms)),
        samples_before=earlier[0].first_sample,
        interruptions=tuple(interruptions),
    )


def _first_s(events: Sequence[Event]) -> float:
    return min(event.start_s for event in events if event.kind in WORK)


def _later(event: Event, offset_s: float) -> Event:
    arrived_s = event.arrived_s + offset_s if event.arrived_s >= 0 else event.arrived_s
    return replace(event, start_s=event.start_s + offset_s, end_s=event.end_s + offset_s, arrived_s=arrived_s)


def _decided(decision: Decision, made_s: float) -> Event:
    return Event(EventKind.DECISION, "", "", -1, -1, -1, decision.observed_step, "", made_s, made_s, 0)
