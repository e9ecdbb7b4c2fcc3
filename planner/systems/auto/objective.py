"""The objective of a search, and the cost model of plans: how long a step takes, exactly or quickly.

In a small cluster the evaluator times every device, and estimates how flows share links. In a larger one equivalent
pipelines are evaluated once, and gradient sums are added in closed form.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from planner.cost.network import nominal_path
from planner.cost.synchronisation import gradient_syncs, ring_s
from planner.plan.plan import (
    Plan,
    representatives,
)
from planner.scenario.scenario import Scenario
from planner.step.evaluate import contended_paths, step_time_s
from traces.common.errors import InputError

OBJECTIVES = ("throughput", "cost")

# Most devices of which all are evaluated.
MOST_EVALUATED = 12


# Returns the time of a plan's step, seconds.
CostModel = Callable[[Plan], float]


@dataclass(frozen=True, slots=True)
class Objective:
    """A quantity to minimise, with limits.

    Attributes:
        name: ``throughput`` minimises the time of a step, ``cost`` its price.
        budget_per_hour: Highest price of a plan, US dollars per hour; None for no limit.
        samples_per_s: Least throughput of a plan; None for no limit. A deadline is the samples to train divided by the
            seconds that are left.
    """

    name: str = "throughput"
    budget_per_hour: float | None = None
    samples_per_s: float | None = None

    def __post_init__(self) -> None:
        if self.name not in OBJECTIVES:
            raise InputError(f"unknown objective '{self.name}'", valid=f"one of {', '.join(OBJECTIVES)}")
        for name in ("budget_per_hour", "samples_per_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InputError(f"{name} is {value:g}", where="objective", valid="a number above zero")

    def score(self, plan: Plan, step_s: float, scenario: Scenario) -> float:
        """Return the quantity to minimise for a plan whose step takes ``step_s``; infinite if it breaks a limit."""
        per_hour = sum(scenario.cluster.by_name[device].price_per_hour for device in plan.devices)
        step_price = per_hour * step_s / 3600 + traffic_price(plan, scenario)
        if self.budget_per_hour is not None and 3600 * step_price > self.budget_per_hour * step_s:
            return float("inf")
        if self.samples_per_s is not None and plan.global_batch < self.samples_per_s * step_s:
            return float("inf")
        return step_s if self.name == "throughput" else step_price


def traffic_price(plan: Plan, scenario: Scenario) -> float:
    """Return the price of a step's transfers between stages in both directions, US dollars.

    Gradient sums are left out: assumed small beside these transfers where links have a price.
    """
    price = 0.0
    for pipeline in plan.pipelines:
        for left, right in zip(pipeline.stages, pipeline.stages[1:], strict=False):
            size_bytes = pipeline.samples * scenario.model.layers[left.end_layer - 1].output_bytes
            for one, other in ((left, right), (right, left)):
                links = scenario.cluster.path(one.replicas[0].device, other.replicas[0].device)
                price += size_bytes / 1e9 * sum(link.price_per_gb for link in links)
    return price


def approximate_step_time_s(plan: Plan, scenario: Scenario) -> float:
    """Return the time of a step at constant rates, seconds; of many devices, equivalent pipelines are timed once."""
    if len(plan.devices) <= MOST_EVALUATED:
        return contended_step_time_s(plan, scenario)
    return step_time_s(representatives(plan, scenario), scenario) + _gradient_sums_s(plan, scenario)


def contended_step_time_s(plan: Plan, scenario: Scenario) -> float:
    """Return the time of a step at constant rates, seconds, with every device evaluated.

    In clusters of up to `MOST_EVALUATED` devices, link sharing is estimated (`contended_paths`); in larger ones each
    pair of devices is assumed to have its path for itself.
    """
    few = len(scenario.cluster.devices) <= MOST_EVALUATED
    return step_time_s(plan, scenario, contended_paths(plan, scenario) if few else None)


def _gradient_sums_s(plan: Plan, scenario: Scenario) -> float:
    """Seconds of gradient sums on the device that has most of them; each device does one after the other."""
    busy_s = dict.fromkeys(plan.devices, 0.0)
    for sync in gradient_syncs(plan, scenario):
        paths = {nominal_path(scenario, *hop, plan.connections) for hop in _hops(sync.devices, scenario)}
        time_s = ring_s(paths, sync.elements * scenario.training.element_bytes, len(sync.devices))
        for device in sync.devices:
            busy_s[device] += time_s
    return max(busy_s.values())


def _hops(devices: Sequence[str], scenario: Scenario) -> list[tuple[str, str]]:
    """Hops of a ring: one for each pair of kinds and regions within a host, and one between hosts."""
    by_name = scenario.cluster.by_name
    hops: dict[Hashable, tuple[str, str]] = {}
    for one, other in zip(devices, [*devices[1:], devices[0]], strict=True):
        ends = (by_name[one], by_name[other])
        key = (*((end.kind, end.region) for end in ends), ends[0].machine == ends[1].machine)
        hops.setdefault(key, (one, other))
    return list(hops.values())
