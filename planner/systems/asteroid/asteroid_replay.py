"""The policy ``asteroid-replay``: without devices that have gone, the plan goes on with shifted boundaries.

Asteroid's pipeline replay (arXiv 2408.08015) [second-hand]: a stage of several replicas goes on without the lost one;
the layers of a stage that is lost whole go to its neighbours, boundaries between stages shift in proportion to what the
groups can compute, and only layers at boundaries move. What nobody holds any more comes from backups
(`planner.adapt.backups`), and the interrupted step is done again. It decides only when devices are gone; how, and what
is ours, stands in `planner.systems.asteroid.replay`.
"""

from planner.adapt.observation import Observation
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.systems.asteroid.replay import replay


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
