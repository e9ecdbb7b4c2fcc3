"""Policy ``streaming``: sets interval and overlap of Streaming DiLoCo so that exchanges hide in compute.

The arrival of a pseudo-gradient is not part of the step after which it was sent, so that its time is taken from the
steps: workers that wait for exchanges take longer than computed. In an interval of H steps, each of n fragments is
waited for after as many steps as the overlap o has::

    H (measured - computed) = n (exchange_s - o computed)

The next interval is the least whose overlap hides such an exchange. The overlap is a quarter of the interval, as in the
runs by which convergence is measured. Rarer exchanges cost steps to a loss: where nothing waits, a shorter interval is
tried from time to time (`planner.adapt.interval_search`). The interval is never longer than that of the law of the
task's loss, if the scenario names one. Workers whose devices are away are left out meanwhile.
"""

from dataclasses import replace
from math import inf

from planner.adapt.interval_search import IntervalSearch
from planner.adapt.observation import Observation
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.step.evaluate import step_time_s
from planner.systems.deepcee.observed_paths import learn_slowdowns
from planner.systems.regional.loss_plan import INTERVALS, STREAMING, mode_of, most_overlap
from planner.systems.regional.worker_shares import WorkerShares


class StreamingPolicy:
    """The policy ``streaming``; each run needs an object of its own. It leaves plans with other methods alone."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._slowdown: dict[str, float] = {}
        law = scenario.training.convergence
        self._most = inf if law is None else law.most_interval
        self._search: IntervalSearch | None = None
        self._workers = WorkerShares(scenario)

    def decide(self, observation: Observation, plan: Plan) -> Plan | None:
        """Return the plan with another interval and overlap, or the workers that are there; None if it stays."""
        how = plan.synchronisation
        if how.method != STREAMING:
            return None
        learn_slowdowns(self._slowdown, observation, self._scenario)
        with_others = self._workers.decide(observation, plan, self._slowdown)
        if with_others is not None or observation.gone:
            return with_others
        mode = mode_of(plan)
        if self._search is None:
            # An interval of one step has no overlap.
            self._search = IntervalSearch([each for each in INTERVALS if max(2, mode.fragments) <= each <= self._most])
        step_s = step_time_s(plan, self._scenario, slowdown=self._slowdown)

        def hides(steps: int, measured_s: float) -> bool:
            waited_s = mode.interval_steps * (measured_s - step_s) / mode.fragments
            exchange_s = waited_s + how.outer.overlap_steps * step_s
            return exchange_s <= most_overlap(replace(mode, interval_steps=steps)) * step_s

        steps = self._search.choose(observation, plan, step_s, hides)
        if steps == mode.interval_steps:
            return None
        outer = replace(how.outer, overlap_steps=most_overlap(replace(mode, interval_steps=steps)))
        return replace(plan, synchronisation=replace(how, interval_steps=steps, outer=outer))
