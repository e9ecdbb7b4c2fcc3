"""The baseline of Cloudless-Training's elastic scheduling: every region rents everything that it can have.

All else is as in `planner.strategies.cloudless`: data stay in their regions, and regions exchange as often as there.
"""

from planner.elastic_scheduling import greedy_schedule
from planner.plan import Plan
from planner.region_pipelines import region_offers, regional_plan
from planner.scenario import Scenario


def greedy(scenario: Scenario) -> Plan:
    """Return a pipeline for each region on all its devices.

    Raises:
        InputError: No device of a region with data holds the model.
    """
    offers = region_offers(scenario, "greedy")
    return regional_plan(scenario, "greedy", offers, greedy_schedule(offers))
