"""Which steps of the runs a picture shows."""

from collections import Counter
from collections.abc import Sequence

from experiments.figures.drawn_run import DrawnRun
from planner.events import EventKind
from traces.errors import InputError

# Bars in a row whose numbers can be read at the width of a page, and the most steps worth showing.
_BARS = 48
_STEPS = 3


def choose_steps(runs: Sequence[DrawnRun]) -> tuple[int, int]:
    """Return the steps to show, the first and the one after the last.

    The last step before the first change of plan and the first one after it, side by side; if the plan never
    changes, as many in the middle of the run as can be read.
    """
    count = _common_steps(runs)
    changes = [each.first_step for run in runs for each in run.record.decisions if 0 < each.first_step < count]
    if changes:
        return min(changes) - 1, min(changes) + 1
    length = min(count, _STEPS, max(1, _BARS // max(_most_bars(run, count // 2) for run in runs)))
    first = (count - length) // 2
    return first, first + length


def check_steps(runs: Sequence[DrawnRun], steps: tuple[int, int]) -> None:
    """Check that every run has the steps.

    Raises:
        InputError: Some run does not have them all, or there are none between the two.
    """
    count = _common_steps(runs)
    first, end = steps
    if not 0 <= first < end <= count:
        raise InputError(
            f"steps {first} up to {end} cannot be drawn",
            where="steps",
            valid=f"the runs have {count}, counted from 0; give the first and the one after the last",
        )


def _common_steps(runs: Sequence[DrawnRun]) -> int:
    return min(len(run.starts_s) for run in runs)


def _most_bars(run: DrawnRun, step: int) -> int:
    """Return how many computes the busiest device has in a step."""
    events = (event for event in run.record.events if event.step == step and event.kind is EventKind.COMPUTE)
    return max(Counter(event.device for event in events).values())
