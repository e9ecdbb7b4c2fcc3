"""How many times as long as expected exchanges keep the paths between devices busy, as the steps of a run show it."""

import math
from collections import defaultdict
from collections.abc import Mapping

from planner.adapt.observation import Observation

# Least factor: a path seems quick without end where nearly all of an exchange's time is latency.
_LEAST = 2**-6

# Factors are powers of this one: two measurements of one path differ by some percent.
GRID = 2 ** (1 / 8)


class PathSlowness:
    """Measures paths over several steps; each run needs an object of its own.

    Attributes:
        factors: What was measured last, as a multiple of what was expected, rounded to a power of `GRID`, by source and
            target.
    """

    def __init__(self) -> None:
        self.factors: dict[tuple[str, str], float] = {}
        self._busy_s = defaultdict[tuple[str, str], float](float)
        self._expected_s = defaultdict[tuple[str, str], float](float)

    def add(self, observation: Observation, expected: Mapping[tuple[str, str], tuple[float, float]]) -> None:
        """Add the exchanges that a step has shown.

        ``expected`` has the busy time of a byte and the latency of a message, seconds, by source and target.
        """
        for seen in observation.paths:
            path = seen.source, seen.target
            if path in expected:
                byte_s, latency_s = expected[path]
                self._busy_s[path] += sum(max(0.0, end_s - begin_s - latency_s) for begin_s, end_s in seen.busy)
                self._expected_s[path] += byte_s * seen.size_bytes

    def learn(self) -> bool:
        """Take what was added since the last call as a measurement of its paths; return whether a factor changes."""
        before = dict(self.factors)
        for path, expected_s in self._expected_s.items():
            if expected_s > 0:
                factor = max(_LEAST, self._busy_s[path] / expected_s)
                self.factors[path] = GRID ** round(math.log(factor, GRID))
        self.forget()
        return self.factors != before

    def forget(self) -> None:
        """Forget what was added since the last call of `learn`: it is not of the present exchanges."""
        self._busy_s.clear()
        self._expected_s.clear()
