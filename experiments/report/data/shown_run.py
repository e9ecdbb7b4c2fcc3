"""One run of a page, with what several of its parts need worked out once; loads no Bokeh."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from experiments.report.data.bars import Bars, bars_of
from experiments.report.data.drawn_run import DrawnRun, drawn_runs
from experiments.report.data.labels import device_names
from planner.events.log import as_log
from planner.runs.memory_timeline import MemoryTimeline, memory_timelines
from planner.runs.record import RunRecord


@dataclass(frozen=True, slots=True)
class ShownRun:
    """One run of a page.

    Attributes:
        index: Among the page's runs.
        drawn: What pictures need of it.
        devices: Device to its label, from top to bottom.
        bars: Of its Gantt.
        memory: What each device held over the run.
    """

    index: int
    drawn: DrawnRun
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


def shown_runs(records: Sequence[RunRecord], names: Sequence[str]) -> tuple[ShownRun, ...]:
    """Return the runs of a page in order, with these names."""
    in_columns = [replace(record, events=as_log(record.events)) for record in records]
    return tuple(_shown(index, drawn) for index, drawn in enumerate(drawn_runs(in_columns, names)))


def _shown(index: int, drawn: DrawnRun) -> ShownRun:
    devices = device_names(drawn.record, drawn.first_step, drawn.end_step)
    return ShownRun(index, drawn, devices, bars_of(drawn.record, devices), memory_timelines(drawn.record))
