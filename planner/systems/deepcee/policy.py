"""Policies ``deepcee`` and ``depth``, which adapt a plan to the observed links.

``depth`` has rules 1 to 3 of DeepCEE's adapter: it changes the microbatch count and the depths (microbatches in flight)
and never moves a layer. The plan changes if this makes the step clearly shorter, or saves memory at the same speed.

``deepcee`` has the same rules, but makes no change that only saves memory. By its rule 4, it searches for another plan
if a link has been the bottleneck for `BOUND_STEPS` steps. It changes to this plan once the time that the change would
have saved so far exceeds the time of moving the layers.

The global batch never changes.
"""

from dataclasses import replace

from planner.adapt.migration import time_to_reach_s
from planner.adapt.observation import Observation
from planner.plan.plan import Plan
from planner.scenario.cluster import Cluster
from planner.scenario.scenario import Scenario
from planner.systems.deepcee.depth_choice import EQUALLY_FAST, DepthChoice
from planner.systems.deepcee.observed_paths import ObservedPaths, with_links_on_grid, with_observed_links
from planner.systems.deepcee.strategy import counted_deepcee, dynamic_step_time_s
from traces.common.errors import InputError

# Successive steps in which a link must be the bottleneck before a search, and steps between two searches.
BOUND_STEPS = 3
SEARCH_EVERY_STEPS = 10

# Time of a search for each candidate pipeline, its share of all other work included, on one core of an AMD EPYC of
# family 25, model 17 (Zen 4), with Python 3.11, seconds: the processor time of the searches in nine settings of
# `ropebridge reproduce deepcee`, divided by their 1,452 candidates.
CANDIDATE_S = 0.0028


class DeepceePolicy:
    """The policy ``deepcee``; each run needs an object of its own.

    Attributes:
        thinking_s: Estimated time of the last decision on a usual machine, seconds: that of its search, if any.
    """

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._seen = ObservedPaths(scenario)
        self._depths = DepthChoice(scenario, self._seen)
        self._start: Plan | None = None
        self._bound_steps = 0
        self._found: Plan | None = None
        self._better_steps = 0
        self.thinking_s = 0.0

    def decide(self, observation: Observation, plan: Plan) -> Plan | None:
        """Return a better plan for the observed links, or None; after the loss of a device always None."""
        self.thinking_s = 0.0
        self._start = self._start or plan
        if observation.gone:
            return None
        self._seen.learn(observation)
        self._depths.learn_noise(plan)
        moved = self._worth_moving(plan, set(observation.away))
        if moved is not None:
            self._bound_steps, self._found, self._better_steps = 0, None, 0
            return moved
        return self._adjusted(plan, self._start)

    def _adjusted(self, plan: Plan, start: Plan) -> Plan | None:
        """Return a plan by rules 1 to 3, or None if none is clearly faster.

        The result is the run's first plan, ``start``, if it has its layers on the same devices and is as fast.
        """
        chosen = self._depths.choose(plan)
        if chosen is not None and not self._depths.is_faster(chosen, plan):
            # A plan that only saves memory is not used: more microbatches in flight bridge the next fluctuation.
            chosen = None
        if start == plan or not _same_places(start, plan) or not self._depths.is_better(start, plan):
            return chosen
        start_s = self._depths.predict_s(start)
        return start if chosen is None or start_s <= self._depths.predict_s(chosen) * (1 + EQUALLY_FAST) else chosen

    def _worth_moving(self, plan: Plan, away: set[str]) -> Plan | None:
        """Return a plan by rule 4, which has layers on other devices, or None as long as moving them does not pay.

        The candidates are the run's first plan and the plan that the last search found.
        """
        self._bound_steps = self._bound_steps + 1 if self._depths.is_bound_by_links(plan) else 0
        waited = self._bound_steps - BOUND_STEPS
        observed = with_observed_links(self._scenario, self._seen.alone)
        if waited >= 0 and waited % SEARCH_EVERY_STEPS == 0:
            self._found = self._planned(with_links_on_grid(observed, self._scenario), away)
        others = [each for each in (self._start, self._found) if each is not None and not _same_places(each, plan)]
        there_s = {
            each: dynamic_step_time_s(each, observed, self._seen.slowdown)
            for each in others
            if away.isdisjoint(each.devices)
        }
        if not there_s:
            return None
        best = min(there_s, key=lambda each: there_s[each])
        here_s = self._depths.predict_s(plan)
        if here_s < there_s[best] * (1 + self._depths.least_gain):
            self._better_steps = 0
            return None
        self._better_steps += 1
        moving_s = time_to_reach_s(plan, best, observed)
        return best if (here_s - there_s[best]) * self._better_steps >= moving_s else None

    def _planned(self, observed: Scenario, away: set[str]) -> Plan | None:
        present = tuple(device for device in observed.cluster.devices if device.name not in away)
        links = tuple(link for link in observed.cluster.links if not away & {link.source, link.target})
        try:
            found, candidates = counted_deepcee(
                replace(observed, cluster=Cluster(present, links)) if away else observed
            )
        except InputError:
            # The devices that are present have too little memory, or no links.
            return None
        self.thinking_s = CANDIDATE_S * candidates
        return found


def _same_places(one: Plan, other: Plan) -> bool:
    """Return whether the same devices hold the same layers in both plans."""
    one_places, other_places = (
        [[(stage.first_layer, stage.end_layer, stage.replicas) for stage in each.stages] for each in plan.pipelines]
        for plan in (one, other)
    )
    return one_places == other_places


class DepthPolicy:
    """The policy ``depth``; each run needs an object of its own."""

    def __init__(self, scenario: Scenario) -> None:
        self._seen = ObservedPaths(scenario)
        self._depths = DepthChoice(scenario, self._seen)

    def decide(self, observation: Observation, plan: Plan) -> Plan | None:
        """Return the plan with better microbatches and depths, or None; after the loss of a device always None."""
        if observation.gone:
            # The policy cannot replace devices, and the times of an interrupted step are incomplete.
            return None
        self._seen.learn(observation)
        self._depths.learn_noise(plan)
        return self._depths.choose(plan)
