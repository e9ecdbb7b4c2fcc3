"""What a scenario foresees happens to devices and links that are there."""

from planner.scenario.faults import LinkOutage, find_overlap, place_of
from planner.scenario.scenario import Scenario
from traces.common.errors import InputError
from traces.common.names import find_by_name


def check_foreseen(scenario: Scenario) -> None:
    """Refuse effects and faults of devices and links that are not there, and faults that overlap.

    Raises:
        InputError: With the place and the name.
    """
    devices = scenario.cluster.by_name
    links = {link.name: link for link in scenario.cluster.links}
    compute = scenario.effects.compute
    named = {
        "stragglers": [straggler.device for straggler in compute.stragglers],
        "slowdowns": [slowdown.device for slowdown in compute.slowdowns],
    }
    for key, names in named.items():
        for number, name in enumerate(names):
            find_by_name(name, devices, "device", where=f"effects.compute.{key}[{number}].device")
    for number, fault in enumerate(scenario.faults):
        where = f"faults[{number}]"
        if isinstance(fault, LinkOutage):
            find_by_name(fault.link, links, "link", where=f"{where}.link")
        else:
            find_by_name(fault.device, devices, "device", where=f"{where}.device")
    overlap = find_overlap(scenario.faults)
    if overlap is not None:
        earlier, later = overlap
        raise InputError(
            f"{place_of(scenario.faults[later])} has two faults at the same time",
            where=f"faults[{later}]",
            valid=f"the other one is faults[{earlier}]: let one end before the other starts",
        )
