"""The plans that policy `auto` has found so far in a run, each by a search at certain link rates."""

from dataclasses import replace
from functools import lru_cache

from planner.check import is_possible
from planner.cost.in_flight import no_split_fits
from planner.plan.plan import Plan
from planner.scenario.cluster import Cluster, Device, Link
from planner.scenario.effects import Effects
from planner.scenario.profile import ModelProfile
from planner.scenario.scenario import Scenario
from planner.scenario.training import Training
from planner.systems.auto.objective import Objective
from planner.systems.auto.strategy import search
from traces.common.errors import InputError

# Searches use link rates of `RATE_STEP` ** n times the declared rate, since plans for closer rates differ little. The
# exponent n is between -`MOST_STEPS_DOWN` and `MOST_STEPS_UP`.
RATE_STEP = 2.0
MOST_STEPS_DOWN, MOST_STEPS_UP = 5, 1


class Portfolio:
    """The plans found so far; each run needs an object of its own."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._plans: dict[Plan, None] = {}
        self._covered: set[tuple[tuple[tuple[str, int], ...], frozenset[str]]] = set()

    def plans(self, away: frozenset[str] = frozenset()) -> list[Plan]:
        """Return all plans that use no device of ``away``, in the order in which they were found."""
        return [plan for plan in self._plans if away.isdisjoint(plan.devices)]

    def cover(self, steps: tuple[tuple[str, int], ...], away: frozenset[str]) -> None:
        """Search for a plan at some link rates and add it; do nothing if an earlier call had the same arguments.

        Args:
            steps: (name of a link, exponent n): the rate of the link is `RATE_STEP` ** n times the declared rate.
            away: Names of devices that are absent.
        """
        if (steps, away) in self._covered:
            return
        self._covered.add((steps, away))
        try:
            found = planned(_at_rates(self._scenario, steps), away)
        except InputError:
            return
        self.add(found)

    def add(self, plan: Plan) -> None:
        """Add a plan, and also the same plan with a dynamic order, which loses less time when link rates vary."""
        self._plans[plan] = None
        dynamic = replace(plan, order="dynamic")
        if is_possible(dynamic, self._scenario):
            self._plans[dynamic] = None


def planned(scenario: Scenario, away: frozenset[str] = frozenset()) -> Plan:
    """Return the plan that `search` finds with links at their declared rates, without the devices in ``away``.

    Raises:
        InputError: No plan fits into memory.
    """
    devices, links = scenario.cluster.devices, scenario.cluster.links
    steady = tuple(replace(link, trace=None) for link in links)
    return _planned(scenario.name, devices, steady, scenario.model, scenario.training, scenario.effects, away)


@lru_cache(maxsize=256)
def _planned(
    name: str,
    devices: tuple[Device, ...],
    links: tuple[Link, ...],
    model: ModelProfile,
    training: Training,
    effects: Effects,
    away: frozenset[str],
) -> Plan:
    """Return the result of `planned`, cached by the parts of the scenario because several runs need the same plan."""
    scenario = Scenario(name, Cluster(devices, links), model, training, effects=effects)
    if len(away) == len(devices):
        raise no_split_fits(scenario, "auto", [])
    return search(scenario, Objective(), without=away)


def _at_rates(scenario: Scenario, steps: tuple[tuple[str, int], ...]) -> Scenario:
    factors = {name: RATE_STEP**step for name, step in steps}
    links = tuple(
        replace(link, bandwidth_bps=link.bandwidth_bps * factors.get(link.name, 1.0), trace=None)
        for link in scenario.cluster.links
    )
    return replace(scenario, cluster=Cluster(scenario.cluster.devices, links))
