"""Cloudless-Training (arXiv 2303.05330): data stay in their regions, which rent what they need and no more.

Every region trains on its own data, on a data-parallel pipeline of its own. It rents no more devices than it takes to
be done when the slowest region is: of units with p samples/s, n = ceil(D / (p t*)) for D samples, where t* is the time
of the region that takes longest with everything it has (`planner.systems.cloudless.elastic_scheduling`) [assumed].
Regions send each other sums of gradients (ASGD-GA), as often as the WAN keeps up with
(`planner.systems.cloudless.region_pipelines`, which says what is assumed). A cluster of one region is plain data
parallelism, without devices that would only wait.
"""

from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.systems.cloudless.elastic_scheduling import elastic_schedule
from planner.systems.cloudless.region_pipelines import region_offers, regional_plan


def cloudless(scenario: Scenario) -> Plan:
    """Return a pipeline for each region on the devices that it needs.

    Raises:
        InputError: No device of a region with data holds the model.
    """
    offers = region_offers(scenario, "cloudless")
    return regional_plan(scenario, "cloudless", offers, elastic_schedule(offers))
