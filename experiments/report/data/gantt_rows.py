"""Which events of a run a Gantt panel shows."""

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
        devices: Device to its label, from top to bottom.
        starts_s: When each step began, seconds from the start of the first.
        work: Compute and gradient sums.
        waits: Receives that a device stood still for.
        origin_s: Start of the first step, seconds from the start of the run.
    """

    devices: Mapping[str, str]
    step_labels: tuple[str, ...]
    starts_s: tuple[float, ...]
    work: tuple[Event, ...]
    waits: tuple[Event, ...]
    origin_s: float

    @property
    def span_s(self) -> float:
        """Seconds from the start of the first step to the end of the last work."""
        return max(event.end_s for event in self.work) - self.origin_s


def gantt_rows(run: RunView, steps: tuple[int, int]) -> GanttRows:
    """Return what a Gantt panel of these steps shows; the steps are the first and the one after the last."""
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
    """Name a step, and the decision that it is the first to follow."""
    numbers = [number for number, each in enumerate(record.decisions, start=1) if each.first_step == step]
    return f"step {step}" + "".join(f", decision {number}" for number in numbers)


# Bars in a row whose numbers can be read at the width of a page, and the most steps worth showing.
_BARS = 48
_STEPS = 3


def choose_steps(runs: Sequence[RunView]) -> tuple[int, int]:
    """Return the steps to show, the first and the one after the last.

    The last step before the first change of plan and the first one after it, side by side; if the plan never
    changes, as many in the middle of the run as can be read.

    Raises:
        InputError: There is no step that all runs have.
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


def check_steps(runs: Sequence[RunView], steps: tuple[int, int]) -> None:
    """Check that every run has the steps.

    Raises:
        InputError: Some run does not have them all, or there are none between the two.
    """
    common = common_steps(runs)
    first, end = steps
    if not common.start <= first < end <= common.stop:
        known = f"{len(common)}, counted from {common.start}"
        raise InputError(
            f"steps {first} up to {end} cannot be drawn",
            where="steps",
            valid=f"the runs have {known}; give the first and the one after the last",
        )


def common_steps(runs: Sequence[RunView]) -> range:
    """Return the steps that all runs have; a run that went on from a checkpoint does not begin with step 0."""
    return range(max(run.first_step for run in runs), min(run.end_step for run in runs))


def _most_bars(run: RunView, step: int) -> int:
    log = as_log(run.record.events)
    own = log.is_a(EventKind.COMPUTE) & (log.columns["step"] == step)
    return int(np.bincount(log.columns["device"][own]).max())
