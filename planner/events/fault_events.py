"""The faults that fall into a run, as events.

Their action says what it was: ``absent``, ``hangs`` or ``out``; a link is named by its ends as device and peer.
"""

from collections.abc import Iterable

from planner.events.events import Event, EventKind
from planner.scenario.faults import Absence, Fault, LinkOutage

ABSENT, HANGS, OUT = "absent", "hangs", "out"


def fault_events(faults: Iterable[Fault], end_s: float) -> list[Event]:
    """Return a row for each fault that began before the run's end, a second of it, at which one that lasts is cut."""
    return [_foreseen(fault, min(fault.end_s, end_s)) for fault in faults if fault.start_s < end_s]


def fault_event(device: str, action: str, start_s: float, end_s: float, peer: str = "") -> Event:
    """Return the row of a fault from one second of the run to another."""
    return Event(EventKind.FAULT, device, peer, -1, -1, -1, -1, action, start_s, end_s, 0)


def _foreseen(fault: Fault, end_s: float) -> Event:
    if isinstance(fault, LinkOutage):
        source, target = fault.link.split("->")
        return fault_event(source, OUT, fault.start_s, end_s, target)
    return fault_event(fault.device, ABSENT if isinstance(fault, Absence) else HANGS, fault.start_s, end_s)
