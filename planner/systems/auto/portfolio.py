"""The plans that policy `auto` has found so far in a run, each by a search at certain rates and latencies of links."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from planner.adapt.observation import on_grid
from planner.check import is_possible
from planner.cost.in_flight import no_split_fits
from planner.plan.plan import Plan
from planner.scenario.cluster import Cluster, Device, Link
from planner.scenario.effects import Effects
from planner.scenario.profile import ModelProfile
from planner.scenario.scenario import ModelCode, Scenario
from planner.scenario.training import Training
from planner.step.orders import with_found_orders
from planner.systems.auto.candidates.compressed import with_compressions
from planner.systems.auto.forecasting.link_rates import Links, are_near, declared_links, with_links
from planner.systems.auto.objective import Objective
from planner.systems.auto.search import search
from traces.common.errors import InputError

# Time in which a search looks at a candidate plan: for each device, and for each microbatch in each stage, seconds.
# Fitted to 18 searches on clusters of 2 and 4 devices, on one core: 5 % off in the median, 27 % at most.
DEVICE_S, MICROBATCH_S = 0.00024, 0.000024

# Function from a scenario and names of absent devices to a plan and the estimated time of the search, as `searched`.
Searched = Callable[[Scenario, frozenset[str]], tuple[Plan, float]]


class Portfolio:
    """The plans found so far; each run needs an object of its own.

    Args:
        search: Function that searches for a plan.

    Attributes:
        searching_s: Estimated time of all searches so far on a usual machine, seconds.
    """

    def __init__(self, scenario: Scenario, search: Searched) -> None:
        self.searching_s = 0.0
        self._search = search
        self._scenario = scenario
        self._declared = declared_links(scenario)
        self._plans: dict[Plan, None] = {}
        self._covered: list[tuple[Links, frozenset[str]]] = []

    def plans(self, away: frozenset[str] = frozenset()) -> list[Plan]:
        """Return all plans that use no device of ``away``, in the order in which they were found."""
        return [plan for plan in self._plans if away.isdisjoint(plan.devices)]

    def cover(self, links: Links, away: frozenset[str]) -> None:
        """Search for a plan at some rates and latencies and add it; do nothing if an earlier call had nearly the same.

        Args:
            links: All links but those inside a region or host; latencies include jitter and the hand-over of a
                message, as observed ones do.
            away: Names of devices that are absent.
        """
        if any(away == others and are_near(links, covered) for covered, others in self._covered):
            return
        self._covered.append((links, away))
        there = with_links(self._scenario, self._rounded(links))
        try:
            found, searching_s = self._search(there, away)
        except InputError:
            return
        self.searching_s += searching_s
        self._add(found, with_found_orders(found, with_links(self._scenario, links)))

    def _rounded(self, links: Links) -> Links:
        """Return the links with rates and latencies rounded by `on_grid`."""
        rounded = {}
        for name, (rate_bps, latency_s) in links.items():
            declared_bps, declared_s = self._declared[name]
            rounded[name] = on_grid(rate_bps, declared_bps), on_grid(latency_s, declared_s)
        return rounded

    def add(self, plan: Plan) -> None:
        """Add a plan, with each compression that the scenario allows and with a dynamic order too.

        With a dynamic order a plan loses less time when link rates vary.
        """
        self._add(plan, plan)

    def _add(self, plan: Plan, ordered: Plan) -> None:
        """Add ``ordered``, the plan with the orders for the links at which it was found, and a dynamic order.

        Devices would otherwise find orders for the declared links. But explicit orders may need more memory by the
        check, which then counts the largest microbatches.
        """
        kept = ordered if is_possible(ordered, self._scenario) else plan
        orders = (kept, replace(plan, order="dynamic"))
        found = dict.fromkeys(each for one in orders for each in (one, *with_compressions(one, self._scenario)))
        self._plans |= {each: None for each in found if each == kept or is_possible(each, self._scenario)}


@dataclass(frozen=True)
class _Counting(Objective):
    """The throughput, with the candidates that are scored."""

    scored: list[Plan] = field(default_factory=list)

    def score(self, plan: Plan, step_s: float, scenario: Scenario) -> float:
        self.scored.append(plan)
        return super().score(plan, step_s, scenario)


def searched(scenario: Scenario, away: frozenset[str] = frozenset()) -> tuple[Plan, float]:
    """Return the plan that `search` finds without the devices in ``away``, and the search's estimated time, seconds.

    Links have their declared rates.

    Raises:
        InputError: No plan fits into memory.
    """
    devices = scenario.cluster.devices
    if len(away) == len(devices):
        raise no_split_fits(scenario, "auto", [])
    cluster = Cluster(devices, tuple(replace(link, trace=None) for link in scenario.cluster.links))
    parts = (scenario.name, cluster, scenario.model, scenario.training)
    steady = Scenario(*parts, code=scenario.code, effects=scenario.effects)
    objective = _Counting()
    found = search(steady, objective, without=away)
    actions = sum(len(each.stages) * len(each.microbatches) for plan in objective.scored for each in plan.pipelines)
    return found, DEVICE_S * len(devices) * len(objective.scored) + MICROBATCH_S * actions


def planned(scenario: Scenario, away: frozenset[str] = frozenset()) -> Plan:
    """Return the plan of `searched`."""
    return searched(scenario, away)[0]


def searched_once(scenario: Scenario, away: frozenset[str] = frozenset()) -> tuple[Plan, float]:
    """Return the result of `searched`, kept for later calls, since several runs of a bench need the same plan."""
    devices, links = scenario.cluster.devices, scenario.cluster.links
    steady = tuple(replace(link, trace=None) for link in links)
    is_trained = scenario.code is not None
    return _searched(
        scenario.name, devices, steady, scenario.model, scenario.training, is_trained, scenario.effects, away
    )


@lru_cache(maxsize=256)
def _searched(
    name: str,
    devices: tuple[Device, ...],
    links: tuple[Link, ...],
    model: ModelProfile,
    training: Training,
    is_trained: bool,
    effects: Effects,
    away: frozenset[str],
) -> tuple[Plan, float]:
    """Return the result of `searched`, cached by the parts of the scenario that a search uses."""
    code = ModelCode(Path(), {}) if is_trained else None
    return searched(Scenario(name, Cluster(devices, links), model, training, code, effects), away)
