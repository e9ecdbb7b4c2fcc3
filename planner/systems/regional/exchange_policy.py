"""Policy ``auto`` for workers that take outer steps: chooses what they exchange, and how often, by the law of the loss.

The time to a loss is in proportion to p t. p is the price of the settings by the law of the task's loss: how many times
as many steps they need as sums of gradients in every step (`LossLaw.price`). t is the mean time of a step with the
exchanges. The policy chooses interval, fragments, overlap and compression with the least p t, among those that the
search for a plan tries.

t is computed with the declared rates of links, all of them slower by one factor, which the measured steps tell. They
tell it where training waits for exchanges: in one step for each fragment, so that the others show how long a step takes
without. Where it does not wait, they only tell the largest factor with which exchanges stay hidden. So settings that
pay with faster links are tried, when the loss that they can cause with that largest factor is at most `TRIAL_SHARE` of
the time without waiting before.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import inf
from statistics import mean, median

from planner.adapt.interval_search import MEASURED_INTERVALS, IntervalTimes
from planner.adapt.observation import Observation
from planner.adapt.policy import DECISION_LAG_STEPS
from planner.plan.outer_step import OuterStep
from planner.plan.plan import Plan
from planner.scenario.convergence import LossLaw
from planner.scenario.scenario import Scenario
from planner.step.evaluate import step_time_s
from planner.systems.auto.policy import AutoPolicy
from planner.systems.deepcee.observed_paths import learn_slowdowns
from planner.systems.regional.loss_plan import DILOCO, STREAMING, mode_of, most_overlap
from planner.systems.regional.outer_time import ExchangePaths, ExchangeTimes
from planner.systems.regional.search import FRAGMENTS, INTERVALS

# Share of p t that a change must save: it makes training wait for the exchanges that are under way.
LEAST_GAIN = 0.05

# Share of the time without waiting that a trial may cost.
TRIAL_SHARE = 0.1

# Share of a step without exchanges by which measured steps must be longer, so that training counts as waiting.
_WAITING = 0.05

# Factors by which links may be slower than declared, rising, and how many of them double one.
_DOUBLING = 8
_SLOWER = tuple(2 ** (power / _DOUBLING) for power in range(-6 * _DOUBLING, 10 * _DOUBLING + 1))


class AnyMethodPolicy(AutoPolicy):
    """The policy ``auto``: `AutoPolicy`, and `ExchangePolicy` for outer steps if the law of the loss is known.

    Each run needs an object of its own.
    """

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        law = scenario.training.convergence
        self._exchanges = None if law is None else ExchangePolicy(scenario, law)

    def decide(self, observation: Observation, plan: Plan) -> Plan | None:
        """Return the plan to use from the next step on, or None to keep ``plan``."""
        if plan.synchronisation.has_outer_step:
            return self._exchanges.decide(observation, plan) if self._exchanges is not None else None
        return super().decide(observation, plan)


class ExchangePolicy:
    """Chooses the settings of exchanges for plans with ``diloco`` and ``diloco-streaming``."""

    def __init__(self, scenario: Scenario, law: LossLaw) -> None:
        self._scenario, self._law = scenario, law
        self._slowdown: dict[str, float] = {}
        self._paths: ExchangePaths | None = None
        self._times_of: dict[tuple[int, str, str], ExchangeTimes] = {}
        self._measured = IntervalTimes()
        # Measured over computed time of a step without exchanges.
        self._longer = 1.0
        # The factor of all links, as an index of `_SLOWER`.
        self._slower = _SLOWER.index(1.0)
        self._calm_since_s = 0.0
        # Times of a step by settings and factor, for a time of a step without exchanges.
        self._inner_s = 0.0
        self._known_s: dict[tuple[tuple[int, OuterStep], int], float] = {}

    def decide(self, observation: Observation, plan: Plan) -> Plan | None:
        """Return the plan with other settings of exchanges; None if they would not save `LEAST_GAIN`."""
        how = plan.synchronisation
        # The law knows no sparse exchanges.
        is_known = how.method in (DILOCO, STREAMING) and how.outer.density == 1 and self._law.covers(mode_of(plan))
        if not is_known or observation.gone:
            return None
        learn_slowdowns(self._slowdown, observation, self._scenario)
        expected_s = self._step_s(plan, self._slower) if self._inner_s else inf
        steps_s = self._measured.add(observation, plan, expected_s)
        if not steps_s:
            return None
        self._learn_inner(plan, steps_s)
        measured_s, choices = mean(steps_s), list(self._choices(plan))
        most = self._most_slower(plan, measured_s)
        is_waiting = measured_s > (1 + _WAITING) * self._inner_s
        if is_waiting or most < self._slower:
            self._slower = most
        if is_waiting:
            self._calm_since_s = observation.end_s
        better = self._better(plan, self._slower, choices)
        return better or self._trial(plan, observation.end_s, choices)

    def _learn_inner(self, plan: Plan, steps_s: Sequence[float]) -> None:
        how, computed_s = plan.synchronisation, step_time_s(plan, self._scenario, slowdown=self._slowdown)
        if 2 * how.outer.fragments < how.interval_steps:
            # Most steps wait for nothing.
            self._longer = median(steps_s) / computed_s
        # Rounded, so that times of steps need not be computed anew each time.
        inner_s = float(f"{self._longer * computed_s:.3g}")
        if inner_s != self._inner_s:
            self._inner_s = inner_s
            self._known_s.clear()

    def _most_slower(self, plan: Plan, measured_s: float) -> int:
        """Return the largest factor with which steps take a measured time, or wait for nothing if they did not."""
        limit_s = max(measured_s, self._step_s(plan, 0)) * (1 + 1e-6)
        return max(0, bisect_right(range(len(_SLOWER)), limit_s, key=lambda slower: self._step_s(plan, slower)) - 1)

    def _trial(self, plan: Plan, now_s: float, choices: Sequence[Plan]) -> Plan | None:
        """Return the plan with settings that pay if links are faster than they may be; None if that costs too much."""
        most_s = TRIAL_SHARE * (now_s - self._calm_since_s)
        affordable = [each for each in choices if self._loss_s(each) <= most_s]
        for slower in range(self._slower - _DOUBLING, -1, -_DOUBLING):
            better = self._better(plan, slower, affordable)
            if better is not None:
                self._slower, self._calm_since_s = slower, now_s
                return better
        return None

    def _loss_s(self, plan: Plan) -> float:
        """Return the seconds for which training waits, if links are as slow as they may be, until that is measured."""
        steps = DECISION_LAG_STEPS + 2 * MEASURED_INTERVALS * plan.synchronisation.interval_steps
        return steps * (self._step_s(plan, self._slower) - self._inner_s)

    def _better(self, plan: Plan, slower: int, choices: Sequence[Plan]) -> Plan | None:
        """Return the one of the choices with the least p t, if it saves enough."""
        present = self._score(plan, slower)
        best = min([plan, *choices], key=lambda each: self._score(each, slower))
        return best if self._score(best, slower) < (1 - LEAST_GAIN) * present else None

    def _score(self, plan: Plan, slower: int) -> float:
        return self._law.price(mode_of(plan)) * self._step_s(plan, slower)

    def _step_s(self, plan: Plan, slower: int) -> float:
        how = plan.synchronisation
        key = (how.exchange_settings, slower)
        if key not in self._known_s:
            times = self._times(plan)
            longer = replace(times, transmission_s=times.transmission_s * _SLOWER[slower])
            self._known_s[key] = longer.step_s([self._inner_s] * len(plan.pipelines), *how.exchange_settings)
        return self._known_s[key]

    def _times(self, plan: Plan) -> ExchangeTimes:
        outer = plan.synchronisation.outer
        key = (outer.fragments, outer.pattern, outer.compression)
        if key not in self._times_of:
            # The workers and their paths stay in a run.
            self._paths = self._paths or ExchangePaths(plan, self._scenario)
            self._times_of[key] = self._paths.times(outer)
        return self._times_of[key]

    def _choices(self, plan: Plan) -> Iterator[Plan]:
        """Yield the plan with all settings of its method that the law covers."""
        how, mode, layers = plan.synchronisation, mode_of(plan), len(self._scenario.model.layers)
        fragments = (1,) if mode.method == DILOCO else tuple(each for each in FRAGMENTS if each <= layers)
        for compression, count, interval in product(self._law.compressions, fragments, INTERVALS):
            if count <= interval <= self._law.most_interval:
                other = replace(mode, compression=compression, fragments=count, interval_steps=interval)
                overlap = most_overlap(other) if mode.method == STREAMING else 0
                outer = replace(how.outer, compression=compression, fragments=count, overlap_steps=overlap)
                yield replace(plan, synchronisation=replace(how, interval_steps=interval, outer=outer))
