"""Adaptive accumulation: how many steps' gradients are summed before regions exchange them, by measured step times.

With f steps between exchanges and a bound of f steps on the staleness, one exchange is under way during the next f
steps. Training waits for it only if it takes longer than these; f steps then last as long as an exchange. So the time
of an exchange is measured whenever it matters::

    exchange_s = f * (measured step time), if that is clearly longer than the computed one

and the next f is the least with which the exchange ends in time, ``exchange_s <= f * (computed step time)``. Where
nothing waits, a smaller f is tried from time to time, since fresher gradients train better. A trial that makes training
wait doubles the time until the next trial.

Assumption: the public text of the paper (arXiv 2303.05330) does not say how the number of steps is chosen.
"""

from dataclasses import replace

from planner.adapt.observation import Observation
from planner.plan.plan import Plan
from planner.systems.cloudless.strategy import EXCHANGE_STEPS

# Share by which measured steps must be longer than computed ones to count as waiting.
_WAITING = 0.15

# Number of intervals over which steps are measured; the first steps of an interval are not yet held up.
_MEASURED_INTERVALS = 2

# Number of measurements without waiting before the first trial of a smaller number, and the most before a later one.
_CALM, _MOST_CALM = 4, 64


class AdaptiveAccumulation:
    """Chooses the number of steps between two exchanges during a run."""

    def __init__(self) -> None:
        self._interval_steps = 0
        self._ends_s: list[float] = []
        self._calm = 0
        self._trial_after = _CALM
        self._is_trial = False

    def choose(self, observation: Observation, plan: Plan, step_s: float) -> Plan:
        """Return the plan with the number of steps between exchanges that a step's observation suggests.

        Args:
            observation: A finished step.
            plan: The plan of the last decision.
            step_s: The computed time of a step without waiting for updates, seconds.
        """
        how = plan.synchronisation
        if how.method not in ("asgd-ga", "ma") or how.staleness_bound != how.interval_steps:
            return plan
        interval = how.interval_steps
        if observation.plan.synchronisation != how or interval != self._interval_steps:
            self._interval_steps, self._ends_s, self._calm = interval, [], 0
        self._ends_s.append(observation.end_s)
        count = _MEASURED_INTERVALS * interval
        if len(self._ends_s) <= 2 * count:
            return plan
        measured_s = (self._ends_s[-1] - self._ends_s[-1 - count]) / count
        if (len(self._ends_s) - 1) % count:
            return plan
        if measured_s > (1 + _WAITING) * step_s:
            return self._longer(plan, interval * measured_s, step_s)
        self._calm += 1
        if self._is_trial and self._calm >= _CALM:
            self._is_trial, self._trial_after = False, _CALM
        smaller = [steps for steps in EXCHANGE_STEPS if steps < interval]
        if not smaller or self._calm < self._trial_after:
            return plan
        self._is_trial = True
        return _every(plan, smaller[-1])

    def _longer(self, plan: Plan, exchange_s: float, step_s: float) -> Plan:
        if self._is_trial:
            self._is_trial, self._trial_after = False, min(2 * self._trial_after, _MOST_CALM)
        how = plan.synchronisation
        larger = [steps for steps in EXCHANGE_STEPS if steps > how.interval_steps]
        enough = next((steps for steps in larger if exchange_s <= steps * step_s), None)
        chosen = enough or (larger[-1] if larger else how.interval_steps)
        self._calm = 0
        return _every(plan, chosen)


def _every(plan: Plan, steps: int) -> Plan:
    return replace(plan, synchronisation=replace(plan.synchronisation, interval_steps=steps, staleness_bound=steps))
