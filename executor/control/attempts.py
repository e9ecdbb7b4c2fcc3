"""The record of a run over all its attempts: what each attempt writes as it goes, and how the parts are joined.

A run that is ended, in whatever way, goes on from a checkpoint as another attempt. Each attempt has a folder beside the
checkpoints, ``record/0000`` and so on, in which a process that is killed leaves what it has written:

- ``attempt.json``: the first step, the samples before it, and the plan.
- ``began``: the time of day at second 0 of the attempt.
- ``published.arrows``: the rows of all ranks, if the launcher collects them; else ``events-RANK.arrows``.
- ``losses.jsonl``, ``norms.jsonl``, ``decisions.jsonl`` and ``absences.jsonl``, by the launcher; or
  ``losses-RANK.jsonl``.

An attempt counts up to the first step of the next one that went back to before its own end: the steps after the
checkpoint were lost, and the record has those of the next attempt alone.
"""

import json
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from executor.control.arrivals import with_arrivals, without_marks
from executor.core.job import CheckpointConfig, files_of_ranks
from planner.adapt.gradient_noise import GradientNorms
from planner.adapt.policy import Decision, describe_change
from planner.events.event import ABSENT, Event, EventKind, fault_event, fault_events, in_order, read_event_stream
from planner.files.plan import decision_json, parse_decision, parse_plan, plan_json
from planner.plan.plan import Plan
from planner.runs.record import Interruption, RunRecord
from planner.scenario.faults import Fault, LinkOutage
from traces.common.atomic import write_text_atomically
from traces.common.errors import InputError

_RECORD, _ABOUT, _BEGAN = "record", "attempt.json", "began"
_PUBLISHED, _LOSSES, _NORMS = "published.arrows", "losses.jsonl", "norms.jsonl"
_DECISIONS, _ABSENCES = "decisions.jsonl", "absences.jsonl"


@dataclass(frozen=True, slots=True)
class AttemptFolder:
    """The folder of one attempt: what is written while it trains."""

    path: Path

    @classmethod
    def create(
        cls, checkpoints: CheckpointConfig, first_sample: int, plan: Plan, sees_arrivals: bool
    ) -> "AttemptFolder":
        """Return the folder of an attempt that begins.

        Args:
            checkpoints: The folder of the checkpoints, and the first step.
            first_sample: Samples of all steps before the first one.
            plan: The plan of the first step.
            sees_arrivals: Whether the rows of ranks tell all arrivals (`executor.core.job.RunConfig.sees_arrivals`).

        Raises:
            InputError: The folder cannot be made.
        """
        record = checkpoints.folder.resolve() / _RECORD
        try:
            record.mkdir(exist_ok=True)
            number = max((int(path.name) for path in _folders(record)), default=-1) + 1
            found = cls(record / f"{number:04d}")
            found.path.mkdir()
            about = {
                "first_step": checkpoints.first_step,
                "first_sample": first_sample,
                "sees_arrivals": sees_arrivals,
                "plan": plan_json(plan),
            }
            write_text_atomically(found.path / _ABOUT, json.dumps(about))
        except OSError as error:
            problem, advice = f"no record can be written: {error.strerror}", "choose a folder that can be written to"
            raise InputError(problem, where=str(record), valid=advice) from error
        return found

    @property
    def published(self) -> Path:
        """File of the rows that the launcher collects."""
        return self.path / _PUBLISHED

    def begin(self, origin_s: float, *, replaces: bool) -> None:
        """Note the time of day at second 0, which is ``origin_s`` by this machine's monotonic clock.

        With ``replaces``, for a run from step 0, remove the folders of earlier runs.
        """
        for earlier in _folders(self.path.parent) if replaces else ():
            if earlier.name < self.path.name:
                shutil.rmtree(earlier, ignore_errors=True)
        (self.path / _BEGAN).write_text(repr(time.time() - time.monotonic() + origin_s))

    def add_loss(self, step: int, loss: float) -> None:
        """Note the loss of a step; of a step that is done again, the last one counts."""
        self._add(_LOSSES, [step, loss])

    def add_norms(self, norms: GradientNorms) -> None:
        """Note the gradient norms of a step."""
        self._add(_NORMS, asdict(norms))

    def add_decision(self, decision: Decision, made_s: float) -> None:
        """Note a decision, which was made at run second ``made_s``."""
        self._add(_DECISIONS, {**decision_json(decision), "made_s": made_s})

    def restore_decisions(self, stop: int) -> list[tuple[Decision, float]]:
        """Return the decisions about steps before ``stop``, with the second of each, and drop all later ones."""
        kept = [(decision, made_s) for decision, made_s in _decisions(self.path) if decision.first_step < stop]
        lines = (json.dumps({**decision_json(decision), "made_s": made_s}) for decision, made_s in kept)
        write_text_atomically(self.path / _DECISIONS, "".join(f"{line}\n" for line in lines))
        return kept

    def add_absence(self, absence: Event) -> None:
        """Note an absence of a device that is over."""
        self._add(_ABSENCES, [absence.device, absence.start_s, absence.end_s])

    def _add(self, name: str, value: Any) -> None:
        with (self.path / name).open("a") as file:
            file.write(json.dumps(value) + "\n")


@dataclass(frozen=True, slots=True)
class Attempt:
    """What an attempt has left, up to the step before ``stop``.

    Attributes:
        began_s: Time of day at second 0.
        losses: The loss of each step, where something was trained.
        decisions: The decisions, and at which second of the attempt each was made.
    """

    first_step: int
    stop: int
    first_sample: int
    began_s: float
    plan: Plan
    events: Sequence[Event]
    losses: Mapping[int, float]
    norms: Mapping[int, GradientNorms]
    decisions: Sequence[tuple[Decision, float]]

    @property
    def end_s(self) -> float:
        """When the last step ended, in seconds of the attempt."""
        return max(event.end_s for event in self.events if event.kind in _WORK)

    @property
    def last_plan(self) -> Plan:
        """The plan of the last step."""
        return self.decisions[-1][0].plan if self.decisions else self.plan


_WORK = (EventKind.COMPUTE, EventKind.SYNC)

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
    folders = _folders(checkpoints.resolve() / _RECORD)
    if record.plan.synchronisation.is_decoupled:
        if len(folders) > 1:
            tell("the record has the last attempt only: pipelines at their own speed have no step in common")
        return record
    try:
        about, began_s = _about(folders[-1])
        first_step = int(about["first_step"])
        earlier = list(_kept(folders[:-1], first_step, record.scenario.faults))[::-1]
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
        kept = _kept(_folders(checkpoints.resolve() / _RECORD), steps, ())
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
    for folder in reversed(_folders(checkpoints.folder.resolve() / _RECORD)):
        try:
            if (found := _counting(folder, stop)) is None:
                continue
            about, _ = found
            began, stop = parse_plan(about["plan"]), int(about["first_step"])
            known = [began, *(decision.plan for decision, _ in _decisions(folder))]
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
    folders = _folders(checkpoints.folder.resolve() / _RECORD)
    *earlier, last = list(_kept(folders, checkpoints.first_step, record.scenario.faults))[::-1]
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
    return min(event.start_s for event in events if event.kind in _WORK)


def _later(event: Event, offset_s: float) -> Event:
    arrived_s = event.arrived_s + offset_s if event.arrived_s >= 0 else event.arrived_s
    return replace(event, start_s=event.start_s + offset_s, end_s=event.end_s + offset_s, arrived_s=arrived_s)


def _decided(decision: Decision, made_s: float) -> Event:
    return Event(EventKind.DECISION, "", "", -1, -1, -1, decision.observed_step, "", made_s, made_s, 0)


# --- reading ---


def rows_of_ranks(paths: Iterable[Path], sees_arrivals: bool) -> list[Event]:
    """Return the rows in the event files of ranks; with ``sees_arrivals`` they tell all arrivals of messages."""
    join = with_arrivals if sees_arrivals else without_marks
    return join(event for path in paths for event in read_event_stream(path))


def losses_of_ranks(paths: Iterable[Path]) -> dict[int, float]:
    """Return the loss of each step: the sum over the files of ranks that compute a part of it."""
    total: defaultdict[int, float] = defaultdict(float)
    for path in paths:
        for step, loss in _whole_lines(path.read_text()):
            total[int(step)] += loss
    return total


def _folders(record: Path) -> list[Path]:
    return sorted(path for path in record.glob("[0-9]*") if path.name.isdigit())


def _about(folder: Path) -> tuple[Mapping[str, Any], float]:
    return json.loads((folder / _ABOUT).read_text()), float((folder / _BEGAN).read_text())


def _counting(folder: Path, stop: int) -> tuple[Mapping[str, Any], float] | None:
    """Return what `_about` does if an attempt has come to second 0, and has begun with a step before ``stop``."""
    if not (folder / _BEGAN).exists():
        return None
    about, began_s = _about(folder)
    return (about, began_s) if int(about["first_step"]) < stop else None


def _kept(folders: Sequence[Path], stop: int, faults: Sequence[Fault]) -> Iterator[Attempt]:
    """Yield the attempts that count, the last one first, as far back as no step is missing.

    An attempt that has not come to step ``stop`` is left out: the checkpoint of this step is that of one before.
    """
    for folder in reversed(folders):
        if (found := _counting(folder, stop)) is None:
            continue
        attempt = _read(folder, *found, stop, faults)
        done = {event.step for event in attempt.events if event.kind in _WORK}
        # A step has a loss if any has one: the loss is written after the rows.
        if done == set(range(attempt.first_step, stop)) and (not attempt.losses or attempt.losses.keys() == done):
            yield attempt
            stop = attempt.first_step


def _read(folder: Path, about: Mapping[str, Any], began_s: float, stop: int, faults: Sequence[Fault]) -> Attempt:
    published = folder / _PUBLISHED
    if published.exists():
        rows = read_event_stream(published)
        losses = {int(step): loss for step, loss in _lines(folder / _LOSSES)}
    else:
        rows = rows_of_ranks(files_of_ranks(folder, "events"), about["sees_arrivals"])
        losses = losses_of_ranks(files_of_ranks(folder, "losses"))
    norms = [GradientNorms.from_json(line) for line in _lines(folder / _NORMS)]
    kept = [event for event in rows if event.step < stop]
    end_s = max((event.end_s for event in kept if event.kind in _WORK), default=0.0)
    kept += fault_events([fault for fault in faults if isinstance(fault, LinkOutage)], end_s)
    for device, start_s, over_s in _lines(folder / _ABSENCES):
        if start_s < end_s:
            kept.append(fault_event(device, ABSENT, start_s, min(over_s, end_s)))
    return Attempt(
        int(about["first_step"]),
        stop,
        int(about["first_sample"]),
        began_s,
        parse_plan(about["plan"]),
        kept,
        {step: loss for step, loss in losses.items() if step < stop},
        {each.step: each for each in norms if each.step < stop},
        [(decision, made_s) for decision, made_s in _decisions(folder) if decision.first_step < stop],
    )


def _decisions(folder: Path) -> list[tuple[Decision, float]]:
    return [(parse_decision(line), float(line["made_s"])) for line in _lines(folder / _DECISIONS)]


def _lines(path: Path) -> Iterator[Any]:
    """Yield the values of a file with a JSON value in each line, which need not exist."""
    return _whole_lines(path.read_text()) if path.exists() else iter(())


def _whole_lines(text: str) -> Iterator[Any]:
    """Yield the JSON value of each line, up to a line that a killed process has left torn."""
    for line in text.splitlines(keepends=True):
        if not line.endswith("\n"):
            return
        yield json.loads(line)
