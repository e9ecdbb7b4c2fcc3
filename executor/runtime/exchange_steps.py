"""After which steps pipelines that train without a barrier exchange updates, and before which steps they settle."""

from bisect import bisect_left
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class ExchangeSteps:
    """The exchanges of a run, numbered from 0.

    An exchange follows every ``interval_steps`` steps. Pipelines *settle* before every step whose number is a multiple
    of ``settle_every``: they wait until all updates of earlier steps have arrived, and apply them. So that nothing is
    missing then, an exchange also follows the step before, and with ``settle_every`` the last step of the run; the next
    interval begins anew.

    Attributes:
        first_step: Number of the run's first step.
        steps: Number of the step after the last one.
        settle_every: Number of steps between two settlements; 0 for none.
    """

    interval_steps: int
    first_step: int
    steps: int
    settle_every: int = 0

    def settles(self, step: int) -> bool:
        """Return whether pipelines settle before a step."""
        return bool(self.settle_every) and self.first_step < step < self.steps and step % self.settle_every == 0

    def before(self, step: int) -> int:
        """Return the number of exchanges that follow the steps before ``step``, of this run."""
        if not self.settle_every:
            return max(0, step - self.first_step) // self.interval_steps
        found, start = 0, self.first_step
        first_end = min(self._settlement_after(start), self.steps)
        if step >= first_end:
            found += self._rounded_up(first_end - start)
            spans, _ = divmod(min(step, self.steps) - first_end, self.settle_every)
            found += spans * self._rounded_up(self.settle_every)
            start = first_end + spans * self.settle_every
        rest = max(0, step - start)
        return found + (self._rounded_up(rest) if step >= self.steps else rest // self.interval_steps)

    def follows(self, step: int) -> bool:
        """Return whether an exchange follows a step."""
        return self.before(step + 1) > self.before(step)

    def last_step(self, exchange: int) -> int:
        """Return the step that an exchange follows."""
        return bisect_left(range(self.steps), exchange + 1, lo=self.first_step, key=lambda step: self.before(step + 1))

    def last_before_settling(self, step: int) -> float:
        """Return the exchange just before pipelines settle for the first time after ``step`` begins; inf if never."""
        if not self.settle_every:
            return inf
        return self.before(min(self._settlement_after(step), self.steps)) - 1

    def _settlement_after(self, step: int) -> int:
        return (step // self.settle_every + 1) * self.settle_every

    def _rounded_up(self, steps: int) -> int:
        return -(-steps // self.interval_steps)
