"""Policy ``auto`` for workers that take outer steps: chooses what they exchange, and how often, by the law of the loss.

The time to a loss is in proportion to p t. p is the price of the settings by the law of the task's loss: how many times
as many steps they need as sums of gradients in every step (`LossLaw.price`). t is the mean time of a step with the
exchanges. The policy chooses interval, fragments, overlap and compression with the least p t, among those that the
search for a plan tries.

t is computed with the declared rates of links, all of them slower by one factor, which the measured steps tell. They
tell it where training waits for exchanges: in one step for each fragment, so that the others show how long a step takes
without, if they are the most. Where training does not wait, steps only tell the largest factor with which exchanges
stay hidden. Other settings are then tried if training would not wait with that factor either, or for `TRIAL_SHARE` of
the time since it waited last.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from statistics import mean, median

from planner.adapt.interval_search import IntervalTimes
from planner.adapt.observation import Observation
from planner.adapt.policy import DECISION_LAG_STEPS
from planner.plan.outer_step import OuterStep
from planner.plan.plan import Plan
from planner.scenario.convergence import MOST_PRICE, LossLaw
from planner.scenario.scenario import Scenario
from planner.step.evaluate import step_time_s
from planner.systems.auto.policy import AutoPolicy
from planner.systems.deepcee.observed_paths import learn_slowdowns
from planner.systems.regional.loss_plan import DILOCO, STREAMING, mode_of, most_overlap, outer_modes
from planner.systems.regional.outer_time import ExchangePaths, ExchangeTimes
from planner.systems.regional.worker_shares import WorkerShares

# Share of p t that a change must save: it makes training wait for the exchanges that are under way.
LEAST_GAIN = 0.05

# Share of the time without waiting that a trial may cost.
TRIAL_SHARE = 0.1

# Share of a step without exchanges by which measured steps must be longer, so that training counts as waiting; and by
# which this step must have changed, so that all times are computed anew.
_WAITING, _CHANGED = 0.05, 0.01

# Number of steps over which times are measured, and of those before, which may not yet wait as later ones do.
_MEASURED_STEPS = 8

# Factors by which links may be slower than declared, rising, and how many of them double one.
_DOUBLING = 8
_FACTORS = tuple(2 ** (power / _DOUBLING) for power in range(-6 * _DOUBLING, 10 * _DOUBLING + 1))

# Estimated time to compute the time of a step with exchanges, seconds (0.2 to 1.7 ms for 2 to 64 workers, measured).
_THINKING_S = 0.001


def _measured_steps(interval: int) -> int:
    """Return over how many steps an interval is measured: `_MEASURED_STEPS` or more, in whole intervals."""
    return -(-_MEASURED_STEPS // interval) * interval


class AnyMethodPolicy(AutoPolicy):
    """The policy ``auto``: `AutoPolicy` for sums of gradients, `WorkerShares` and `ExchangePolicy` for outer steps.

    Without a law of the task's loss the settings of exchanges stay. Each run needs an object of its own.
    """

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        law = scenario.training.convergence
        self._workers = WorkerShares(scenario)
        self._slowdown: dict[str, float] = {}
        self._exchanges = None if law is None else ExchangePolicy(scenario, law)

    def decide(self, observation: Observation, plan: Plan) -> Plan | None:
        """Return the plan to use from the next step on, or None to keep ``plan``."""
        if not plan.synchronisation.has_outer_step:
            return super().decide(observation, plan)
        self.thinking_s = 0.0
        learn_slowdowns(self._slowdown, observation, self._scenario)
        with_others = self._workers.decide(observation, plan, self._slowdown)
        if with_others is not None or observation.gone or self._exchanges is None:
            return with_others
        decided = self._exchanges.decide(observation, plan, self._slowdown)
        self.thinking_s = self._exchanges.thinking_s
        return decided


class ExchangePolicy:
    """Chooses the settings of exchanges for plans with ``diloco`` and ``diloco-streaming``.

    Attributes:
        thinking_s: Estimated time of the last decision on a usual machine, seconds.
    """

    def __init__(self, scenario: Scenario, law: LossLaw) -> None:
        self._scenario, self._law = scenario, law
        self.thinking_s = 0.0
        self._paths: ExchangePaths | None = None
        self._times_of: dict[tuple[int, str, str, str | None], ExchangeTimes] = {}
        self._devices: tuple[str, ...] = ()
        self._measured = IntervalTimes(_measured_steps)
        # Measured over computed time of a step without exchanges.
        self._overhead = 1.0
        # The factor of all links, as an index of `_FACTORS`: what is assumed, and the largest one that may be true.
        self._assumed = self._largest = _FACTORS.index(1.0)
        self._calm_since_s = 0.0
        # Times of a step by settings and factor, for a time of a step without exchanges.
        self._inner_s = 0.0
        self._known_s: dict[tuple[tuple[int, OuterStep], int], float] = {}

    def decide(self, observation: Observation, plan: Plan, slowdown: Mapping[str, float]) -> Plan | None:
        """Return the plan with other settings of exchanges; None if they would not save `LEAST_GAIN`.

        ``slowdown`` is the factor on a device's profiled compute times, by device.
        """
        how, self.thinking_s = plan.synchronisation, 0.0
        # The law knows no sparse exchanges.
        is_known = how.method in (DILOCO, STREAMING) and how.outer.density == 1 and self._law.covers(mode_of(plan))
        if not is_known:
            return None
        if plan.devices != self._devices:
            self._devices, self._paths, self._inner_s = plan.devices, None, 0.0
            self._times_of.clear()
            self._known_s.clear()
        expected_s = self._step_s(plan, self._assumed) if self._inner_s else inf
        steps_s = self._measured.add(observation, plan, expected_s)
        if not steps_s:
            return None
        self._learn_inner(plan, steps_s, slowdown)
        measured_s = mean(steps_s)
        self._largest = self._largest_factor(plan, measured_s)
        if measured_s > (1 + _WAITING) * self._inner_s:
            self._assumed, self._calm_since_s = self._largest, observation.end_s
            return self._better(plan, self._assumed, list(self._choices(plan)))
        self._assumed = min(self._assumed, self._largest)
        return self._trial(plan, observation.end_s)

    def _learn_inner(self, plan: Plan, steps_s: Sequence[float], slowdown: Mapping[str, float]) -> None:
        how, computed_s = plan.synchronisation, step_time_s(plan, self._scenario, slowdown=slowdown)
        if computed_s and 2 * how.outer.fragments < how.interval_steps:
            # Most steps wait for nothing.
            self._overhead = median(steps_s) / computed_s
        inner_s = self._overhead * computed_s
        if abs(inner_s - self._inner_s) > _CHANGED * self._inner_s:
            self._inner_s = inner_s
            self._known_s.clear()

    def _largest_factor(self, plan: Plan, measured_s: float) -> int:
        """Return the largest factor with which steps take a measured time, or wait for nothing if they did not."""
        limit_s = max(measured_s, self._step_s(plan, 0)) * (1 + 1e-6)
        return max(0, bisect_right(range(len(_FACTORS)), limit_s, key=lambda factor: self._step_s(plan, factor)) - 1)

    def _trial(self, plan: Plan, now_s: float) -> Plan | None:
        """Return the plan with settings that pay by a factor up to the assumed one, and cost little by the largest."""
        most_s = TRIAL_SHARE * (now_s - self._calm_since_s)
        affordable = [each for each in self._choices(plan) if self._trial_cost_s(each) <= most_s]
        for factor in range(self._assumed, -1, -_DOUBLING):
            better = self._better(plan, factor, affordable)
            if better is not None:
                self._assumed, self._calm_since_s = factor, now_s
                return better
        return None

    def _trial_cost_s(self, plan: Plan) -> float:
        """Return the seconds for which training waits by the largest factor, until that is measured."""
        steps = DECISION_LAG_STEPS + 2 * _measured_steps(plan.synchronisation.interval_steps)
        return steps * (self._step_s(plan, self._largest) - self._inner_s)

    def _better(self, plan: Plan, factor: int, choices: Sequence[Plan]) -> Plan | None:
        """Return the one of the choices with the least p t, if it saves enough."""
        present = self._score(plan, factor)
        best = min([plan, *choices], key=lambda each: self._score(each, factor))
        return best if self._score(best, factor) < (1 - LEAST_GAIN) * present else None

    def _score(self, plan: Plan, factor: int) -> float:
        return self._law.price(mode_of(plan)) * self._step_s(plan, factor)

    def _step_s(self, plan: Plan, factor: int) -> float:
        how = plan.synchronisation
        key = (how.exchange_settings, factor)
        if key not in self._known_s:
            times = self._times(plan)
            slower = replace(times, transmission_s=times.transmission_s * _FACTORS[factor])
            self._known_s[key] = slower.step_s([self._inner_s] * len(plan.pipelines), *how.exchange_settings)
            self.thinking_s += _THINKING_S
        return self._known_s[key]

    def _times(self, plan: Plan) -> ExchangeTimes:
        outer = plan.synchronisation.outer
        key = (outer.fragments, outer.pattern, outer.compression, outer.exchange)
        if key not in self._times_of:
            self._paths = self._paths or ExchangePaths(plan, self._scenario)
            self._times_of[key] = self._paths.times(outer)
        return self._times_of[key]

    def _choices(self, plan: Plan) -> Iterator[Plan]:
        """Yield the plan with all settings of its method with which training converges by the law.

        The overlap is the longest one, since links change.
        """
        how, mode, layers = plan.synchronisation, mode_of(plan), len(self._scenario.model.layers)
        for other in outer_modes(self._law, mode, (mode.method,), layers):
            if self._law.covers(other) and self._law.price(other) <= MOST_PRICE:
                overlap = most_overlap(other) if mode.method == STREAMING else 0
                outer = replace(how.outer, compression=other.compression, fragments=other.fragments)
                outer = replace(outer, overlap_steps=overlap)
                yield replace(plan, synchronisation=replace(how, interval_steps=other.interval_steps, outer=outer))
