"""The policy ``depth``: microbatch count and in-flight depth follow what the links carry.

The first three rules of DeepCEE's adapter (`planner.systems.deepcee.deepcee`) and no more: it never moves a layer. The
plan changes when the best choice for what was observed is clearly faster, or as fast with less in memory. The global
batch never changes.
"""

from planner.adapt.observation import Observation
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.systems.deepcee.depth_choice import MOST_MICROBATCHES_PER_STAGE, DepthChoice
from planner.systems.deepcee.observed_paths import ObservedPaths

__all__ = ["MOST_MICROBATCHES_PER_STAGE", "DepthPolicy"]


class DepthPolicy:
    """Raises and lowers in-flight depth and microbatch count; one object for one run."""

    def __init__(self, scenario: Scenario) -> None:
        self._seen = ObservedPaths(scenario)
        self._depths = DepthChoice(scenario, self._seen)

    def decide(self, observation: Observation, plan: Plan) -> Plan | None:
        """Return the plan with the best depths for the observed paths, or None if it gains too little."""
        if observation.gone:
            # It has no other devices to offer, and a part of a step says nothing about how fast things are.
            return None
        self._seen.learn(observation)
        return self._depths.choose(plan)
