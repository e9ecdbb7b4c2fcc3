"""What carries out points, wherever that is."""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from experiments.sweep.carrying_out import PointTask, Tally
from experiments.sweep.points import Point

# A worker is asked for so much at a time: enough that asking costs little, not so much that others wait at the end.
PORTION_S = 0.5
MOST_IN_PORTION = 200


@dataclass(frozen=True, slots=True)
class Portion:
    """Points that one worker was given together.

    Attributes:
        points: In the order in which they are carried out.
        tally: None where the worker died: what it had done is in its log.
    """

    points: Sequence[Point]
    tally: Tally | None


class Engine(Protocol):
    """Carries out points in processes of its own, which write what comes out into logs of their own."""

    def carry_out(self, task: PointTask, points: Sequence[Point], *, alone: bool) -> Generator[Portion, None, None]:
        """Carry out all points; yield each portion when it has come to its end.

        Closing the iterator ends everything that is under way.

        Args:
            task: What workers have to know besides.
            points: In the order in which they are begun.
            alone: Each has a process that does nothing else: when it dies, this point was the reason.

        Raises:
            RunError: There are no workers.
        """


class Portioner:
    """Cuts points into portions that take `PORTION_S`, as far as those before say how long that is.

    Args:
        points: All of them.
        workers: That share them; the last portions are small, so that all end together.
    """

    def __init__(self, points: Sequence[Point], workers: int) -> None:
        self._points = points
        self._workers = workers
        self._next = 0
        self._point_s = PORTION_S

    @property
    def has_more(self) -> bool:
        """Whether there are points that are in no portion yet."""
        return self._next < len(self._points)

    def learn(self, tally: Tally) -> None:
        """Take account of what a portion took."""
        self._point_s = tally.wall_s / tally.done

    def __iter__(self) -> Iterator[Sequence[Point]]:
        while self.has_more:
            left = len(self._points) - self._next
            share = -(-left // (4 * self._workers))
            count = max(1, min(int(PORTION_S / max(self._point_s, 1e-6)), share, MOST_IN_PORTION))
            self._next += count
            yield self._points[self._next - count : self._next]
