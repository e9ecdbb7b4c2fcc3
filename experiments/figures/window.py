"""Which steps a picture shows, and when they started; loads no matplotlib."""

from collections import Counter
from collections.abc import Sequence

from planner.backend import RunRecord
from planner.events import EventKind
from traces.errors import InputError

# Bars in a row that can still be told apart at the width of a page, and the most steps worth showing.
_BARS = 48
_STEPS = 3


def step_starts_s(record: RunRecord) -> list[float]:
    """Return when each step's first compute began, in seconds from the start of the run."""
    starts: dict[int, float] = {}
    for event in record.events:
        if event.kind is EventKind.COMPUTE:
            starts[event.step] = min(event.start_s, starts.get(event.step, event.start_s))
    return [starts[step] for step in sorted(starts)]


def choose_steps(records: Sequence[RunRecord]) -> tuple[int, int]:
    """Return the steps to show, the first and the one after the last: few enough to read.

    They lie around the first change of plan, so that before and after stand side by side; in the middle of
    the run if it has none.
    """
    count = _common_steps(records)
    length = min(count, _STEPS, max(1, _BARS // _most_bars(records, count // 2)))
    changes = [each.first_step for record in records for each in record.decisions if 0 < each.first_step < count]
    if changes and length > 1:
        first = min(changes) - 1
    else:
        first = (count - length) // 2
    first = min(first, count - length)
    return first, first + length


def check_steps(records: Sequence[RunRecord], steps: tuple[int, int]) -> None:
    """Check that every run has the steps.

    Raises:
        InputError: Some run does not have them all, or there are none between the two.
    """
    count = _common_steps(records)
    first, end = steps
    if not 0 <= first < end <= count:
        raise InputError(
            f"steps {first} up to {end} cannot be drawn",
            where="steps",
            valid=f"the runs have steps 0 up to {count}; give the first and the one after the last",
        )


def _common_steps(records: Sequence[RunRecord]) -> int:
    return min(len(step_starts_s(record)) for record in records)


def _most_bars(records: Sequence[RunRecord], step: int) -> int:
    return max(
        max(Counter(e.device for e in record.events if e.step == step and e.kind is EventKind.COMPUTE).values())
        for record in records
    )
