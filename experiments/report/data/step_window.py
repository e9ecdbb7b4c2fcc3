"""Which steps of the runs a picture shows."""

from collections.abc import Sequence

import numpy as np

from experiments.report.data.drawn_run import DrawnRun
from planner.events.event import EventKind
from planner.events.log import as_log
from traces.common.errors import InputError

# Bars in a row whose numbers can be read at the width of a page, and the most steps worth showing.
_BARS = 48
_STEPS = 3


def choose_steps(runs: Sequence[DrawnRun]) -> tuple[int, int]:
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


def check_steps(runs: Sequence[DrawnRun], steps: tuple[int, int]) -> None:
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


def common_steps(runs: Sequence[DrawnRun]) -> range:
    """Return the steps that all runs have; a run that went on from a checkpoint does not begin with step 0."""
    return range(max(run.first_step for run in runs), min(run.end_step for run in runs))


def _most_bars(run: DrawnRun, step: int) -> int:
    """Return how many computes the busiest device has in a step."""
    log = as_log(run.record.events)
    own = log.is_a(EventKind.COMPUTE) & (log.columns["step"] == step)
    return int(np.bincount(log.columns["device"][own]).max())
