"""The search, in a run, for the least number of steps between exchanges that hides them, by measured step times.

An exchange is under way while the next steps are computed. Training waits for it only if it takes longer than these.
So its time can be measured where it matters: from how much longer than the computed ones the measured steps are. Where
nothing waits, a smaller number of steps is tried from time to time, since fresher gradients and parameters train
better. A trial that makes training wait doubles the time until the next trial.
"""

from collections.abc import Callable, Sequence

from planner.adapt.observation import Observation

# Share by which measured steps must be longer than computed ones to count as waiting.
_WAITING = 0.15

# Number of intervals over which steps are measured; the first steps of an interval are not yet held up.
_MEASURED_INTERVALS = 2

# Number of measurements without waiting before the first trial of a smaller number, and the most before a later one.
_CALM, _MOST_CALM = 4, 64


class IntervalSearch:
    """Chooses the number of steps between two exchanges during a run.

    Args:
        choices: The numbers of steps to choose from, rising.
    """

    def __init__(self, choices: Sequence[int]) -> None:
        self._choices = choices
        self._interval_steps = 0
        self._ends_s: list[float] = []
        self._calm = 0
        self._trial_after = _CALM
        self._is_trial = False

    def choose(
        self, observation: Observation, interval: int, step_s: float, hides: Callable[[int, float], bool]
    ) -> int:
        """Return the number of steps between exchanges that a step's observation suggests.

        Args:
            observation: A finished step.
            interval: The number of steps between exchanges by the plan of the last decision.
            step_s: The computed time of a step without waiting for exchanges, seconds.
            hides: Whether a number of steps hides an exchange, where a step takes a measured time, seconds.
        """
        if observation.plan.synchronisation.interval_steps != interval or interval != self._interval_steps:
            self._interval_steps, self._ends_s, self._calm = interval, [], 0
        self._ends_s.append(observation.end_s)
        count = _MEASURED_INTERVALS * interval
        if len(self._ends_s) <= 2 * count:
            return interval
        measured_s = (self._ends_s[-1] - self._ends_s[-1 - count]) / count
        if (len(self._ends_s) - 1) % count:
            return interval
        if measured_s > (1 + _WAITING) * step_s:
            return self._longer(interval, lambda steps: hides(steps, measured_s))
        self._calm += 1
        if self._is_trial and self._calm >= _CALM:
            self._is_trial, self._trial_after = False, _CALM
        smaller = [steps for steps in self._choices if steps < interval]
        if not smaller or self._calm < self._trial_after:
            return interval
        self._is_trial = True
        return smaller[-1]

    def _longer(self, interval: int, hides: Callable[[int], bool]) -> int:
        if self._is_trial:
            self._is_trial, self._trial_after = False, min(2 * self._trial_after, _MOST_CALM)
        self._calm = 0
        larger = [steps for steps in self._choices if steps > interval]
        return next((steps for steps in larger if hides(steps)), larger[-1] if larger else interval)
