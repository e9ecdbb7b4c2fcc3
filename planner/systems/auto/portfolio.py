"""Candidate plans for links as they are or may become, kept from one look at them to the next."""

from dataclasses import replace
from functools import lru_cache

from planner.check import check_plan
from planner.cost.in_flight import no_split_fits
from planner.plan.plan import Plan
from planner.scenario.cluster import Cluster, Device, Link
from planner.scenario.effects import Effects
from planner.scenario.profile import ModelProfile
from planner.scenario.scenario import Scenario
from planner.scenario.training import Training
from planner.systems.auto.objective import Objective
from planner.systems.auto.search import search
from traces.common.errors import InputError

# Rates are told apart by this factor: plans for rates closer than that differ little.
RATE_STEP = 2.0
MOST_STEPS_DOWN, MOST_STEPS_UP = 5, 1


class Portfolio:
    """Plans that were looked for so far; one object for one run.

    Args:
        scenario: What is trained, and where.
        start: The plan of the first step.
    """

    def __init__(self, scenario: Scenario, start: Plan) -> None:
        self._scenario = scenario
        self._plans: dict[Plan, None] = {}
        self._known: set[tuple[tuple[tuple[str, int], ...], frozenset[str]]] = set()
        self._add(start)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """All plans, in the order in which they were found."""
        return tuple(self._plans)

    def cover(self, steps: tuple[tuple[str, int], ...], away: frozenset[str]) -> None:
        """Look for a plan for links at these rates, unless that was done before.

        Args:
            steps: Link name to its rate: steps of `RATE_STEP` above or below what is declared.
            away: Devices that are not there.
        """
        if (steps, away) in self._known:
            return
        self._known.add((steps, away))
        try:
            found = planned(_at_rates(self._scenario, steps), away)
        except InputError:
            return
        self._add(found)

    def _add(self, plan: Plan) -> None:
        """A plan, and the same with devices that choose among what is ready: links that sway upset a fixed order."""
        self._plans[plan] = None
        swaying = replace(plan, order="dynamic")
        try:
            check_plan(swaying, self._scenario)
        except InputError:
            return
        self._plans[swaying] = None


def planned(scenario: Scenario, away: frozenset[str] = frozenset()) -> Plan:
    """Return the search's plan for declared rates.

    Raises:
        InputError: Nothing fits.
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
    """By values, since several runs ask for the same."""
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
