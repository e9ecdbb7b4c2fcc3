"""How far a run goes: so many steps, and no step that nobody begins before a time."""

import math


class StopCondition:
    """Says which steps are begun.

    Devices ask in any order, not in that of time: a step that one of them begins in time is everybody's.

    Args:
        steps: At most so many.
        duration_s: A step that all could begin only at or after this time is not begun; seconds.
    """

    def __init__(self, steps: int, duration_s: float = math.inf) -> None:
        self.steps = steps
        self._duration_s = duration_s
        self._opened = 0

    def allows(self, step: int, now_s: float) -> bool:
        """Return whether somebody who could begin a step at a time does so; then all others do too."""
        if now_s < self._duration_s:
            self._opened = max(self._opened, step + 1)
        return step < min(self._opened, self.steps)
