"""Detection of changes in the mean of a series, as that of a link's rates."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class PageHinkley:
    """State of a Page-Hinkley test, which finds a change of the mean of a series, one value after the other.

    Every value updates the mean of all values so far, then two sums. If a sum is above the threshold, the mean of the
    series has changed, and the caller starts a new test::

        up   = max(0, up   + (value - mean) - slack)
        down = max(0, down - (value - mean) - slack)

    Sources: Page, Continuous Inspection Schemes, Biometrika 1954; Hinkley, Inference about the Change-Point from
    Cumulative Sum Tests, Biometrika 1971.

    Attributes:
        slack: Deviation that is ignored, in the values' unit; usually half of the least change worth finding.
        threshold: Limit above which a sum means a change, in the values' unit.
        up: Sum of deviations above the mean, as defined above.
        down: Sum of deviations below the mean, as defined above.
        count: Number of values so far.
        mean: Mean of all values so far.
    """

    slack: float
    threshold: float
    up: float = 0.0
    down: float = 0.0
    count: int = 0
    mean: float = 0.0

    @property
    def changed(self) -> bool:
        """Whether one of the two sums is above the threshold."""
        return max(self.up, self.down) > self.threshold

    def after(self, value: float) -> "PageHinkley":
        """Return the state after one more ``value``."""
        count = self.count + 1
        mean = self.mean + (value - self.mean) / count
        deviation = value - mean
        up = max(0.0, self.up + deviation - self.slack)
        down = max(0.0, self.down - deviation - self.slack)
        return replace(self, up=up, down=down, count=count, mean=mean)
