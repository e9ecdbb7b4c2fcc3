"""Adaptive accumulation: how many steps' gradients are summed before regions exchange them, by measured step times.

With f steps between exchanges and a bound of f steps on the staleness, one exchange is under way during the next f
steps. If training waits for it, f steps last as long as an exchange::

    exchange_s = f * (measured step time)

and the next f is the least with which the exchange ends in time, ``exchange_s <= f * (computed step time)``.

Assumption: the public text of the paper (arXiv 2303.05330) does not say how the number of steps is chosen.
"""

from dataclasses import replace

from planner.adapt.interval_search import IntervalSearch
from planner.adapt.observation import Observation
from planner.plan.plan import Plan
from planner.systems.cloudless.strategy import EXCHANGE_STEPS


class AdaptiveAccumulation:
    """Chooses the number of steps between two exchanges during a run."""

    def __init__(self) -> None:
        self._search = IntervalSearch(EXCHANGE_STEPS)

    def choose(self, observation: Observation, plan: Plan, step_s: float) -> Plan:
        """Return the plan with the number of steps between exchanges that a step's observation suggests.

        Args:
            observation: A finished step.
            plan: The plan of the last decision.
            step_s: The computed time of a step without waiting for updates, seconds.
        """
        how = plan.synchronisation
        interval = how.interval_steps
        if how.method not in ("asgd-ga", "ma") or how.staleness_bound != interval:
            return plan

        def hides(steps: int, measured_s: float) -> bool:
            return interval * measured_s <= steps * step_s

        steps = self._search.choose(observation, plan, step_s, hides)
        return replace(plan, synchronisation=replace(how, interval_steps=steps, staleness_bound=steps))
