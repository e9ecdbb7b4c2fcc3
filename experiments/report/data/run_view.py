"""One run of a figure or a page, with cached values that several panels show; loads no Bokeh."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from experiments.report.data.bars import Bars, bars_of
from experiments.report.data.labels import Line, device_names, run_line, run_names
from experiments.report.data.link_rates import Traffic, busiest, wan_traffic
from planner.events.event import EventKind
from planner.events.log import as_log
from planner.runs.event_totals import EventTotals, event_totals
from planner.runs.memory_timeline import MemoryTimeline, memory_timelines
from planner.runs.metrics import Metrics, measure
from planner.runs.record import RunRecord
from planner.scenario.cluster import Link


@dataclass(frozen=True, eq=False)
class RunView:
    """One run of a figure or a page, with values derived from its record.

    Attributes:
        index: Index among the runs of the figure.
        name: Name of the run, unique in the figure.
    """

    index: int
    record: RunRecord
    name: str

    @property
    def colour(self) -> str:
        """Colour of the run's lines and texts in panels with all runs."""
        return run_line(self.index)[0]

    @property
    def line(self) -> Line:
        """Style of the run's lines in panels with all runs."""
        return run_line(self.index)[1]

    @cached_property
    def metrics(self) -> Metrics:
        """The metrics of the run."""
        return measure(self.record, self._totals)

    @cached_property
    def _totals(self) -> EventTotals:
        return event_totals(self.record.events)

    @cached_property
    def _start_of_step_s(self) -> Mapping[int, float]:
        log = as_log(self.record.events)
        computes = log.is_a(EventKind.COMPUTE)
        steps, which = np.unique(log.columns["step"][computes], return_inverse=True)
        starts_s = np.full(len(steps), np.inf)
        np.minimum.at(starts_s, which, log.columns["start_s"][computes])
        return dict(zip(steps.tolist(), starts_s.tolist(), strict=True))

    @property
    def first_step(self) -> int:
        """Index of the first step, which is not 0 for a run that was resumed from a checkpoint."""
        return min(self._start_of_step_s)

    @property
    def end_step(self) -> int:
        """Index of the last step, plus 1."""
        return self.first_step + len(self._start_of_step_s)

    @cached_property
    def starts_s(self) -> tuple[float, ...]:
        """Start of each step's first compute, seconds from the start of the run."""
        return tuple(self._start_of_step_s.values())

    @cached_property
    def ends_s(self) -> tuple[float, ...]:
        """End of each step, seconds from the start of the run."""
        return tuple(self._totals.step_ends_s)

    @property
    def end_s(self) -> float:
        """End of the last step, seconds from the start of the run."""
        return max(self.ends_s)

    @cached_property
    def step_times_s(self) -> tuple[float, ...]:
        """Time from the end of one step to the end of the next, seconds; for the first step, from its start."""
        befores_s = (self.starts_s[0], *self.ends_s)
        return tuple(end_s - before_s for before_s, end_s in zip(befores_s, self.ends_s, strict=False))

    @cached_property
    def decisions_s(self) -> Mapping[int, float]:
        """Maps the observed step of each decision to the time of the decision, seconds from the start of the run."""
        log = as_log(self.record.events)
        decided = log.is_a(EventKind.DECISION)
        return dict(zip(log.columns["step"][decided].tolist(), log.columns["end_s"][decided].tolist(), strict=True))

    @cached_property
    def traffic(self) -> Mapping[str, Traffic]:
        """Traffic of each link between regions, by the link's name."""
        return wan_traffic(self.record)

    @cached_property
    def devices(self) -> Mapping[str, str]:
        """Maps each device to its label, from top to bottom."""
        return device_names(self.record, self.first_step, self.end_step)

    @cached_property
    def bars(self) -> Bars:
        """Bars of the run's Gantt."""
        return bars_of(self.record, self.devices)

    @cached_property
    def memory(self) -> Mapping[str, MemoryTimeline]:
        """Memory of each device over the run."""
        return memory_timelines(self.record)

    @property
    def peak_bytes(self) -> Mapping[str, float]:
        """Peak memory of each device."""
        return {device: float(timeline.held_bytes.max()) for device, timeline in self.memory.items()}


def run_views(records: Sequence[RunRecord], names: Sequence[str] | None = None) -> tuple[RunView, ...]:
    """Return views of runs in order, with the given names or those of `run_names`."""
    named = zip(records, names or run_names(records), strict=True)
    return tuple(RunView(index, record, name) for index, (record, name) in enumerate(named))


def shown_links(runs: Sequence[RunView], most_pairs: int) -> tuple[Link, ...]:
    """Return the links that get a panel: both directions between the pairs of regions with the most traffic."""
    links = {link.name: link for run in runs for link in run.record.scenario.cluster.links}
    return busiest(links.values(), [run.traffic for run in runs], most_pairs)
