"""A quantity that was measured in several rounds: its median, and what holds that of all that could be measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

# The median of all that could be measured lies between the least and the most of six rounds with a probability of
# 1 - 2 / 2^6 = 97 %, however they are spread, if they are independent.
ROUNDS = 6
CONFIDENCE = 1 - 2 / 2**ROUNDS


@dataclass(frozen=True, slots=True)
class Interval:
    """Of `ROUNDS` rounds, in the unit of what was measured.

    Attributes:
        least: Of the rounds.
        median: Of the rounds.
        most: Of the rounds.
    """

    least: float
    median: float
    most: float

    def scaled(self, factor: float) -> "Interval":
        """Return the same in another unit; ``factor`` is how many of them make one."""
        return Interval(factor * self.least, factor * self.median, factor * self.most)


def interval_of(values: Sequence[float]) -> Interval:
    """Return the interval of the values of several rounds, or of six groups of what was measured one by one."""
    if len(values) >= 2 * ROUNDS:
        values = [median(values[number::ROUNDS]) for number in range(ROUNDS)]
    return Interval(min(values), median(values), max(values))
