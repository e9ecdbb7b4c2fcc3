"""A trace of pre-empted nodes played on the devices of a cluster."""

import math
from collections.abc import Iterable, Mapping, Sequence

from planner.scenario.faults import Absence
from traces.preemption.trace import Interval, PreemptionTrace


def absences_of_nodes(trace: PreemptionTrace, nodes: Mapping[str, str], start_s: float = 0.0) -> tuple[Absence, ...]:
    """Return when devices are gone if each is there exactly when one of its nodes is.

    Args:
        trace: Who is there when.
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
        trace: Who is there when.
        devices: Those that nodes can take.
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
    """The gaps between the presences of each device, from the start of the run on; in the order of time."""
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
