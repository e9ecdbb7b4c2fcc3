"""The ``cluster`` of a scenario, resolved to devices and links."""

import math
from itertools import chain

from planner.files.cluster_entries import ClusterEntry, DeviceEntry, LinkEntry, SizeCurveEntry
from planner.files.parts import Part
from planner.files.trace import read_trace_entry
from planner.scenario.cluster import Cluster, ClusterError, Device, Link
from planner.scenario.datasheet import DATASHEET, DeviceKind, find_kind
from planner.scenario.size_curve import SizeCurve
from traces.common.errors import InputError
from traces.common.names import unknown_name


def read_cluster(part: Part) -> tuple[Cluster, dict[str, DeviceKind]]:
    """Return the cluster, and the kinds that its devices name.

    Raises:
        InputError: The first thing that is wrong, with its place.
    """
    entry = part.parse(ClusterEntry)
    kinds = _device_kinds(entry, part)
    return _cluster(entry, kinds, part), kinds


def _device_kinds(entry: ClusterEntry, part: Part) -> dict[str, DeviceKind]:
    """The kinds that the devices name, from the scenario or from the datasheet."""
    own = {
        name: DeviceKind(name, {"fp32": kind.peak}, kind.memory, kind.memory_bandwidth, "the scenario")
        for name, kind in entry.kinds.items()
    }
    kinds = {}
    for index, device in enumerate(entry.devices):
        if device.kind in own:
            kinds[device.kind] = own[device.kind]
            continue
        try:
            kinds[device.kind] = find_kind(device.kind)
        except InputError:
            where = part.where("devices", index, "kind")
            raise unknown_name("device kind", device.kind, [*own, *DATASHEET], where=where) from None
    return kinds


def _cluster(entry: ClusterEntry, kinds: dict[str, DeviceKind], part: Part) -> Cluster:
    devices = tuple(_device(device, kinds[device.kind]) for device in entry.devices)
    links = [_links(link, part, index) for index, link in enumerate(entry.links)]
    # One entry can stand for two links.
    entry_of_link = [index for index, made in enumerate(links) for _ in made]
    try:
        return Cluster(devices, tuple(chain.from_iterable(links)))
    except ClusterError as error:
        place = error.location
        if place[0] == "links":
            place = ("links", entry_of_link[int(place[1])], *place[2:])
        raise InputError(error.problem, part.where(*place), error.valid) from None


def _device(entry: DeviceEntry, kind: DeviceKind) -> Device:
    memory_bytes = kind.memory_bytes if entry.memory is None else entry.memory
    return Device(
        entry.name,
        entry.kind,
        entry.region,
        memory_bytes,
        entry.price_usd_per_hour,
        entry.host or "",
        math.inf if entry.interface is None else entry.interface,
    )


def _links(entry: LinkEntry, part: Part, index: int) -> list[Link]:
    where = part.where("links", index)
    one_way = (entry.source, entry.target) if entry.source and entry.target else None
    inside = (entry.inside, entry.inside) if entry.inside else None
    ends = [pair for pair in (entry.between, one_way, inside) if pair is not None]
    if len(ends) != 1 or (entry.source is None) != (entry.target is None):
        raise InputError(
            "the link does not say what it joins",
            where=where,
            valid="give one of 'between: [a, b]', 'from: a' with 'to: b', and 'inside: a'",
        )
    if entry.between is not None and entry.between[0] == entry.between[1]:
        inside_it = f"write 'inside: {entry.between[0]}'"
        raise InputError(f"the link joins '{entry.between[0]}' with itself", where=where, valid=inside_it)
    trace = None
    if entry.trace is not None:
        trace = read_trace_entry(entry.trace, part.document, (*part.location, "links", index, "trace"))
    if entry.bandwidth is not None and trace is not None:
        raise InputError(
            "the link gives both 'bandwidth' and 'trace'",
            where=where,
            valid="the trace says the bandwidth; to rescale it, give it a 'mean'",
        )
    curve = _size_curve(entry.size_curve, part, index)
    bandwidth_bps = trace.mean_bps if trace is not None else entry.bandwidth
    if bandwidth_bps is None:
        if curve is None:
            raise InputError("the link has no bandwidth", where=where, valid="add 'bandwidth: 100 Mbit/s' or a 'trace'")
        bandwidth_bps = curve.ceiling_bps
    pairs = [ends[0], ends[0][::-1]] if entry.between is not None else [ends[0]]
    return [
        Link(a, b, bandwidth_bps, entry.latency, trace, entry.price_usd_per_gb, curve, entry.jitter, entry.loss)
        for a, b in pairs
    ]


def _size_curve(entry: SizeCurveEntry | None, part: Part, index: int) -> SizeCurve | None:
    if entry is None:
        return None
    curve = SizeCurve(entry.quadratic, entry.linear, entry.constant, entry.ceiling)
    for size_bytes in (1e3, 1e6, 1e9):
        rate_bps = curve.rate_bps(size_bytes)
        if not 0 < rate_bps < math.inf:
            raise InputError(
                f"a message of {size_bytes / 1e6:g} MB gets {rate_bps:g} bit/s",
                where=part.where("links", index, "size_curve"),
                valid="the curve gives GB/s above zero for every size, and its ceiling is above zero",
            )
    return curve
