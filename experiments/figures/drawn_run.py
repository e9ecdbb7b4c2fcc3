"""One run of a picture, with what several panels need of it worked out once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from experiments.figures.link_rates import Traffic, wan_traffic
from experiments.figures.naming import run_names
from experiments.figures.style import Line, run_line
from planner.backend import RunRecord
from planner.events import EventKind
from planner.metrics import Metrics, measure, step_ends_s


@dataclass(frozen=True, slots=True)
class DrawnRun:
    """One run of a picture.

    Attributes:
        record: The run.
        name: Unique in the picture.
        colour: Of its lines and texts in panels that hold all runs.
        line: Style of its lines there.
        metrics: What it amounts to.
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
    starts_s: tuple[float, ...]
    ends_s: tuple[float, ...]
    decisions_s: Mapping[int, float]
    traffic: Mapping[str, Traffic]

    @property
    def step_times_s(self) -> tuple[float, ...]:
        """Time from the end of one step to the end of the next, seconds; the first from its start."""
        befores_s = (self.starts_s[0], *self.ends_s)
        return tuple(end_s - before_s for before_s, end_s in zip(befores_s, self.ends_s, strict=False))


def drawn_runs(records: Sequence[RunRecord]) -> tuple[DrawnRun, ...]:
    """Return the runs of a picture in order."""
    return tuple(
        DrawnRun(
            record=record,
            name=name,
            colour=run_line(index)[0],
            line=run_line(index)[1],
            metrics=measure(record),
            starts_s=_step_starts_s(record),
            ends_s=tuple(step_ends_s(record.events)),
            decisions_s={each.step: each.end_s for each in record.events if each.kind is EventKind.DECISION},
            traffic=wan_traffic(record),
        )
        for index, (record, name) in enumerate(zip(records, run_names(records), strict=True))
    )


def _step_starts_s(record: RunRecord) -> tuple[float, ...]:
    starts: dict[int, float] = {}
    for event in record.events:
        if event.kind is EventKind.COMPUTE:
            starts[event.step] = min(event.start_s, starts.get(event.step, event.start_s))
    return tuple(starts[step] for step in sorted(starts))
