"""Strategies ``cloudless`` and ``greedy``: one data-parallel pipeline per region, and updates over the WAN.

In Cloudless-Training (arXiv 2303.05330), a region has workers of its own and a communicator for its traffic with other
regions. Here a region is a pipeline of one stage: the stage's replicas are the workers, and the first replica sends and
receives updates. Data stay in their regions, and regions exchange updates without a barrier. ``cloudless`` rents the
devices that elastic scheduling selects (`planner.systems.cloudless.elastic_scheduling`); the baseline ``greedy`` rents
all devices.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from planner.cost.in_flight import fitting_depths, no_split_fits
from planner.cost.layers import with_launches
from planner.cost.network import nominal_path
from planner.cost.stage import replica_times
from planner.cost.synchronisation import update_edges
from planner.plan.microbatches import even_cut, proportional_parts
from planner.plan.plan import Pipeline, Plan, Replica, Stage, Synchronisation
from planner.scenario.scenario import Scenario, check_takes_time
from planner.systems.cloudless.elastic_scheduling import (
    Offers,
    RegionOffer,
    Schedule,
    Unit,
    elastic_schedule,
    greedy_schedule,
)

# Candidates for the number of steps between two exchanges of updates, ascending.
EXCHANGE_STEPS = (1, 2, 4, 8, 16)


def region_offers(
    scenario: Scenario,
    strategy: str,
    slowdown: Mapping[str, float] | None = None,
    gone: Collection[str] = (),
) -> Offers:
    """Return each region's part of a step's samples and the devices that the region may rent.

    The part of a region is in proportion to its data or, if data are everywhere, to the speed of all its devices.
    Assumption: the speed of a device is the profiled one for an even share of the batch. Left out are devices that
    cannot hold the model and regions without data. If the batch has fewer samples than there are regions, regions with
    the smallest parts are left out too.

    Args:
        scenario: Scenario that gives devices, data and batch.
        strategy: Name of the strategy for error messages.
        slowdown: Name of a device to the ratio of its compute time to the profiled time; 1 if the name is missing.
        gone: Names of devices that are absent.

    Raises:
        InputError: The model fits on no device of a region that has data, or takes no time on a device.
    """
    units = _units(scenario, slowdown or {}, gone)
    if scenario.data:
        weights = {region: float(scenario.data[region]) for region in units if region in scenario.data}
    else:
        weights = {region: sum(unit.samples_per_s for unit in offered) for region, offered in units.items()}
    batch = scenario.training.global_batch
    largest = sorted(weights, key=lambda region: -weights[region])[:batch]
    kept = [region for region in weights if region in largest]
    if not kept:
        places = [d for d in scenario.cluster.devices if d.region in scenario.data or not scenario.data]
        raise no_split_fits(scenario, strategy, [device for device in places if device.name not in gone])
    whole = sum(weights[region] for region in kept)
    return {region: RegionOffer(batch * weights[region] / whole, units[region]) for region in kept}


def regional_plan(scenario: Scenario, strategy: str, offers: Offers, schedule: Schedule) -> Plan:
    """Return the plan in which each region trains its part of the batch on the devices that it rents.

    Parts are rounded to whole samples here, not in the schedule, which would rent a device for a fraction of a sample.
    A part is divided into the fewest equal microbatches that fit into memory. Regions exchange updates by ASGD-GA
    (asynchronous SGD with gradient accumulation). Assumption: the number of steps between two exchanges is the least of
    `EXCHANGE_STEPS` with which an exchange ends before the next one begins, or else the largest. A single region sums
    its gradients in every step instead.

    Raises:
        InputError: No microbatch fits into memory, or two regions have no link.
    """
    samples = proportional_parts(scenario.training.global_batch, [offer.samples for offer in offers.values()])
    pipelines = tuple(
        _region_pipeline(scenario, strategy, own, schedule.units[region])
        for region, own in zip(offers, samples, strict=True)
    )
    plan = Plan(scenario.name, scenario.model.name, strategy, "1f1b", pipelines)
    if len(pipelines) == 1:
        return plan
    exchange_s = longest_exchange_s(with_exchanges(plan, "asgd-ga", 1), scenario)
    enough = (steps for steps in EXCHANGE_STEPS if exchange_s <= steps * schedule.run_time_s)
    return with_exchanges(plan, "asgd-ga", next(enough, EXCHANGE_STEPS[-1]))


def with_exchanges(plan: Plan, method: str, interval_steps: int) -> Plan:
    """Return the plan with exchanges of updates by ``method`` every ``interval_steps`` steps.

    Assumption: the staleness bound is as many steps, so that an exchange may overlap with the next steps.
    """
    return replace(
        plan, synchronisation=Synchronisation(method, interval_steps=interval_steps, staleness_bound=interval_steps)
    )


def longest_exchange_s(plan: Plan, scenario: Scenario) -> float:
    """Return the longest delivery time of the updates of one exchange at the declared bandwidths, seconds."""
    longest_s = 0.0
    for edge in update_edges(plan, scenario):
        path = nominal_path(scenario, edge.sender, edge.receiver, plan.connections)
        longest_s = max(longest_s, path.delivery_s(edge.size_bytes))
    return longest_s


def _units(scenario: Scenario, slowdown: Mapping[str, float], gone: Collection[str]) -> Mapping[str, tuple[Unit, ...]]:
    """Return the devices that can hold the model, by region, each in the cluster's order."""
    samples = max(1, scenario.training.global_batch // len(scenario.cluster.devices))
    units: dict[str, tuple[Unit, ...]] = {}
    for device in scenario.cluster.devices:
        stage = _whole_model(scenario, (Replica(device.name),))
        if device.name in gone or fitting_depths((1,), (stage,), scenario, (1,)) is None:
            continue
        check_takes_time(scenario, device.kind, samples)
        step_s = with_launches(replica_times(scenario, stage, stage.replicas[0], samples), scenario).total_s
        step_s += scenario.model.update_s(0, len(scenario.model.layers), device.kind)
        speed = samples / (step_s * slowdown.get(device.name, 1.0))
        unit = Unit(device.name, speed, device.price_per_hour)
        units[device.region] = (*units.get(device.region, ()), unit)
    return units


def _region_pipeline(scenario: Scenario, strategy: str, samples: int, units: Sequence[Unit]) -> Pipeline:
    fastest = max(unit.samples_per_s for unit in units)
    replicas = tuple(Replica(unit.name, unit.samples_per_s / fastest) for unit in units)
    stage = _whole_model(scenario, replicas)
    for count in range(1, samples + 1):
        # The sizes of equal microbatches, rounded down and up.
        sizes = {samples // count, -(-samples // count)}
        if fitting_depths((1,), (stage,), scenario, tuple(sizes)) is not None:
            return Pipeline((stage,), even_cut(samples, count))
    raise no_split_fits(scenario, strategy, [scenario.cluster.by_name[unit.name] for unit in units])


def _whole_model(scenario: Scenario, replicas: tuple[Replica, ...]) -> Stage:
    return Stage(0, len(scenario.model.layers), replicas, in_flight=1)


def cloudless(scenario: Scenario) -> Plan:
    """Return the plan with one pipeline per region on the devices that elastic scheduling rents.

    Raises:
        InputError: The model fits on no device of a region that has data.
    """
    offers = region_offers(scenario, "cloudless")
    return regional_plan(scenario, "cloudless", offers, elastic_schedule(offers))


def greedy(scenario: Scenario) -> Plan:
    """Return the plan with one pipeline per region on all devices of the region.

    Raises:
        InputError: The model fits on no device of a region that has data.
    """
    offers = region_offers(scenario, "greedy")
    return regional_plan(scenario, "greedy", offers, greedy_schedule(offers))
