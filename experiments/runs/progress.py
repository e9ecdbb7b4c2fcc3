"""How far a sweep is and how long it will take: a bar in a terminal, lines elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from experiments.runs.console import tell

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

# Between two lines where there is no terminal, seconds.
LINE_EVERY_S = 10.0

# Of the bar: more would take time from the workers.
_REFRESHES_PER_S = 2


class ProgressDisplay(Protocol):
    """Is told what is done."""

    def add(self, done: int, failed: int) -> None:
        """Take account of more points that are done, of which some have failed."""


class Lines:
    """Tells a line now and then.

    Args:
        left: Points that are to be carried out.
        before: Points that were done before.
        say: Takes a line.
        clock_s: Says what time it is, in seconds.
    """

    def __init__(
        self, left: int, before: int, say: Callable[[str], None] = tell, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._left = left
        self._before = before
        self._say = say
        self._clock_s = clock_s
        self._start_s = self._told_s = clock_s()
        self._done = self._failed = 0

    def add(self, done: int, failed: int) -> None:
        """Take account of more points that are done, of which some have failed."""
        self._done += done
        self._failed += failed
        now_s = self._clock_s()
        # Before the first point is done nobody knows how long they take.
        if now_s - self._told_s >= LINE_EVERY_S and 0 < self._done < self._left:
            self._told_s = now_s
            self._say(self._line(now_s - self._start_s))

    def _line(self, seconds: float) -> str:
        per_s = self._done / seconds
        failed = f", {self._failed} failed" if self._failed else ""
        return (
            f"{self._before + self._done} of {self._before + self._left} points{failed}, {per_s:.1f} points/s, "
            f"{duration_text((self._left - self._done) / per_s)} left"
        )


@contextmanager
def watching(left: int, points: int) -> Iterator[ProgressDisplay]:
    """Give what shows the progress on the standard error.

    Args:
        left: Points that are to be carried out.
        points: All points.
    """
    before = points - left
    tell(f"{points} points" + (f", {before} of them done already" if before else ""))
    if not sys.stderr.isatty() or not left:
        yield Lines(left, before)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    shown = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*shown, console=console, refresh_per_second=_REFRESHES_PER_S, speed_estimate_period=60) as progress:
        yield _Bar(progress, progress.add_task("", total=points, completed=before, failed=""))


class _Bar:
    """A bar of rich's."""

    def __init__(self, progress: "Progress", task: "TaskID") -> None:
        self._progress = progress
        self._task = task
        self._failed = 0

    def add(self, done: int, failed: int) -> None:
        """Take account of more points that are done, of which some have failed."""
        self._failed += failed
        text = f"{self._failed} failed" if self._failed else ""
        self._progress.update(self._task, advance=done, failed=text)


def duration_text(seconds: float) -> str:
    """Return seconds as people say them: ``45 s``, ``12 min``, ``3 h 20 min``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
