"""The error of predicted step times, learned from measured ones."""

import math
from dataclasses import dataclass

from planner.plan.plan import Plan

# Least weight of the newest step in a running mean; after 30 steps, the weights of older steps decay exponentially.
LEAST_WEIGHT = 1 / 30

# Number of steps of a plan after which the plan's own mean weighs as much as the mean of all plans of its kind
# (`_kind`).
STEPS_OF_KIND = 4

# Least standard deviation of log(measured / predicted); on steady links rounding is all that there is.
LEAST_SPREAD = 1e-3


@dataclass(slots=True)
class _Mean:
    """Running mean of log(measured / predicted) over steps."""

    value: float = 0.0
    steps: int = 0

    def learn(self, value: float) -> None:
        self.steps += 1
        self.value += max(LEAST_WEIGHT, 1 / self.steps) * (value - self.value)


class PredictionBias:
    """Factors that correct predicted step times, learned from measured step times in one run.

    A prediction assumes that link rates are constant during a step. If rates vary, the prediction is too short. The
    error depends on the kind of plan: it is largest for plans with a fixed order of actions, smaller for those with a
    dynamic order, and zero for plans on one device. The factor of a plan is learned from the plan's own steps and, as
    long as there are few, also from the steps of all plans of the same kind.
    """

    def __init__(self) -> None:
        self._plans: dict[Plan, _Mean] = {}
        self._kinds: dict[str, _Mean] = {}
        # Squares of the errors that were left with the factors of their time, by kind of plan.
        self._squares: dict[str, _Mean] = {}
        # Logarithms of the factors that new plans had before their first step, and squares of how much too low these
        # were.
        self._before: dict[Plan, float] = {}
        self._squares_of_new = _Mean()

    def learn(self, plan: Plan, measured_s: float, predicted_s: float) -> None:
        """Add the measured and the predicted time of one step of a plan, seconds."""
        value = math.log(measured_s / predicted_s)
        if plan in self._plans:
            left = value - math.log(self.factor(plan))
            self._squares.setdefault(_kind(plan), _Mean()).learn(left**2)
        elif self._plans:
            self._before[plan] = math.log(self.factor(plan))
        own = self._plans.setdefault(plan, _Mean())
        own.learn(value)
        self._kinds.setdefault(_kind(plan), _Mean()).learn(value)
        if own.steps == STEPS_OF_KIND and plan in self._before:
            self._squares_of_new.learn(max(0.0, own.value - self._before.pop(plan)) ** 2)

    def has_run(self, plan: Plan) -> bool:
        """Return whether `learn` was called for this plan."""
        return plan in self._plans

    def factor(self, plan: Plan) -> float:
        """Return the factor by which a plan's predicted step time is multiplied; 1 if no plan of its kind has run."""
        own, kind = self._plans.get(plan, _Mean()), self._kinds.get(_kind(plan), _Mean())
        return math.exp((own.steps * own.value + STEPS_OF_KIND * kind.value) / (own.steps + STEPS_OF_KIND))

    @property
    def error_of_new(self) -> float:
        """Share of a step's time by which plans that had never run were slower than predicted, 0 without any.

        The root mean square over the plans of a run but its first one. Of each plan the mean of the first
        `STEPS_OF_KIND` steps that were learned counts, against predictions for the rates that links had in them with
        the plan's factor before them; 0 if the plan was faster.
        """
        return 1 - math.exp(-math.sqrt(self._squares_of_new.value))

    def spread(self, plan: Plan) -> float | None:
        """Return the standard deviation of log(measured / predicted) that is left for a plan; None if it is unknown."""
        squares = self._squares.get(_kind(plan))
        return max(LEAST_SPREAD, math.sqrt(squares.value)) if squares is not None else None


def _kind(plan: Plan) -> str:
    return "alone" if len(plan.devices) == 1 else plan.order
