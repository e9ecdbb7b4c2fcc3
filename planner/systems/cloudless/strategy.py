"""The baseline of Cloudless-Training's elastic scheduling: every region rents everything that it can have.

All else is as in `planner.systems.cloudless.strategy`: data stay in their regions, and regions exchange as often as
there.
"""

from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.systems.cloudless.elastic_scheduling import elastic_schedule, greedy_schedule
from planner.systems.cloudless.region_pipelines import region_offers, regional_plan


def cloudless(scenario: Scenario) -> Plan:
    """Return a pipeline for each region on the devices that it needs.

    Raises:
        InputError: No device of a region with data holds the model.
    """
    offers = region_offers(scenario, "cloudless")
    return regional_plan(scenario, "cloudless", offers, elastic_schedule(offers))


def greedy(scenario: Scenario) -> Plan:
    """Return a pipeline for each region on all its devices.

    Raises:
        InputError: No device of a region with data holds the model.
    """
    offers = region_offers(scenario, "greedy")
    return regional_plan(scenario, "greedy", offers, greedy_schedule(offers))
