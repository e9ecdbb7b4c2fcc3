"""Faults scheduled in a scenario: devices that leave, return or hang, and links that are out.

The simulator injects them; what they cost depends on who recovers. Unless a policy continues without a device that left
(`planner.adapt.policy.Observation.gone`), everybody waits: an action that runs on a device that leaves is lost and
done again after its return (with ``order: dynamic`` the device chooses anew), one on a device that hangs continues. A
hang or an outage of more than a day counts as one without end.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from traces.common.errors import InputError
from traces.preemption.trace import Interval, PreemptionTrace


@dataclass(frozen=True, slots=True)
class _DeviceFault:
    device: str
    start_s: float
    end_s: float = math.inf

    def __post_init__(self) -> None:
        _check_times(self.start_s, self.end_s)


@dataclass(frozen=True, slots=True)
class Absence(_DeviceFault):
    """An interval in which a device is gone.

    Attributes:
        device: Name of the device.
        start_s: Seconds from the start of the run at which it leaves.
        end_s: Seconds at which it returns; infinite if it never does.

    Raises:
        InputError: It ends before it starts.
    """


@dataclass(frozen=True, slots=True)
class Hang(_DeviceFault):
    """An interval in which a device stops computing; what it was doing continues afterwards.

    Attributes:
        device: Name of the device.
        start_s: Seconds from the start of the run at which it stops.
        end_s: Seconds at which it continues; infinite if it never does.

    Raises:
        InputError: It ends before it starts.
    """


@dataclass(frozen=True, slots=True)
class LinkOutage:
    """An interval in which a link carries nothing.

    Attributes:
        link: Name of the link, ``source->target``.
        start_s: Seconds from the start of the run at which it stops.
        end_s: Seconds at which it carries again.

    Raises:
        InputError: It ends before it starts, or lasts for ever.
    """

    link: str
    start_s: float
    end_s: float

    def __post_init__(self) -> None:
        _check_times(self.start_s, self.end_s)
        if self.end_s == math.inf:
            raise InputError(f"link '{self.link}' is out for ever", valid="say when it carries again, or remove it")


Fault = Absence | Hang | LinkOutage


def find_overlap(faults: Iterable[Fault]) -> tuple[int, int] | None:
    """Return the indices of two faults that hit the same device or link at the same time; None if there are none."""
    seen: dict[str, list[tuple[int, Fault]]] = {}
    for index, fault in enumerate(faults):
        others = seen.setdefault(place_of(fault), [])
        for earlier, other in others:
            if fault.start_s < other.end_s and other.start_s < fault.end_s:
                return earlier, index
        others.append((index, fault))
    return None


def place_of(fault: Fault) -> str:
    """Return the device or link that a fault hits, as text for messages: ``device 'left'``."""
    return f"link '{fault.link}'" if isinstance(fault, LinkOutage) else f"device '{fault.device}'"


def _check_times(start_s: float, end_s: float) -> None:
    if not 0 <= start_s < math.inf or not start_s < end_s:
        raise InputError(
            f"a fault from {start_s:g} s to {end_s:g} s is not allowed",
            valid="it starts at 0 s or later, from the start of the run, and ends after that",
        )


# Assumed: devices send a heartbeat every 0.25 s; one that misses four in a row counts as gone.
HEARTBEAT_S = 0.25
MISSED_HEARTBEATS = 4

# Seconds from a device's departure until the others notice; a device that is back by then was never missed.
DETECTION_S = HEARTBEAT_S * MISSED_HEARTBEATS


def noticed_absences(faults: Sequence[Fault]) -> list[Absence]:
    """Return the absences that last long enough for the others to notice, by their start and device."""
    absences = (fault for fault in faults if isinstance(fault, Absence))
    noticed = (absence for absence in absences if absence.start_s + DETECTION_S < absence.end_s)
    return sorted(noticed, key=lambda absence: (absence.start_s, absence.device))


def known_away(absences: Sequence[Absence], time_s: float) -> tuple[str, ...]:
    """Return the sorted names of the devices that are known to be away at ``time_s``, given noticed absences."""
    return tuple(
        sorted({each.device for each in absences if each.start_s + DETECTION_S <= time_s and time_s < each.end_s})
    )


def absences_of_nodes(trace: PreemptionTrace, nodes: Mapping[str, str], start_s: float = 0.0) -> tuple[Absence, ...]:
    """Return when devices are gone if each is present exactly while one of its nodes is.

    Args:
        trace: Presences of the nodes over time.
        nodes: Node to device; several nodes may stand for one device.
        start_s: Time of the trace at which the run starts, seconds.
    """
    presences: dict[str, list[Interval]] = {device: [] for device in nodes.values()}
    for node, device in nodes.items():
        presences[device] += trace.presences[node]
    return _absences(presences, start_s)


def absences_in_order(trace: PreemptionTrace, devices: Sequence[str], start_s: float = 0.0) -> tuple[Absence, ...]:
    """Return when devices are gone if nodes take them in order.

    A node that arrives takes the first device that nobody has taken, and gives it back when it leaves. Nodes that
    arrive while all devices are taken are not used, also not later.

    Args:
        trace: Presences of the nodes over time.
        devices: Names of the devices that nodes can take.
        start_s: Time of the trace at which the run starts, seconds.
    """
    presences: dict[str, list[Interval]] = {device: [] for device in devices}
    taken: dict[str, tuple[str, float]] = {}
    for change in trace.changes:
        if not change.arrives:
            if change.node in taken:
                device, since_s = taken.pop(change.node)
                presences[device].append((since_s, change.time_s))
            continue
        in_use = {device for device, _ in taken.values()}
        free = next((device for device in devices if device not in in_use), None)
        if free is not None:
            taken[change.node] = (free, change.time_s)
    for device, since_s in taken.values():
        presences[device].append((since_s, math.inf))
    return _absences(presences, start_s)


def _absences(presences: Mapping[str, Iterable[Interval]], start_s: float) -> tuple[Absence, ...]:
    """Return the gaps between the presences of each device, from the start of the run on, in the order of time."""
    absences = []
    for device, intervals in presences.items():
        gone_since_s = start_s
        for arrival_s, departure_s in [*sorted(intervals), (math.inf, math.inf)]:
            if arrival_s > gone_since_s:
                absences.append(Absence(device, gone_since_s - start_s, arrival_s - start_s))
            gone_since_s = max(gone_since_s, departure_s)
            if gone_since_s == math.inf:
                break
    return tuple(sorted(absences, key=lambda absence: (absence.start_s, absence.device)))
