"""One run of a page, with what several of its parts need worked out once; loads no Bokeh."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from experiments.report.data.bars import Bars, bars_of
from experiments.report.data.labels import device_names, run_names
from experiments.report.data.link_rates import Traffic, wan_traffic
from experiments.report.data.style import Line, run_line
from planner.events.event import EventKind
from planner.events.log import as_log
from planner.runs.memory_timeline import MemoryTimeline, memory_timelines
from planner.runs.metrics import Metrics, measure, step_ends_s
from planner.runs.record import RunRecord


@dataclass(frozen=True, slots=True)
class RunView:
    """One run of a picture.

    Attributes:
        record: The run to show.
        name: Unique in the picture.
        colour: Of its lines and texts in panels that hold all runs.
        line: Style of its lines there.
        metrics: What it amounts to.
        first_step: Index of its first step, which is not 0 where it went on from a checkpoint.
        starts_s: When each step's first compute began, seconds from the start of the run.
        ends_s: When each step ended, seconds from the start of the run.
        decisions_s: Observed step of each decision to when it was made, seconds from the start of the run.
        traffic: What each link between regions carried, by the link's name.
    """

    record: RunRecord
    name: str
    colour: str
    line: Line
    metrics: Metrics
    first_step: int
    starts_s: tuple[float, ...]
    ends_s: tuple[float, ...]
    decisions_s: Mapping[int, float]
    traffic: Mapping[str, Traffic]

    @property
    def end_step(self) -> int:
        """Index after the last step."""
        return self.first_step + len(self.starts_s)

    @property
    def step_times_s(self) -> tuple[float, ...]:
        """Time from the end of one step to the end of the next, seconds; the first from its start."""
        befores_s = (self.starts_s[0], *self.ends_s)
        return tuple(end_s - before_s for before_s, end_s in zip(befores_s, self.ends_s, strict=False))


def run_views(records: Sequence[RunRecord], names: Sequence[str] | None = None) -> tuple[RunView, ...]:
    """Return the runs of a picture in order, with these names or those of `run_names`."""
    named = zip(records, names or run_names(records), strict=True)
    return tuple(_run_view(index, record, name) for index, (record, name) in enumerate(named))


def _run_view(index: int, record: RunRecord, name: str) -> RunView:
    starts_s, (colour, line) = _step_starts_s(record), run_line(index)
    return RunView(
        record=record,
        name=name,
        colour=colour,
        line=line,
        metrics=measure(record),
        first_step=min(starts_s),
        starts_s=tuple(starts_s.values()),
        ends_s=tuple(step_ends_s(record.events)),
        decisions_s=_decisions_s(record),
        traffic=wan_traffic(record),
    )


def _step_starts_s(record: RunRecord) -> dict[int, float]:
    """When each step's first compute began, by step, in their order."""
    log = as_log(record.events)
    computes = log.is_a(EventKind.COMPUTE)
    steps, which = np.unique(log.columns["step"][computes], return_inverse=True)
    starts_s = np.full(len(steps), np.inf)
    np.minimum.at(starts_s, which, log.columns["start_s"][computes])
    return dict(zip(steps.tolist(), starts_s.tolist(), strict=True))


def _decisions_s(record: RunRecord) -> dict[int, float]:
    log = as_log(record.events)
    decided = log.is_a(EventKind.DECISION)
    return dict(zip(log.columns["step"][decided].tolist(), log.columns["end_s"][decided].tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class PageRun:
    """One run of a page.

    Attributes:
        index: Among the page's runs.
        drawn: What pictures need of it.
        devices: Device to its label, from top to bottom.
        bars: Of its Gantt.
        memory: What each device held over the run.
    """

    index: int
    drawn: RunView
    devices: Mapping[str, str]
    bars: Bars
    memory: Mapping[str, MemoryTimeline]

    @property
    def end_s(self) -> float:
        """When the last step ended, seconds from the start of the run."""
        return max(self.drawn.ends_s)

    @property
    def peak_bytes(self) -> Mapping[str, float]:
        """The most that each device held."""
        return {device: float(timeline.held_bytes.max()) for device, timeline in self.memory.items()}


def page_runs(records: Sequence[RunRecord], names: Sequence[str]) -> tuple[PageRun, ...]:
    """Return the runs of a page in order, with these names."""
    in_columns = [replace(record, events=as_log(record.events)) for record in records]
    return tuple(_shown(index, drawn) for index, drawn in enumerate(run_views(in_columns, names)))


def _shown(index: int, drawn: RunView) -> PageRun:
    devices = device_names(drawn.record, drawn.first_step, drawn.end_step)
    return PageRun(index, drawn, devices, bars_of(drawn.record, devices), memory_timelines(drawn.record))
