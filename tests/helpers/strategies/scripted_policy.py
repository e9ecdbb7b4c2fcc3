"""A policy that returns given plans at given steps."""

from collections.abc import Mapping

from planner.adapt.observation import Observation
from planner.plan.plan import Plan


class Scripted:
    """Returns what its scripts say, and keeps what it was shown.

    Args:
        plans: Observed step to the plan that is decided on when it is finished.
        answers: Devices that have gone, by name, to the plan that goes on without them; who is not named is waited for.
    """

    def __init__(self, plans: Mapping[int, Plan], answers: Mapping[tuple[str, ...], Plan] | None = None) -> None:
        self._plans = plans
        self._answers = answers or {}
        self.seen: list[Observation] = []

    def decide(self, observation: Observation, plan: Plan) -> Plan | None:
        """Return the scripted plan, if there is one."""
        self.seen.append(observation)
        if observation.gone:
            return self._answers.get(observation.gone)
        return self._plans.get(observation.step)


class Measuring(Scripted):
    """Sees unused links, too."""

    measures_unused_links = True
