"""Chooses, during a run, what workers exchange for their outer steps, and how often, by the law of the loss.

The time to a loss is in proportion to p t. p is the price of the settings by the law of the task's loss: how many times
as many steps they need as sums of gradients in every step (`LossLaw.price`). t is the mean time of a step with the
exchanges. Of the intervals, fragments, overlaps and compressions that the search for a plan tries, those with the least
p t are chosen.

t is computed with the rates that the exchanges themselves show, whether training waits for them or not, and with the
time of a step without exchanges. Where most steps wait for nothing, the measured ones tell by how much that differs
from the computed one. On links that change by the second training waits for longer than the mean rates explain, since
an exchange is as late as its latest message. A factor on the times of all messages accounts for that: the one with
which the measured steps are explained, and while training waits for nothing at most the largest one that allows it,
and less from one measurement to the next.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from statistics import mean, median

from planner.adapt.interval_search import IntervalTimes
from planner.adapt.observation import Observation
from planner.plan.outer_step import OuterStep
from planner.plan.plan import Pipeline, Plan
from planner.scenario.convergence import MOST_PRICE, Floats, LossLaw, TrainingMode
from planner.scenario.scenario import Scenario
from planner.step.evaluate import step_time_s
from planner.systems.regional.loss_plan import DILOCO, STREAMING, mode_of, most_overlap, outer_modes
from planner.systems.regional.outer_time import ExchangePaths, ExchangeTimes
from planner.systems.regional.path_slowness import GRID, PathSlowness

# Share of p t that a change must save: it makes training wait for the exchanges that are under way.
LEAST_GAIN = 0.05

# Number of steps over which times are measured, and of those before, which may not yet wait as later ones do.
_MEASURED_STEPS = 8

# Share of a step without exchanges by which measured steps must be longer, so that training counts as waiting.
_WAITING = 0.05

# Factors on the times of all messages as powers of `GRID`: the largest one, and by how much it falls in a measurement.
_MOST_LATE, _CALMER = 80, 1

# Share by which compute times must have changed, so that all times of steps are computed anew; and the most sets of
# workers that are kept.
_CHANGED, _MOST_SETS = 0.01, 8

# Difference of two step times by rounding, as a share.
_ROUNDING = 1e-6

# Estimated time to compute the time of a step with exchanges, seconds (0.2 to 1.7 ms for 2 to 64 workers, measured).
_THINKING_S = 0.001

# The same for the paths between new workers, for each layer of a pair (0.5 s for 64 workers and 12 layers, measured).
_THINKING_OF_A_LAYER_S = 1e-5


def measured_steps(interval: int) -> int:
    """Return over how many steps an interval is measured: `_MEASURED_STEPS` or more, in whole intervals."""
    return -(-_MEASURED_STEPS // interval) * interval


class _Workers:
    """What the exchanges of some workers take at the declared rates, by the settings of the outer step."""

    def __init__(self, plan: Plan, scenario: Scenario) -> None:
        self.paths = ExchangePaths(plan, scenario)
        self._times: dict[tuple[int, str, str, str | None], ExchangeTimes] = {}
        self._expected: dict[OuterStep, dict[tuple[str, str], tuple[float, float]]] = {}

    def times(self, outer: OuterStep) -> ExchangeTimes:
        key = (outer.fragments, outer.pattern, outer.compression, outer.exchange)
        if key not in self._times:
            self._times[key] = self.paths.times(outer)
        return self._times[key]

    def expected(self, outer: OuterStep) -> dict[tuple[str, str], tuple[float, float]]:
        if outer not in self._expected:
            self._expected = {outer: self.paths.expected(outer)}
        return self._expected[outer]


class ExchangeSettings:
    """Chooses the settings of exchanges for plans with ``diloco`` and ``diloco-streaming``.

    Attributes:
        thinking_s: Estimated time of the last decision on a usual machine, seconds.
        measured_s: Time of the steps whose measurement the last observation completed, seconds; 0 if it completed none.
    """

    def __init__(self, scenario: Scenario, law: LossLaw) -> None:
        self._scenario, self._law = scenario, law
        self.thinking_s = self.measured_s = 0.0
        self._slowdown: Mapping[str, float] = {}
        # The factors with which times were computed.
        self._computed_with: dict[str, float] = {}
        self._slowness = PathSlowness()
        self._workers: dict[tuple[str, ...], _Workers] = {}
        self._measured = IntervalTimes(measured_steps)
        # Measured over computed time of a step without exchanges.
        self._overhead = 1.0
        self._inner_s: dict[tuple[Pipeline, ...], float] = {}
        # The factor on the times of all messages, as a power of `GRID`.
        self._late = 0
        # Times of a step by workers, settings and that power, at the rates that were seen last.
        self._known_s: dict[tuple[tuple[Pipeline, ...], tuple[int, OuterStep], int], float] = {}

    def decide(self, observation: Observation, plan: Plan, slowdown: Mapping[str, float]) -> Plan | None:
        """Return the plan with other settings of exchanges; None if they would not save `LEAST_GAIN`.

        ``slowdown`` is the factor on a device's profiled compute times, by device.
        """
        how, self.thinking_s, self.measured_s = plan.synchronisation, 0.0, 0.0
        # The law knows no sparse exchanges.
        is_known = how.method in (DILOCO, STREAMING) and how.outer.density == 1 and self._law.covers(mode_of(plan))
        if not is_known:
            return None
        self._slowdown = slowdown
        if observation.plan.exchange_set_up == plan.exchange_set_up:
            self._slowness.add(observation, self._of(plan).expected(how.outer))
        else:
            self._slowness.forget()
        steps_s = self._measured.add(observation, plan, self.step_s(plan))
        if not steps_s:
            return None
        self.measured_s = sum(steps_s)
        if self._slowness.learn():
            self._known_s.clear()
        self._learn_inner(plan, steps_s)
        self._learn_late(plan, mean(steps_s))
        best_s, best = self.best(plan)
        return best if best_s < (1 - LEAST_GAIN) * self.score(plan) else None

    def best(self, plan: Plan) -> tuple[float, Plan]:
        """Return the least p t of a plan's workers, seconds, and the plan with the settings that have it."""
        best_s, best, inner_s = self.score(plan), plan, self._computed_s(plan)
        for price, mode in self._modes(plan):
            if price * inner_s >= best_s:
                # No step is shorter than one without exchanges.
                break
            other = _with_exchanges(plan, mode)
            if (score := price * self.step_s(other)) < best_s:
                best_s, best = score, other
        return best_s, best

    def least(self, plan: Plan) -> float:
        """Return p t of a plan's workers if exchanges took no time, seconds, which none of their settings undercuts."""
        return min((price for price, _ in self._modes(plan)), default=inf) * self._computed_s(plan)

    def score(self, plan: Plan) -> float:
        """Return p t of a plan, seconds."""
        return self._law.price(mode_of(plan)) * self.step_s(plan)

    def step_s(self, plan: Plan) -> float:
        """Return the mean time of a step with exchanges at the rates that were seen last, seconds."""
        return self._step_s(plan, self._late)

    def times(self, plan: Plan) -> ExchangeTimes:
        """Return what the exchanges of a plan take at the rates that were seen last."""
        return self._times(plan, self._late)

    def factors(self, plan: Plan) -> Floats:
        """Return how many times as slow as declared the slowest path between two workers is, [workers, workers]."""
        return self._factors(plan, self._late)

    def _step_s(self, plan: Plan, late: int) -> float:
        key = (plan.pipelines, plan.synchronisation.exchange_settings, late)
        if key not in self._known_s:
            inner_s = [self._computed_s(plan)] * len(plan.pipelines)
            self._known_s[key] = self._times(plan, late).step_s(inner_s, *plan.synchronisation.exchange_settings)
            self.thinking_s += _THINKING_S
        return self._known_s[key]

    def _times(self, plan: Plan, late: int) -> ExchangeTimes:
        times = self._of(plan).times(plan.synchronisation.outer)
        return replace(times, transmission_s=times.transmission_s * self._factors(plan, late))

    def _factors(self, plan: Plan, late: int) -> Floats:
        return GRID**late * self._of(plan).paths.factors(self._slowness.factors)

    def _learn_late(self, plan: Plan, measured_s: float) -> None:
        """Learn the largest factor that measured steps allow; while training waits for nothing, it falls."""
        limit_s = max(measured_s, self._step_s(plan, 0)) * (1 + _ROUNDING)
        above = bisect_right(range(_MOST_LATE), limit_s, key=lambda late: self._step_s(plan, late))
        is_waiting = measured_s > (1 + _WAITING) * self._computed_s(plan)
        self._late = max(0, above - 1 if is_waiting else min(above - 1, self._late - _CALMER))

    def _of(self, plan: Plan) -> _Workers:
        if plan.devices not in self._workers:
            if len(self._workers) >= _MOST_SETS:
                del self._workers[next(iter(self._workers))]
            self._workers[plan.devices] = _Workers(plan, self._scenario)
            pairs = len(plan.pipelines) * (len(plan.pipelines) - 1)
            self.thinking_s += _THINKING_OF_A_LAYER_S * pairs * len(self._scenario.model.layers)
        return self._workers[plan.devices]

    def _computed_s(self, plan: Plan) -> float:
        """Return the time of a step without exchanges, seconds."""
        if plan.pipelines not in self._inner_s:
            self._inner_s[plan.pipelines] = self._overhead * step_time_s(plan, self._scenario, slowdown=self._slowdown)
        return self._inner_s[plan.pipelines]

    def _learn_inner(self, plan: Plan, steps_s: Sequence[float]) -> None:
        how, overhead = plan.synchronisation, self._overhead
        computed_s = step_time_s(plan, self._scenario, slowdown=self._slowdown)
        if computed_s and 2 * how.outer.fragments < how.interval_steps:
            # Most steps wait for nothing.
            overhead = median(steps_s) / computed_s
        factors = [(each, self._computed_with.get(device, 1.0)) for device, each in self._slowdown.items()]
        if any(abs(now - then) > _CHANGED * then for now, then in [(overhead, self._overhead), *factors]):
            self._overhead, self._computed_with = overhead, dict(self._slowdown)
            self._inner_s.clear()
            self._known_s.clear()

    def _modes(self, plan: Plan) -> list[tuple[float, TrainingMode]]:
        """Return the ways to train by a plan's method with which it converges by the law, by rising price."""
        mode, layers = mode_of(plan), len(self._scenario.model.layers)
        covered = filter(self._law.covers, outer_modes(self._law, mode, (mode.method,), layers))
        priced = ((self._law.price(each), each) for each in covered)
        return sorted((each for each in priced if each[0] <= MOST_PRICE), key=lambda each: each[0])


def _with_exchanges(plan: Plan, mode: TrainingMode) -> Plan:
    """Return a plan with the exchanges of a mode and the longest overlap, since links change."""
    how = plan.synchronisation
    overlap = most_overlap(mode) if mode.method == STREAMING else 0
    outer = replace(how.outer, compression=mode.compression, fragments=mode.fragments, overlap_steps=overlap)
    return replace(plan, synchronisation=replace(how, interval_steps=mode.interval_steps, outer=outer))
