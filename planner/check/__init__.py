"""Checks of a plan against its scenario; error messages give the place in the plan and what would be valid.

Every ``check_`` function of this package raises an InputError for the first mistake and returns nothing otherwise.
"""

from math import inf

from planner.check.memory import check_memory, check_peaks
from planner.check.orders import check_orders
from planner.check.outer_step import check_syncers
from planner.check.paths import check_paths, check_synchronisation
from planner.check.stages import check_devices, check_layers, check_microbatches, check_placement
from planner.plan.plan import EXPLICIT, ORDERS, Plan
from planner.scenario.faults import LinkOutage, find_overlap, place_of
from planner.scenario.scenario import Scenario
from planner.scenario.training import COMPRESSIONS
from planner.schedules import SCHEDULES
from traces.common.errors import InputError, find_by_name


def check_plan(plan: Plan, scenario: Scenario) -> None:
    """Refuse a plan that the scenario cannot carry out.

    Raises:
        InputError: The plan is for another model; uses an unknown name, or a device twice; does not cover all layers;
            has a global batch that the scenario excludes; cannot be scheduled; deadlocks; does not fit into memory; or
            needs a missing link. Or an effect or fault of the scenario names an unknown device or link.
    """
    check_places(plan, scenario)
    find_by_name(plan.schedule, {**SCHEDULES, EXPLICIT: None}, "schedule", where="schedule")
    find_by_name(plan.order, dict.fromkeys(ORDERS), "order", where="order")
    find_by_name(plan.compression, dict.fromkeys(COMPRESSIONS), "compression", where="compression")
    check_synchronisation(plan)
    check_syncers(plan, scenario.cluster)
    for index, pipeline in enumerate(plan.pipelines):
        where = f"pipelines[{index}]"
        check_microbatches(pipeline, plan, where)
        check_placement(pipeline, plan, where)
        check_orders(pipeline, plan, where)
        check_memory(pipeline, plan, scenario, where)
    check_paths(plan, scenario)
    _check_batch(plan, scenario)
    _check_effects_and_faults(scenario)
    check_peaks(plan, scenario)


def check_places(plan: Plan, scenario: Scenario) -> None:
    """Refuse a plan for another model, with unknown devices, or whose stages do not cover the model's layers.

    No costs can be computed for such a plan, which an order of actions needs.
    """
    if plan.model != scenario.model.name:
        raise InputError(
            f"the plan is for model '{plan.model}'",
            where="model",
            valid=f"scenario '{scenario.name}' trains '{scenario.model.name}': make a plan with 'ropebridge plan'",
        )
    if not plan.pipelines:
        raise InputError("the plan has no pipelines", where="pipelines", valid="give at least one")
    check_devices(plan, scenario.cluster)
    for index, pipeline in enumerate(plan.pipelines):
        check_layers(pipeline, scenario.model, f"pipelines[{index}]")


def is_possible(plan: Plan, scenario: Scenario) -> bool:
    """Return whether `check_plan` accepts a plan."""
    try:
        check_plan(plan, scenario)
    except InputError:
        return False
    return True


def _check_batch(plan: Plan, scenario: Scenario) -> None:
    """Refuse a global batch that the scenario excludes, or whose learning rate is unknown."""
    batch, training = plan.global_batch, scenario.training
    if plan.noise_scale is not None and not 0 < plan.noise_scale < inf:
        raise InputError(
            f"a noise scale of {plan.noise_scale:g} samples is not allowed",
            where="noise_scale",
            valid="give a finite number above zero, or leave it out",
        )
    if batch == training.global_batch:
        return
    limits, problem = training.batch, f"the microbatches add up to {batch} samples"
    if limits is None:
        valid = f"scenario '{scenario.name}' trains with a global batch of {training.global_batch}"
        raise InputError(problem, where="pipelines", valid=valid)
    if not limits.smallest <= batch <= limits.largest:
        valid = f"scenario '{scenario.name}' allows global batches from {limits.smallest} to {limits.largest}"
        raise InputError(problem, where="pipelines", valid=valid)
    if plan.synchronisation.method != "allreduce":
        raise InputError(
            f"the global batch of {batch} samples is not the scenario's, but pipelines train without a barrier",
            where="synchronisation.method",
            valid=f"use the method 'allreduce', or a global batch of {training.global_batch}",
        )
    if limits.rate_rule == "adascale" and plan.noise_scale is None:
        raise InputError(
            f"the learning rate of a global batch of {batch} samples is unknown: the rule 'adascale' needs the "
            "gradient noise scale",
            where="noise_scale",
            valid=f"add it to the plan, or plan for the scenario's global batch of {training.global_batch}",
        )


def _check_effects_and_faults(scenario: Scenario) -> None:
    """Refuse effects and faults of unknown devices and links, and overlapping faults of one device or link."""
    devices = scenario.cluster.by_name
    links = {link.name: link for link in scenario.cluster.links}
    compute = scenario.effects.compute
    slow = {"stragglers": [each.device for each in compute.stragglers]}
    slow["slowdowns"] = [each.device for each in compute.slowdowns]
    for key, names in slow.items():
        for number, name in enumerate(names):
            find_by_name(name, devices, "device", where=f"effects.compute.{key}[{number}].device")
    for number, fault in enumerate(scenario.faults):
        if isinstance(fault, LinkOutage):
            find_by_name(fault.link, links, "link", where=f"faults[{number}].link")
        else:
            find_by_name(fault.device, devices, "device", where=f"faults[{number}].device")
    overlap = find_overlap(scenario.faults)
    if overlap is not None:
        earlier, later = overlap
        raise InputError(
            f"{place_of(scenario.faults[later])} has two faults at the same time",
            where=f"faults[{later}]",
            valid=f"the other one is faults[{earlier}]: let one end before the other starts",
        )
