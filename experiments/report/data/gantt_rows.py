"""Selects the steps and events of runs for the Gantt charts of a figure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from experiments.report.data.labels import device_names
from experiments.report.data.run_view import RunView
from planner.events.event import Event, EventKind
from planner.events.log import as_log
from planner.runs.record import RunRecord
from traces.common.errors import InputError


@dataclass(frozen=True, slots=True)
class GanttRows:
    """The events of one run that a Gantt panel shows.

    Attributes:
        devices: Maps each device to its label, from top to bottom.
        starts_s: Start of each step shown, seconds from the start of the first of them.
        work: Events of compute and of all-reduces.
        waits: Receives for which a device was idle.
        origin_s: Start of the first step shown, seconds from the start of the run.
    """

    devices: Mapping[str, str]
    step_labels: tuple[str, ...]
    starts_s: tuple[float, ...]
    work: tuple[Event, ...]
    waits: tuple[Event, ...]
    origin_s: float

    @property
    def span_s(self) -> float:
        """Return the seconds from the start of the first step shown to the end of the last work."""
        return max(event.end_s for event in self.work) - self.origin_s


def gantt_rows(run: RunView, steps: tuple[int, int]) -> GanttRows:
    """Return the events of a run in the steps from ``steps[0]`` to ``steps[1] - 1``."""
    first, end = steps
    record, starts_s = run.record, run.starts_s[first - run.first_step : end - run.first_step]
    shown = [event for event in record.events if first <= event.step < end]
    return GanttRows(
        devices=device_names(record, first, end),
        step_labels=tuple(_step_label(record, step) for step in range(first, end)),
        starts_s=tuple(start_s - starts_s[0] for start_s in starts_s),
        work=tuple(event for event in shown if event.kind in (EventKind.COMPUTE, EventKind.SYNC)),
        waits=tuple(event for event in shown if event.kind is EventKind.RECEIVE),
        origin_s=starts_s[0],
    )


def _step_label(record: RunRecord, step: int) -> str:
    """Return the label of a step: its number, and the decision whose plan it is the first to run."""
    numbers = [number for number, each in enumerate(record.decisions, start=1) if each.first_step == step]
    return f"step {step}" + "".join(f", decision {number}" for number in numbers)


# Most bars in a row whose numbers are legible at the width of a page, and most steps to show.
_BARS = 48
_STEPS = 3


def choose_steps(runs: Sequence[RunView]) -> tuple[int, int]:
    """Choose the steps to show; return the first step and the last step plus 1.

    If the plan changes, these are the last step before the first change and the first step after it. Otherwise they
    are as many steps in the middle of the run as are legible.

    Raises:
        InputError: The runs have no step in common.
    """
    common = common_steps(runs)
    if not common:
        spans = ", ".join(f"{run.name}: {run.first_step} to {run.end_step - 1}" for run in runs)
        raise InputError(f"the runs have no step in common ({spans})", where="runs", valid="report them one by one")
    changes = [each.first_step for run in runs for each in run.record.decisions if each.first_step in common[1:]]
    if changes:
        return min(changes) - 1, min(changes) + 1
    middle = common[len(common) // 2]
    length = min(len(common), _STEPS, max(1, _BARS // max(_most_bars(run, middle) for run in runs)))
    first = common[(len(common) - length) // 2]
    return first, first + length


def common_steps(runs: Sequence[RunView]) -> range:
    """Return the steps that all runs have; a run that was resumed from a checkpoint lacks the steps before it."""
    return range(max(run.first_step for run in runs), min(run.end_step for run in runs))


def _most_bars(run: RunView, step: int) -> int:
    log = as_log(run.record.events)
    own = log.is_a(EventKind.COMPUTE) & (log.columns["step"] == step)
    return int(np.bincount(log.columns["device"][own]).max())
