"""What an attempt has left in its folder."""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from executor.control.record.arrivals import with_arrivals, without_marks
from executor.core.job import files_of_ranks
from planner.adapt.gradient_noise import GradientNorms
from planner.adapt.policy import Decision
from planner.events.event import ABSENT, Event, EventKind, fault_event, fault_events, read_event_stream
from planner.files.plan import parse_decision, parse_plan
from planner.plan.plan import Plan
from planner.scenario.faults import Absence, Fault

RECORD, ABOUT, BEGAN = "record", "attempt.json", "began"
PUBLISHED, LOSSES, NORMS = "published.arrows", "losses.jsonl", "norms.jsonl"
DECISIONS, ABSENCES = "decisions.jsonl", "absences.jsonl"


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
        return max(event.end_s for event in self.events if event.kind in WORK)

    @property
    def last_plan(self) -> Plan:
        """The plan of the last step."""
        return self.decisions[-1][0].plan if self.decisions else self.plan


# The events in which devices train.
WORK = (EventKind.COMPUTE, EventKind.SYNC)


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


def attempt_folders(checkpoints: Path) -> list[Path]:
    """Return the folders of all attempts at the run whose checkpoints are in a folder, in their order."""
    return sorted(path for path in (checkpoints.resolve() / RECORD).glob("[0-9]*") if path.name.isdigit())


def beginning_of(folder: Path) -> tuple[Mapping[str, Any], float]:
    """Return what an attempt noted when it began, and the time of day at its second 0."""
    return json.loads((folder / ABOUT).read_text()), float((folder / BEGAN).read_text())


def counting(folder: Path, stop: int) -> tuple[Mapping[str, Any], float] | None:
    """Return what `beginning_of` does if an attempt has come to second 0, and has begun with a step before ``stop``."""
    if not (folder / BEGAN).exists():
        return None
    about, began_s = beginning_of(folder)
    return (about, began_s) if int(about["first_step"]) < stop else None


def kept_attempts(folders: Sequence[Path], stop: int, faults: Sequence[Fault]) -> Iterator[Attempt]:
    """Yield the attempts that count, the last one first, as far back as no step is missing.

    An attempt that has not come to step ``stop`` is left out: the checkpoint of this step is that of one before.
    """
    for folder in reversed(folders):
        if (found := counting(folder, stop)) is None:
            continue
        attempt = _read(folder, *found, stop, faults)
        done = {event.step for event in attempt.events if event.kind in WORK}
        # A step has a loss if any has one: the loss is written after the rows.
        if done == set(range(attempt.first_step, stop)) and (not attempt.losses or attempt.losses.keys() == done):
            yield attempt
            stop = attempt.first_step


def _read(folder: Path, about: Mapping[str, Any], began_s: float, stop: int, faults: Sequence[Fault]) -> Attempt:
    published = folder / PUBLISHED
    if published.exists():
        rows = read_event_stream(published)
        losses = {int(step): loss for step, loss in _lines(folder / LOSSES)}
    else:
        rows = rows_of_ranks(files_of_ranks(folder, "events"), about["sees_arrivals"])
        losses = losses_of_ranks(files_of_ranks(folder, "losses"))
    norms = [GradientNorms.from_json(line) for line in _lines(folder / NORMS)]
    kept = [event for event in rows if event.step < stop]
    end_s = max((event.end_s for event in kept if event.kind in WORK), default=0.0)
    kept += fault_events([fault for fault in faults if not isinstance(fault, Absence)], end_s)
    for device, start_s, over_s in _lines(folder / ABSENCES):
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
        [(decision, made_s) for decision, made_s in decisions_of(folder) if decision.first_step < stop],
    )


def decisions_of(folder: Path) -> list[tuple[Decision, float]]:
    """Return the decisions of an attempt, and at which second of it each was made."""
    return [(parse_decision(line), float(line["made_s"])) for line in _lines(folder / DECISIONS)]


def _lines(path: Path) -> Iterator[Any]:
    """Yield the values of a file with a JSON value in each line, which need not exist."""
    return _whole_lines(path.read_text()) if path.exists() else iter(())


def _whole_lines(text: str) -> Iterator[Any]:
    """Yield the JSON value of each line, up to a line that a killed process has left torn."""
    for line in text.splitlines(keepends=True):
        if not line.endswith("\n"):
            return
        yield json.loads(line)
