"""The faults that fall into a run, as events."""

from planner.events import Event, EventKind
from planner.faults import Absence, LinkOutage
from planner.scenario import Scenario


def fault_events(scenario: Scenario, end_s: float) -> list[Event]:
    """Return a row for each fault that began before the run's end, at which one that still lasts is cut.

    Its action says what it was: ``absent``, ``hangs`` or ``out``; a link is named by its ends as device and peer.
    """
    events = []
    for fault in scenario.faults:
        if fault.start_s >= end_s:
            continue
        if isinstance(fault, LinkOutage):
            device, peer = fault.link.split("->")
            action = "out"
        else:
            device, peer = fault.device, ""
            action = "absent" if isinstance(fault, Absence) else "hangs"
        until_s = min(fault.end_s, end_s)
        events.append(Event(EventKind.FAULT, device, peer, -1, -1, -1, -1, action, fault.start_s, until_s, 0))
    return events
