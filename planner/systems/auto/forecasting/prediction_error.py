"""The bias of predicted step times: the ratio of measured to predicted seconds, learned while plans run.

A prediction assumes that rates are constant during a step. Where they vary, a fixed order waits for each slow moment in
turn, a dynamic order waits less, and a plan on one device not at all. The factor of a plan is learned from its own
steps, and from those of plans of its kind as long as it has few.
"""

import math
from dataclasses import dataclass

from planner.plan.plan import Plan

# Least weight of the newest step: older steps fade.
LEAST_WEIGHT = 1 / 30

# The mean of a kind counts as much as so many steps of the plan itself.
STEPS_OF_KIND = 4


@dataclass(slots=True)
class _Mean:
    """Running mean of logarithms of ratios."""

    value: float = 0.0
    steps: int = 0

    def learn(self, value: float) -> None:
        self.steps += 1
        self.value += max(LEAST_WEIGHT, 1 / self.steps) * (value - self.value)


class PredictionBias:
    """Ratios of measured to predicted seconds of a step; one object for one run."""

    def __init__(self) -> None:
        self._plans: dict[Plan, _Mean] = {}
        self._kinds: dict[str, _Mean] = {}

    def learn(self, plan: Plan, measured_s: float, predicted_s: float) -> None:
        """Learn from one step of a plan."""
        value = math.log(measured_s / predicted_s)
        self._plans.setdefault(plan, _Mean()).learn(value)
        self._kinds.setdefault(_kind(plan), _Mean()).learn(value)

    def has_run(self, plan: Plan) -> bool:
        """Return whether any step of the plan has been learned from."""
        return plan in self._plans

    def factor(self, plan: Plan) -> float:
        """Return the factor by which a prediction for a plan is multiplied; 1 if nothing is known."""
        own, kind = self._plans.get(plan, _Mean()), self._kinds.get(_kind(plan), _Mean())
        return math.exp((own.steps * own.value + STEPS_OF_KIND * kind.value) / (own.steps + STEPS_OF_KIND))


def _kind(plan: Plan) -> str:
    return "alone" if len(plan.devices) == 1 else plan.order
