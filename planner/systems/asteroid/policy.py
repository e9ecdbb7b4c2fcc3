"""The policy ``heavy-rescheduling``: without devices that have gone, everything is planned anew.

The baseline of Asteroid's recovery [second-hand]: the model is gathered, the full planner runs on the devices that are
left, and the model is redistributed. `full_redistribution` says what travels then. The simulator moves only what
devices of the new plan lack, which is less.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from planner.adapt.migration import Migration, migration_between
from planner.adapt.observation import Observation
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.scenario.scenario import Scenario
from planner.systems.asteroid.hybrid_pipeline import HybridRules, hybrid_plan
from planner.systems.asteroid.replay import replay
from planner.systems.asteroid.strategy import by_memory


class AsteroidReplay:
    """Repairs the plan around what is lost; one object for one run."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario

    def decide(self, observation: Observation, plan: Plan) -> Plan | None:
        """Return the repaired plan, or None where nothing that it uses is gone.

        Raises:
            InputError: What is left cannot hold the model.
        """
        if not set(observation.gone) & set(plan.devices):
            return None
        return replay(plan, self._scenario, observation.gone)


class HeavyRescheduling:
    """Plans anew with Asteroid's planner; one object for one run."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario

    def decide(self, observation: Observation, plan: Plan) -> Plan | None:
        """Return a new plan for the devices that are left, or None where nothing that the plan uses is gone.

        Raises:
            InputError: No split fits into what is left.
        """
        if not set(observation.gone) & set(plan.devices):
            return None
        return replan(plan, self._scenario, {*observation.gone, *observation.away})


def replan(plan: Plan, scenario: Scenario, gone: Collection[str]) -> Plan:
    """Return the full planner's plan for a scenario without these devices, with microbatches of the same size.

    Raises:
        InputError: No split fits into what is left.
    """
    left = tuple(device for device in scenario.cluster.devices if device.name not in gone)
    size = max(max(pipeline.microbatches) for pipeline in plan.pipelines)
    same_size = replace(scenario, training=replace(scenario.training, microbatch=size))
    return hybrid_plan(same_size, by_memory(left), plan.strategy, HybridRules())


def full_redistribution(
    old: Plan,
    new: Plan,
    scenario: Scenario,
    gone: Collection[str],
    backups: Mapping[int, Sequence[str]],
) -> tuple[Migration, Migration]:
    """Return what travels when the model is gathered on one device, and then from there.

    Assumed: on the first device of the new plan; what it holds already does not travel, and everybody else gets all of
    its layers anew, whether it held them or not.

    Args:
        old: The plan until now.
        new: The plan from now on.
        scenario: Gives sizes and paths.
        gone: Devices that hold nothing any more.
        backups: Layer to the devices that keep a copy of its state besides.

    Raises:
        InputError: Nobody holds a layer any more.
    """
    everything = Stage(0, len(scenario.model.layers), (Replica(new.devices[0]),), 1)
    gathered = Plan(new.scenario, new.model, new.strategy, new.schedule, (Pipeline((everything,), (1,)),))
    return migration_between(old, gathered, scenario, gone, backups), migration_between(gathered, new, scenario)
