"""The search, in a run, for the least number of steps between exchanges that hides them, by measured step times.

An exchange is under way while the next steps are computed. Training waits for it only if it takes longer than these.
So its time can be measured where it matters: from how much longer than the computed ones the measured steps are. Where
nothing waits, a smaller number of steps is tried from time to time, since fresher gradients and parameters train
better. A trial that makes training wait doubles the time until the next trial.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import inf
from statistics import mean

from planner.adapt.observation import Observation
from planner.plan.plan import Plan

# Share by which measured steps must be longer than computed ones to count as waiting.
_WAITING = 0.15

# Steps that take this many times as long as expected are returned after one interval.
_URGENT = 1.5

# Number of intervals over which steps are measured; the first steps of an interval are not yet held up.
_MEASURED_INTERVALS = 2

# Number of measurements without waiting before the first trial of a smaller number, and the most before a later one.
_CALM, _MOST_CALM = 4, 64


class IntervalTimes:
    """Measures the times of steps over whole intervals, during a run.

    Args:
        least_steps: Returns over how many steps to measure with an interval, a multiple of it.
    """

    def __init__(self, least_steps: Callable[[int], int]) -> None:
        self._least_steps = least_steps
        self._settings: object = None
        self._ends_s: list[float] = []

    def add(self, observation: Observation, plan: Plan, expected_s: float = inf) -> list[float]:
        """Add a finished step.

        Args:
            observation: What was measured in the step.
            plan: The plan of the last decision.
            expected_s: The expected time of a step, seconds.

        Returns:
            The times of the last ``least_steps`` steps, seconds, if as many have just ended with the settings of
            ``plan``, and as many before. Those of the last interval if they took `_URGENT` times as long as expected.
            An empty list otherwise.
        """
        settings = tuple((each.synchronisation, each.pipelines) for each in (observation.plan, plan))
        if settings[0] != settings[1] or settings != self._settings:
            self._settings, self._ends_s = settings, []
        self._ends_s.append(observation.end_s)
        interval, steps = plan.synchronisation.interval_steps, len(self._ends_s) - 1
        count = self._least_steps(interval)
        if steps < count or steps % interval:
            return []
        if steps > count and not steps % count:
            return self._last(count)
        urgent = self._last(interval)
        return urgent if mean(urgent) > _URGENT * expected_s else []

    def _last(self, count: int) -> list[float]:
        return [after - before for before, after in pairwise(self._ends_s[-1 - count :])]


class IntervalSearch:
    """Chooses the number of steps between two exchanges during a run.

    Args:
        choices: The numbers of steps to choose from, rising.
    """

    def __init__(self, choices: Sequence[int]) -> None:
        self._choices = choices
        self._times = IntervalTimes(lambda interval: _MEASURED_INTERVALS * interval)
        self._calm = 0
        self._trial_after = _CALM
        self._is_trial = False

    def choose(self, observation: Observation, plan: Plan, step_s: float, hides: Callable[[int, float], bool]) -> int:
        """Return the number of steps between exchanges that a step's observation suggests.

        Args:
            observation: A finished step.
            plan: The plan of the last decision.
            step_s: The computed time of a step without waiting for exchanges, seconds.
            hides: Whether a number of steps hides an exchange, where a step takes a measured time, seconds.
        """
        interval, steps_s = plan.synchronisation.interval_steps, self._times.add(observation, plan)
        if not steps_s:
            return interval
        measured_s = mean(steps_s)
        if measured_s > (1 + _WAITING) * step_s:
            return self._longer(interval, lambda steps: hides(steps, measured_s))
        self._calm += 1
        if self._is_trial and self._calm >= _CALM:
            self._is_trial, self._trial_after = False, _CALM
        smaller = [steps for steps in self._choices if steps < interval]
        if not smaller or self._calm < self._trial_after:
            return interval
        self._is_trial, self._calm = True, 0
        return smaller[-1]

    def _longer(self, interval: int, hides: Callable[[int], bool]) -> int:
        if self._is_trial:
            self._is_trial, self._trial_after = False, min(2 * self._trial_after, _MOST_CALM)
        self._calm = 0
        larger = [steps for steps in self._choices if steps > interval]
        return next((steps for steps in larger if hides(steps)), larger[-1] if larger else interval)
