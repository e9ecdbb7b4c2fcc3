"""Which events of a run a Gantt panel shows."""

from collections.abc import Mapping
from dataclasses import dataclass

from experiments.report.data.drawn_run import DrawnRun
from experiments.report.data.labels import device_names
from planner.events.event import Event, EventKind
from planner.runs.record import RunRecord


@dataclass(frozen=True, slots=True)
class GanttRows:
    """The events of one run that a Gantt panel shows.

    Attributes:
        devices: Device to its label, from top to bottom.
        step_labels: Of each step.
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


def gantt_rows(run: DrawnRun, steps: tuple[int, int]) -> GanttRows:
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
