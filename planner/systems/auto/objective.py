"""The objective of a search for plans, and two models of a plan's step time: a detailed and a fast one.

The detailed model (`contended_step_time_s`) evaluates every message, as the simulator does. The fast one
(`approximate_step_time_s`) does so with a single step of few devices; for more devices it evaluates one of each set of
equivalent pipelines and adds the gradient sums in closed form.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from planner.cost.network import nominal_path
from planner.cost.synchronisation import gradient_syncs, ring_s
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.step.evaluate import step_time_s
from planner.step.shared_links.step_time import shared_step_time_s, steady_step_time_s
from planner.systems.auto.link_loads import link_loads_s, pipelines_s, summed_bytes, transferred_bytes
from traces.common.errors import InputError

OBJECTIVES = ("throughput", "cost")

# Most devices of a plan that the fast model evaluates as the detailed one does.
MOST_EVALUATED = 24

# Most devices of a plan for which the detailed model shares links among messages; with more, each pair of devices has
# the links of its path alone, but no step is shorter than the load of its busiest link.
MOST_SHARED = 96

# Most devices of a plan of which the detailed model evaluates every message; a ring over n devices has 2 n (n - 1).
MOST_DETAILED = 512

# Factor on the score of a plan whose times are extrapolated. In the measured tables of eth-easl/sailor, times at twice
# the samples are 2 % off in the median if they are extrapolated, and 3.5 % too short in the mean.
EXTRAPOLATED = 1.01

# A limit is kept if it is missed by rounding only.
ROUNDED = 1 + 1e-9

# Function from a plan to the time of one step, seconds.
CostModel = Callable[[Plan], float]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits that a plan must keep.

    Attributes:
        budget_per_hour: Upper limit of the plan's price, above zero, US dollars per hour; None for no limit.
        samples_per_s: Lower limit of the throughput, above zero, samples per second; None for no limit. For a deadline,
            give the samples to train divided by the seconds that are left.

    Raises:
        InputError: A limit is not above zero.
    """

    budget_per_hour: float | None = None
    samples_per_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("budget_per_hour", "samples_per_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InputError(f"{name} is {value:g}", where="objective", valid="a number above zero")

    def are_kept(self, samples: int, step_s: float, step_price: float) -> bool:
        """Return whether steps of ``samples`` keep the limits; ``step_price`` is in US dollars."""
        budget, rate = self.budget_per_hour, self.samples_per_s
        is_dear = budget is not None and 3600 * step_price > budget * step_s * ROUNDED
        is_slow = rate is not None and samples * ROUNDED < rate * step_s
        return not is_dear and not is_slow


@dataclass(frozen=True)
class Objective(Limits):
    """A quantity to minimise, and limits that the plan must keep.

    Attributes:
        name: ``throughput`` to minimise the time of a step, ``cost`` to minimise the price of a step.

    Raises:
        InputError: The name is unknown, or a limit is not above zero.
    """

    name: str = "throughput"

    def __post_init__(self) -> None:
        if self.name not in OBJECTIVES:
            valid = f"one of {', '.join(OBJECTIVES)}"
            raise InputError(f"unknown objective '{self.name}'", where="objective", valid=valid)
        super().__post_init__()

    def score(self, plan: Plan, step_s: float, scenario: Scenario) -> float:
        """Return the quantity to minimise, in seconds or US dollars per step; infinity if the plan breaks a limit.

        It is 1 % higher if times of the plan are extrapolated: beyond the measured microbatches, predictions are worse.
        """
        per_hour = sum(scenario.cluster.by_name[device].price_per_hour for device in plan.devices)
        is_priced = self.name == "cost" or self.budget_per_hour is not None
        step_price = per_hour * step_s / 3600 + (traffic_price(plan, scenario) if is_priced else 0.0)
        if not self.are_kept(plan.global_batch, step_s, step_price):
            return float("inf")
        quantity = step_s if self.name == "throughput" else step_price
        return quantity * EXTRAPOLATED if is_extrapolated(plan, scenario) else quantity


def is_extrapolated(plan: Plan, scenario: Scenario) -> bool:
    """Return whether a replica takes more samples of a microbatch than were measured on its kind of device."""
    kinds = {device: scenario.cluster.by_name[device].kind for device in plan.devices}
    models = [scenario.model, *scenario.model.sharded.values()]
    measured = min(model.most_samples(kind) for model in models for kind in set(kinds.values()))
    return any(
        samples > scenario.model.at_degree(replica.tensor_parallel).most_samples(kinds[device])
        for pipeline in plan.pipelines
        if max(pipeline.microbatches) > measured
        for stage in pipeline.stages
        for replica, samples in zip(stage.replicas, stage.most_samples(pipeline.microbatches), strict=True)
        for device in replica.devices
    )


def traffic_price(plan: Plan, scenario: Scenario) -> float:
    """Return the price of what one step sends between stages and in sums of gradients, US dollars."""
    cluster = scenario.cluster
    if not any(link.price_per_gb for link in cluster.links):
        return 0.0
    sent_bytes = Counter(transferred_bytes(plan, scenario)) + Counter(summed_bytes(plan, scenario))
    prices = {pair: sum(link.price_per_gb for link in cluster.path(*pair)) for pair in sent_bytes}
    return sum(size_bytes / 1e9 * prices[pair] for pair, size_bytes in sent_bytes.items())


def approximate_step_time_s(plan: Plan, scenario: Scenario) -> float:
    """Return the time of a step at constant rates, seconds, by the fast model, which evaluates few devices."""
    if len(plan.devices) <= MOST_EVALUATED:
        return shared_step_time_s(plan, scenario)
    return pipelines_s(plan, scenario) + _gradient_sums_s(plan, scenario)


def contended_step_time_s(plan: Plan, scenario: Scenario) -> float:
    """Return the time of a step at constant rates, seconds, by the detailed model.

    In plans of up to `MOST_SHARED` devices, flows share links as in the simulator, and devices begin the next step
    while others still carry out this one. For plans of more than `MOST_DETAILED`, it is the fast model.
    """
    if len(plan.devices) <= MOST_SHARED:
        return steady_step_time_s(plan, scenario)
    if len(plan.devices) > MOST_DETAILED:
        return approximate_step_time_s(plan, scenario)
    loads_s = link_loads_s(transferred_bytes(plan, scenario), scenario)
    return max([step_time_s(plan, scenario), *loads_s.values()])


def _gradient_sums_s(plan: Plan, scenario: Scenario) -> float:
    """Return the time until the last gradient sum ends, seconds; a device carries out one sum after the other."""
    free_s = dict.fromkeys(plan.devices, 0.0)
    for sync in gradient_syncs(plan, scenario):
        paths = {nominal_path(scenario, *hop, plan.connections) for hop in _hops(sync.devices, scenario)}
        time_s = ring_s(paths, sync.size_bytes, len(sync.devices), sync.shards)
        free_s |= dict.fromkeys(sync.devices, max(free_s[device] for device in sync.devices) + time_s)
    return max([*free_s.values(), *link_loads_s(summed_bytes(plan, scenario), scenario).values()])


def _hops(devices: Sequence[str], scenario: Scenario) -> list[tuple[str, str]]:
    """Return the hops (source, target) of a ring over devices, only one for all hops between equal kinds of devices."""
    cluster = scenario.cluster
    hops: dict[Hashable, tuple[str, str]] = {}
    for one, other in zip(devices, [*devices[1:], devices[0]], strict=True):
        ends = (cluster.by_name[one], cluster.by_name[other])
        key = (*((end.kind, end.region) for end in ends), cluster.same_host(one, other))
        hops.setdefault(key, (one, other))
    return list(hops.values())
