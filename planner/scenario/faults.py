"""Faults scheduled in a scenario: devices that leave, return or hang, and links that are out.

The backends inject these faults. If a device leaves, a policy may continue without the device
(`planner.adapt.policy.Observation`, ``gone``); otherwise all devices wait for its return. The action that a device was
running when it left is lost and repeated after its return (with ``order: dynamic`` the device chooses an action again).
The action of a device that hangs continues afterwards, except in runs that keep copies of the state
(`with_ended_hangs`). A hang or an outage of more than a day counts as endless.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from traces.common.errors import InputError
from traces.preemption.trace import Interval, PreemptionTrace

# Seconds from a device's departure until the others go on, if they then have all they need; a shorter absence is never
# detected. Measured on killed ranks of the executor, whose agent sees that they end: 0.04 s until the policy is asked,
# 0.06 s until the others are connected anew.
DETECTION_S = 0.1

# Seconds for which a process may hang in a run that keeps copies of the state; the executor then ends and replaces it.
# With a limit near the price of a replacement (a new process, new connections, repeated steps) neither a short hang nor
# an endless one costs much more than it must.
HANG_LIMIT_S = 4.0

# Seconds after the detection that a process was ended until its device has a new one.
_REPLACED_S = 0.05


@dataclass(frozen=True, slots=True)
class _DeviceFault:
    """An interval, seconds from the start of the run, in which a device does not compute."""

    device: str
    start_s: float
    end_s: float = math.inf

    def __post_init__(self) -> None:
        _check_times(self.start_s, self.end_s)


@dataclass(frozen=True, slots=True)
class Absence(_DeviceFault):
    """An interval in which a device is absent; ``end_s`` is infinite if the device never returns.

    Raises:
        InputError: The interval ends before it starts.
    """

    @property
    def noticed_s(self) -> float:
        """When the absence is detected, seconds from the start of the run."""
        return self.start_s + DETECTION_S


@dataclass(frozen=True, slots=True)
class Hang(_DeviceFault):
    """An interval in which a device stops computing; its running action continues at ``end_s``, infinite for never.

    Raises:
        InputError: The interval ends before it starts.
    """


@dataclass(frozen=True, slots=True)
class LinkOutage:
    """An interval, seconds from the start of the run, in which the link named ``source->target`` carries nothing.

    Raises:
        InputError: The interval ends before it starts, or never ends.
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
    """Return the indices of two faults of one device or link that overlap in time; None if no faults overlap."""
    latest: dict[str, tuple[int, Fault]] = {}
    for index, fault in sorted(enumerate(faults), key=lambda each: each[1].start_s):
        place = place_of(fault)
        # Of earlier faults without overlaps, the one that starts last also ends last.
        earlier, other = latest.get(place, (index, fault))
        if earlier != index and fault.start_s < other.end_s:
            return min(earlier, index), max(earlier, index)
        latest[place] = index, fault
    return None


def place_of(fault: Fault) -> str:
    """Return the device or link of a fault as text for messages, for example ``device 'gpu-0'``."""
    return f"link '{fault.link}'" if isinstance(fault, LinkOutage) else f"device '{fault.device}'"


def _check_times(start_s: float, end_s: float) -> None:
    if not 0 <= start_s < math.inf or not start_s < end_s:
        raise InputError(
            f"a fault from {start_s:g} s to {end_s:g} s is not allowed",
            valid="give a start of 0 s or more after the start of the run, and a later end",
        )


def with_ended_hangs(faults: Iterable[Fault]) -> tuple[Fault, ...]:
    """Return the faults as they act on a run that keeps copies of the state, in which hangs longer than a limit end.

    After `HANG_LIMIT_S` the process of a device that hangs is ended: its action is lost, and the device is absent for
    the short time until a new process has started.
    """
    found: list[Fault] = []
    for fault in faults:
        if isinstance(fault, Hang) and fault.end_s > (ended_s := fault.start_s + HANG_LIMIT_S):
            found.append(Hang(fault.device, fault.start_s, ended_s))
            found.append(Absence(fault.device, ended_s, ended_s + DETECTION_S + _REPLACED_S))
        else:
            found.append(fault)
    return tuple(found)


def noticed_absences(faults: Sequence[Fault]) -> list[Absence]:
    """Return the absences that last until they are detected, sorted by their detection and device."""
    absences = (fault for fault in faults if isinstance(fault, Absence))
    noticed = (absence for absence in absences if absence.noticed_s < absence.end_s)
    return sorted(noticed, key=lambda absence: (absence.noticed_s, absence.device))


def known_away(absences: Sequence[Absence], time_s: float) -> tuple[str, ...]:
    """Return the sorted names of the devices whose absence has been detected and is not over.

    ``absences`` are the result of `noticed_absences`; ``time_s`` is the time of the run, seconds.
    """
    return tuple(sorted({each.device for each in absences if each.noticed_s <= time_s < each.end_s}))


def return_of(absences: Sequence[Absence], time_s: float) -> tuple[float, tuple[str, ...]]:
    """Return when all devices are back that have left by ``time_s`` or leave before all are back, and their names.

    ``absences`` are the result of `noticed_absences`; times are those of the run, seconds.
    """
    back_s, returning = time_s, set()
    for each in absences:
        if each.noticed_s <= back_s and each.end_s > time_s:
            back_s = max(back_s, each.end_s)
            returning.add(each.device)
    return back_s, tuple(sorted(returning))


def absences_of_nodes(trace: PreemptionTrace, nodes: Mapping[str, str], start_s: float = 0.0) -> tuple[Absence, ...]:
    """Return the absences of devices that stand for nodes of a trace.

    ``nodes`` maps nodes to devices; a device with several nodes is present while any of these nodes is present. The run
    starts at ``start_s`` seconds of the trace, from which absences are counted.
    """
    presences: dict[str, list[Interval]] = {device: [] for device in nodes.values()}
    for node, device in nodes.items():
        presences[device] += trace.presences[node]
    return _absences(presences, start_s)


def absences_in_order(trace: PreemptionTrace, devices: Sequence[str], start_s: float = 0.0) -> tuple[Absence, ...]:
    """Return the absences of devices that the nodes of a trace occupy in the order of arrival.

    A node that arrives occupies the first free one of ``devices``, and frees the device when the node leaves. A node
    that arrives while no device is free is never used. The run starts at ``start_s`` seconds of the trace, from which
    absences are counted.
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
    """Return the gaps between the presences of each device from the start of the run on, sorted by time and device."""
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
