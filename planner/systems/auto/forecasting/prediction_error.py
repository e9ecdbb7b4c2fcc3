"""How much longer steps take than is predicted for links as they were: learned while plans run.

A prediction holds for links that stand still during a step. Real ones do not: a fixed order waits for each slow moment
in turn, devices that choose among what is ready wait less, and a plan on one device not at all. What was learned of a
plan counts for it; where little was, what was learned of plans of its kind.
"""

import math
from dataclasses import dataclass

from planner.plan.plan import Plan

# What a step adds to what is known of its plan, at least: older steps fade.
LEAST_WEIGHT = 1 / 30

# What is known of a kind counts as so many steps of each plan of that kind.
STEPS_OF_KIND = 4


@dataclass(slots=True)
class _Mean:
    """Of logarithms of ratios."""

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
        """Take note of one step."""
        value = math.log(measured_s / predicted_s)
        self._plans.setdefault(plan, _Mean()).learn(value)
        self._kinds.setdefault(_kind(plan), _Mean()).learn(value)

    def has_run(self, plan: Plan) -> bool:
        """Return whether any step of the plan has been learned from."""
        return plan in self._plans

    def factor(self, plan: Plan) -> float:
        """Return what a prediction for a plan is to be multiplied by; 1 where nothing is known."""
        own, kind = self._plans.get(plan, _Mean()), self._kinds.get(_kind(plan), _Mean())
        return math.exp((own.steps * own.value + STEPS_OF_KIND * kind.value) / (own.steps + STEPS_OF_KIND))


def _kind(plan: Plan) -> str:
    return "alone" if len(plan.devices) == 1 else plan.order
