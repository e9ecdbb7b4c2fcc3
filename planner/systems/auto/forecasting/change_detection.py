"""Has the mean of a series changed? Two detectors that see one value at a time: CUSUM and Page-Hinkley.

Both add up by how much values exceed a reference, less a slack, and start again from zero whenever the sum goes below
it; a sum above the threshold is a change. Each has one sum for means that rise and one for means that fall::

    up   = max(0, up   + (value - reference) - slack)
    down = max(0, down - (value - reference) - slack)

CUSUM's reference is a mean known beforehand, Page-Hinkley's the mean of all values so far. A detector is a value: it
never changes, each new one follows from the last. After a change its user starts a fresh one.

Source: Page, Continuous Inspection Schemes, Biometrika 1954; Hinkley, Inference about the Change-Point from Cumulative
Sum Tests, Biometrika 1971.
"""

import math
from dataclasses import dataclass, replace
from typing import Self

from traces.common.errors import InputError


@dataclass(frozen=True, slots=True)
class ChangeSums:
    """What both detectors are made of.

    Attributes:
        slack: Deviation that counts for nothing, in the values' unit; half of the least change worth finding is usual.
        threshold: A sum above it is a change, in the values' unit.
        up: Sum of what values exceeded the reference by.
        down: Sum of what they fell short of it by.

    Raises:
        InputError: Slack or threshold is negative or not finite.
    """

    slack: float
    threshold: float
    up: float = 0.0
    down: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.slack < math.inf or not 0 <= self.threshold < math.inf:
            raise InputError(
                f"a slack of {self.slack:g} and a threshold of {self.threshold:g}",
                valid="both are finite and not negative",
            )

    @property
    def rose(self) -> bool:
        """Whether the mean went up."""
        return self.up > self.threshold

    @property
    def fell(self) -> bool:
        """Whether the mean went down."""
        return self.down > self.threshold

    @property
    def changed(self) -> bool:
        """Whether the mean went up or down."""
        return self.rose or self.fell

    def after_deviation(self, deviation: float) -> Self:
        """Return the sums after one value more.

        Args:
            deviation: What the value exceeds the reference by, in the values' unit.
        """
        up = max(0.0, self.up + deviation - self.slack)
        down = max(0.0, self.down - deviation - self.slack)
        return replace(self, up=up, down=down)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cusum(ChangeSums):
    """Tabular CUSUM: has the mean left a target?

    Attributes:
        target: The mean of unchanged values.
    """

    target: float

    def after(self, value: float) -> Self:
        """Return the detector that has seen one ``value`` more, in the target's unit."""
        return self.after_deviation(value - self.target)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageHinkley(ChangeSums):
    """Page-Hinkley: has the mean left that of the values before?

    Attributes:
        count: Values seen.
        mean: Of all of them.
    """

    count: int = 0
    mean: float = 0.0

    def after(self, value: float) -> Self:
        """Return the detector that has seen one ``value`` more, which is part of the mean already."""
        count = self.count + 1
        mean = self.mean + (value - self.mean) / count
        return replace(self.after_deviation(value - mean), count=count, mean=mean)
