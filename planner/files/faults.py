"""Reads the ``faults`` of a scenario: single faults, or the absences in a pre-emption trace."""

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Annotated

from pydantic import Field

from planner.files.parsing import Part, Seconds, file_entry
from planner.scenario.cluster import Cluster
from planner.scenario.faults import (
    Absence,
    Fault,
    Hang,
    LinkOutage,
    absences_in_order,
    absences_of_nodes,
    find_overlap,
    place_of,
)
from traces.common.errors import InputError, find_by_name, unknown_name
from traces.preemption.files import PREEMPTION_FORMATS, read_preemption


@file_entry
class FaultEntry:
    """A device that leaves or hangs, a link that is out, or a trace of pre-emptions. Times are from the run's start.

    Attributes:
        device: Name of the device.
        leaves: Time at which the device leaves.
        returns: Time at which the device returns; never if absent.
        hangs: Time at which the device stops computing.
        goes_on: Time at which the device continues; never if absent.
        link: Name of the link, ``source->target``.
        out: Time from which the link carries nothing.
        back: Time from which the link carries bytes again.
        preemption: Path of a pre-emption trace, relative to the scenario.
        format: Format of the trace; recognised by the file's content if absent.
        start: Time of the trace at which the run starts, ``from`` in the file.
        devices: Devices that nodes of the trace occupy; a node that arrives takes the first free one. All if absent.
        nodes: Mapping from a node of the trace to a device, in place of ``devices``.
    """

    device: str | None = None
    leaves: Seconds | None = None
    returns: Seconds | None = None
    hangs: Seconds | None = None
    goes_on: Seconds | None = None
    link: str | None = None
    out: Seconds | None = None
    back: Seconds | None = None
    preemption: str | None = None
    format: str | None = None
    start: Annotated[Seconds | None, Field(alias="from")] = None
    devices: tuple[str, ...] | None = None
    nodes: dict[str, str] | None = None


# Limit on the nodes that a message lists; a trace may have hundreds.
_NODES_LISTED = 20

# Required and optional keys of each kind of fault.
_SHAPES: tuple[tuple[set[str], set[str]], ...] = (
    ({"device", "leaves"}, {"returns"}),
    ({"device", "hangs"}, {"goes_on"}),
    ({"link", "out", "back"}, set()),
    ({"preemption"}, {"format", "start", "devices"}),
    ({"preemption"}, {"format", "start", "nodes"}),
)
_VALID = (
    "give 'device' with 'leaves' (and 'returns'), 'device' with 'hangs' (and 'goes_on'), 'link' with 'out' and 'back', "
    "or 'preemption' (and 'format', 'from', one of 'devices' and 'nodes')"
)


def read_faults(part: Part, cluster: Cluster) -> tuple[Fault, ...]:
    """Return the faults in the order of their entries; refuse unknown devices and links, and overlapping faults."""
    faults: list[Fault] = []
    entry_of_fault: list[int] = []
    entries: tuple[FaultEntry, ...] = part.parse(tuple[FaultEntry, ...])
    for index, entry in enumerate(entries):
        made = _faults(entry, cluster, part, index)
        faults += made
        entry_of_fault += [index] * len(made)
    overlap = find_overlap(faults)
    if overlap is not None:
        earlier, later = overlap
        raise InputError(
            f"{place_of(faults[later])} has two faults at the same time, from {faults[earlier].start_s:g} s and from "
            f"{faults[later].start_s:g} s",
            where=part.where(entry_of_fault[later]),
            valid=f"the other one is in faults[{entry_of_fault[earlier]}]: let one end before the other starts",
        )
    return tuple(faults)


def _faults(entry: FaultEntry, cluster: Cluster, part: Part, index: int) -> Sequence[Fault]:
    given = {field.name for field in fields(entry) if getattr(entry, field.name) is not None}
    if not any(needed <= given <= needed | allowed for needed, allowed in _SHAPES):
        found = ", ".join(f"'{'from' if name == 'start' else name}'" for name in sorted(given)) or "nothing"
        raise InputError(f"a fault of {found} is not known", where=part.where(index), valid=_VALID)
    if entry.preemption is not None:
        return _preemptions(entry, entry.preemption, cluster, part, index)
    if entry.device is not None:
        find_by_name(entry.device, cluster.by_name, "device", where=part.where(index, "device"))
    if entry.link is not None:
        links = {link.name: link for link in cluster.links}
        find_by_name(entry.link, links, "link", where=part.where(index, "link"))
    try:
        return [_single(entry)]
    except InputError as error:
        raise error.within(part.where(index)) from None


def _single(entry: FaultEntry) -> Fault:
    if entry.link is not None and entry.out is not None and entry.back is not None:
        return LinkOutage(entry.link, entry.out, entry.back)
    assert entry.device is not None
    if entry.leaves is not None:
        return Absence(entry.device, entry.leaves, math.inf if entry.returns is None else entry.returns)
    assert entry.hangs is not None
    return Hang(entry.device, entry.hangs, math.inf if entry.goes_on is None else entry.goes_on)


def _preemptions(entry: FaultEntry, file: str, cluster: Cluster, part: Part, index: int) -> Sequence[Absence]:
    if entry.format is not None:
        find_by_name(entry.format, PREEMPTION_FORMATS, "pre-emption format", where=part.where(index, "format"))
    try:
        trace = read_preemption(part.path(file), entry.format)
    except InputError as error:
        raise error.within(part.where(index, "preemption")) from None
    start_s = entry.start or 0.0
    if entry.nodes is None:
        devices = entry.devices if entry.devices is not None else tuple(cluster.by_name)
        for number, device in enumerate(devices):
            find_by_name(device, cluster.by_name, "device", where=part.where(index, "devices", number))
        return absences_in_order(trace, devices, start_s)
    for node, device in entry.nodes.items():
        where = part.where(index, "nodes", node)
        find_by_name(device, cluster.by_name, "device", where=where)
        if node not in trace.presences:
            raise unknown_name("node", node, trace.nodes[:_NODES_LISTED], where=where)
    return absences_of_nodes(trace, entry.nodes, start_s)
