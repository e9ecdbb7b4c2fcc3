"""After which steps pipelines that train without a barrier exchange updates, and before which steps they settle."""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class ExchangeSteps:
    """The exchanges of a run, or of a part of it with one interval, numbered from 0.

    An exchange follows every ``interval_steps`` steps. Pipelines *settle* before every step whose number is a multiple
    of ``settle_every``: they wait until all updates of earlier steps have arrived, and apply them. So that nothing is
    missing then, an exchange also follows the step before, and with ``settle_every`` the last step of the run; the next
    interval begins anew.

    Attributes:
        first_step: Number of the first step.
        steps: Number of the step after the last one.
        settle_every: Number of steps between two settlements; 0 for none.
        ends_early: Whether an exchange follows the last step in any case, since another interval begins after it.
    """

    interval_steps: int
    first_step: int
    steps: int
    settle_every: int = 0
    ends_early: bool = False

    def settles(self, step: int) -> bool:
        """Return whether pipelines settle before a step."""
        return bool(self.settle_every) and self.first_step < step < self.steps and step % self.settle_every == 0

    def before(self, step: int) -> int:
        """Return the number of exchanges that follow the steps before ``step``, of this run."""
        found, start, step = 0, self.first_step, min(step, self.steps)
        if self.settle_every:
            first_end = min(self.settlement_after(start), self.steps)
            if step >= first_end:
                spans = (step - first_end) // self.settle_every
                found = self._rounded_up(first_end - start) + spans * self._rounded_up(self.settle_every)
                start = first_end + spans * self.settle_every
        rest = max(0, step - start)
        is_last = step == self.steps and bool(self.settle_every or self.ends_early)
        return found + (self._rounded_up(rest) if is_last else rest // self.interval_steps)

    def settlement_after(self, step: int) -> int:
        """Return the next step after ``step`` before which pipelines settle, if the run is long enough."""
        return (step // self.settle_every + 1) * self.settle_every

    def _rounded_up(self, steps: int) -> int:
        return -(-steps // self.interval_steps)


class Exchanges:
    """The exchanges of a run whose interval may change between two steps.

    Where the interval changes, an exchange follows the step before.
    """

    def __init__(self, interval_steps: int, first_step: int, steps: int, settle_every: int = 0) -> None:
        self.first_step, self.steps = first_step, steps
        self._parts = [ExchangeSteps(interval_steps, first_step, steps, settle_every)]
        # Number of exchanges before each part.
        self._numbers = [0]

    def change(self, step: int, interval_steps: int) -> None:
        """Begin another interval before a step, which is later than that of the last change."""
        last = self._parts[-1]
        if interval_steps == last.interval_steps:
            return
        self._parts[-1] = replace(last, steps=step, ends_early=True)
        self._numbers.append(self._numbers[-1] + self._parts[-1].before(step))
        self._parts.append(replace(last, interval_steps=interval_steps, first_step=step))

    def settles(self, step: int) -> bool:
        """Return whether pipelines settle before a step."""
        return step > self.first_step and replace(self._parts[-1], first_step=self.first_step).settles(step)

    def before(self, step: int) -> int:
        """Return the number of exchanges that follow the steps before ``step``, of this run."""
        part = max(0, bisect_right(self._parts, step, key=lambda each: each.first_step) - 1)
        return self._numbers[part] + self._parts[part].before(step)

    def follows(self, step: int) -> bool:
        """Return whether an exchange follows a step."""
        return self.before(step + 1) > self.before(step)

    def last_step(self, exchange: int) -> int:
        """Return the step that an exchange follows."""
        return bisect_left(range(self.steps), exchange + 1, lo=self.first_step, key=lambda step: self.before(step + 1))

    def end_of(self, count: int) -> int:
        """Return the number of the step after those whose updates the first ``count`` exchanges contain."""
        return self.last_step(count - 1) + 1 if count else self.first_step

    def last_before_settling(self, step: int) -> int | None:
        """Return the exchange just before pipelines settle for the first time after ``step`` begins; None if never."""
        last = self._parts[-1]
        if not last.settle_every:
            return None
        return self.before(min(last.settlement_after(step), self.steps)) - 1
