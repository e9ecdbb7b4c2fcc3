"""Reads the ``cluster`` of a scenario, resolved to devices and links, and the measured tables of device kinds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from itertools import chain, permutations
from pathlib import Path
from typing import Annotated

from pydantic import Field

from planner.files.documents import Document, Location
from planner.files.parsing import (
    BitsPerSecond,
    Bytes,
    BytesPerSecond,
    FlopPerSecond,
    Name,
    NotNegative,
    Number,
    Part,
    Positive,
    Seconds,
    file_entry,
    parse,
)
from planner.files.trace import TraceEntry, read_trace_entry
from planner.scenario.cluster import Cluster, ClusterError, Device, Link
from planner.scenario.datasheet import DATASHEET, INTERCONNECTS, REACHED_SHARE, DeviceKind, find_kind
from planner.scenario.kind_table import KindTable
from planner.scenario.size_curve import SizeCurve
from planner.scenario.training import PRECISIONS
from traces.common.errors import InputError, find_by_name, unknown_name
from traces.common.units import parse_bytes_per_second

_Sizes = Annotated[tuple[Positive, ...], Field(min_length=1)]


@file_entry
class DeviceEntry:
    """A device of the cluster.

    Attributes:
        name: Name of the device, unique in the cluster.
        kind: Name of a kind of the datasheet or of the scenario's own kinds.
        region: Name of the region that the device is in.
        host: Name of the machine that holds the device; if absent, the device is alone in its machine.
        interface: Rate of the host's network interface in each direction; no limit if absent.
        memory: Memory of the device; the memory of its kind if absent.
        price_usd_per_hour: Rent in US dollars per hour.
    """

    name: Name
    kind: str
    region: Name
    host: Name | None = None
    interface: BitsPerSecond | None = None
    memory: Bytes | None = None
    price_usd_per_hour: NotNegative = 0.0


@file_entry
class HostEntry:
    """A machine with several equal devices, which are named ``NAME-0``, ``NAME-1`` and so on.

    Attributes:
        name: Name of the machine.
        kind: Kind of its devices: a name of the datasheet or of the scenario's own kinds.
        region: Name of the region that the machine is in.
        devices: Number of its devices.
        interconnect: How they are connected: a name of the datasheet, such as ``nvlink-3`` or ``pcie-4``, or the rate
            that each device reaches in each direction.
        interface: Rate of the network interface that all its devices share, in each direction; no limit if absent.
        memory: Memory of each device; the memory of its kind if absent.
        price_usd_per_hour: Rent of each device in US dollars per hour.
    """

    name: Name
    kind: str
    region: Name
    devices: Annotated[int, Field(ge=1, le=64)]
    interconnect: str
    interface: BitsPerSecond | None = None
    memory: Bytes | None = None
    price_usd_per_hour: NotNegative = 0.0


@file_entry
class KindEntry:
    """A device kind that is not in the datasheet; ``peak`` is that of fp32, or a peak for each precision."""

    peak: FlopPerSecond | dict[str, FlopPerSecond]
    memory: Bytes
    memory_bandwidth: BytesPerSecond


@file_entry
class KindTableEntry:
    """A measured table of one device kind in one precision.

    Attributes:
        device: Name of the measured device, as torch gives it.
        source: How the table was measured, in words.
        launch: Time to launch a kernel.
        memory_bandwidth: Bytes that a copy reads and writes in a second.
        rows: Rows of the first matrix of each measured product.
        inner: Columns of the first matrix, which are the rows of the second one.
        outer: Columns of the second matrix.
        rates: Rate of each product: a list for each of ``rows`` of lists for each of ``inner``, one rate for each of
            ``outer``.
    """

    kind: Name
    device: str
    precision: str
    source: str
    launch: Seconds
    memory_bandwidth: BytesPerSecond
    rows: _Sizes
    inner: _Sizes
    outer: _Sizes
    rates: tuple[tuple[tuple[FlopPerSecond, ...], ...], ...]


@file_entry
class SizeCurveEntry:
    """The rate of one message as a function of its size: GB/s as a polynomial of log2(size in MB), up to a ceiling.

    Attributes:
        quadratic: Coefficient of the square, GB/s.
        linear: Coefficient of the linear term, GB/s.
        constant: Rate of a message of 1 MB, GB/s.
        ceiling: Highest rate of any message.
    """

    quadratic: Number = 0.0
    linear: Number = 0.0
    constant: Number
    ceiling: BitsPerSecond


@file_entry
class LinkEntry:
    """A link in both directions (``between``), in one direction (``from``, ``to``), or inside a region or host.

    Ends are regions, hosts or devices. With a ``size_curve`` and no bandwidth, the curve's ceiling is the bandwidth.

    Attributes:
        jitter: Largest delay of a packet in addition to the latency.
        loss: Share of the packets that are lost, below 1.
    """

    between: tuple[str, str] | None = None
    source: Annotated[str | None, Field(alias="from")] = None
    target: Annotated[str | None, Field(alias="to")] = None
    inside: str | None = None
    bandwidth: BitsPerSecond | None = None
    latency: Seconds
    jitter: Seconds = 0.0
    loss: Number = 0.0
    trace: TraceEntry | None = None
    size_curve: SizeCurveEntry | None = None
    price_usd_per_gb: NotNegative = 0.0


@file_entry
class ClusterEntry:
    """Devices, alone or in ``hosts``, links, and device kinds that are not in the datasheet (``kinds``)."""

    devices: tuple[DeviceEntry, ...] = ()
    hosts: tuple[HostEntry, ...] = ()
    links: tuple[LinkEntry, ...] = ()
    kinds: dict[str, KindEntry] = field(default_factory=dict)


def read_cluster(part: Part) -> tuple[Cluster, dict[str, DeviceKind]]:
    """Return the cluster, and the kinds of its devices by name."""
    entry = part.parse(ClusterEntry)
    kinds = _device_kinds(entry, part)
    return _cluster(entry, kinds, part), kinds


def _device_kinds(entry: ClusterEntry, part: Part) -> dict[str, DeviceKind]:
    """Return the kinds of the devices by name; the scenario's own kinds take precedence over the datasheet."""
    own = {
        name: DeviceKind(
            name, _peaks(kind, part.where("kinds", name, "peak")), kind.memory, kind.memory_bandwidth, "the scenario"
        )
        for name, kind in entry.kinds.items()
    }
    kinds = {}
    named = [("devices", index, each.kind) for index, each in enumerate(entry.devices)]
    for key, index, kind in [*named, *(("hosts", index, each.kind) for index, each in enumerate(entry.hosts))]:
        if kind in own:
            kinds[kind] = own[kind]
            continue
        try:
            kinds[kind] = find_kind(kind)
        except InputError:
            where = part.where(key, index, "kind")
            unknown = unknown_name("device kind", kind, [*own, *DATASHEET], where=where)
            valid = f"{unknown.valid}; or describe it under 'kinds' of the cluster"
            raise InputError(unknown.problem, where=where, valid=valid) from None
    return kinds


def _peaks(entry: KindEntry, where: str) -> Mapping[str, float]:
    """Return the peak of each precision in FLOP/s."""
    if not isinstance(entry.peak, dict):
        return {"fp32": entry.peak}
    for precision in entry.peak:
        find_by_name(precision, PRECISIONS, "precision", where=where)
    if "fp32" not in entry.peak:
        raise InputError("the kind has no peak in fp32", where=where, valid="add 'fp32: 19.5 TFLOP/s'")
    return entry.peak


def _cluster(entry: ClusterEntry, kinds: dict[str, DeviceKind], part: Part) -> Cluster:
    devices = [_device(each, each.name, each.host or "", kinds[each.kind]) for each in entry.devices]
    links = [_links(link, part, index) for index, link in enumerate(entry.links)]
    # The place in the file of each device and link: an entry with `between` makes two links, a host several devices.
    places: dict[str, list[Location]] = {
        "devices": [("devices", index) for index in range(len(devices))],
        "links": [("links", index) for index, made in enumerate(links) for _ in made],
    }
    for index, host in enumerate(entry.hosts):
        devices += [_device(host, name, host.name, kinds[host.kind]) for name in _names(host)]
        links.append(_inside(host, part.where("hosts", index, "interconnect")))
        places["devices"] += [("hosts", index)] * host.devices
        places["links"] += [("hosts", index)] * len(links[-1])
    try:
        return Cluster(tuple(devices), tuple(chain.from_iterable(links)))
    except ClusterError as error:
        key, *inner = error.location
        place = (*places[str(key)][int(inner[0])], *inner[1:]) if inner else (key,)
        raise InputError(error.problem, part.where(*place), error.valid) from None


def _names(entry: HostEntry) -> list[str]:
    return [f"{entry.name}-{number}" for number in range(entry.devices)]


def _inside(entry: HostEntry, where: str) -> list[Link]:
    """Return a link from each device of a host to each other one, since they do not share the interconnect's rate."""
    bandwidth_bps, latency_s = _interconnect(entry, where)
    return [Link(source, target, bandwidth_bps, latency_s) for source, target in permutations(_names(entry), 2)]


def _interconnect(entry: HostEntry, where: str) -> tuple[float, float]:
    """Return the rate in bits per second and the latency in seconds from one device of a host to another."""
    kind = INTERCONNECTS.get(entry.interconnect)
    if kind is not None:
        return REACHED_SHARE * kind.bandwidth_bps, kind.latency_s
    try:
        return 8 * parse_bytes_per_second(entry.interconnect), 0.0
    except InputError:
        known = ", ".join(INTERCONNECTS)
        raise InputError(
            f"there is no interconnect '{entry.interconnect}'",
            where=where,
            valid=f"choose among {known}, or give the rate of a device, such as '100 GB/s'",
        ) from None


def _device(entry: DeviceEntry | HostEntry, name: str, host: str, kind: DeviceKind) -> Device:
    memory_bytes = kind.memory_bytes if entry.memory is None else entry.memory
    interface_bps = math.inf if entry.interface is None else entry.interface
    price = entry.price_usd_per_hour
    return Device(name, entry.kind, entry.region, memory_bytes, price, host, interface_bps)


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
            valid="remove 'bandwidth': the trace has the rates; to rescale them, give it a 'mean'",
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
                f"the curve gives a message of {size_bytes / 1e6:g} MB a rate of {rate_bps:g} bit/s",
                where=part.where("links", index, "size_curve"),
                valid="give a curve of GB/s above zero for every size, and a ceiling above zero",
            )
    return curve


def read_kind_table(path: Path) -> KindTable:
    """Return the table in a file.

    Raises:
        InputError: The file cannot be read, or is no such table.
    """
    document = Document(path)
    entry = parse(KindTableEntry, document, document.value)
    find_by_name(entry.precision, PRECISIONS, "precision", where=document.where(("precision",)))
    try:
        return KindTable(
            entry.kind,
            entry.device,
            entry.precision,
            entry.rows,
            entry.inner,
            entry.outer,
            entry.rates,
            entry.launch,
            entry.memory_bandwidth,
            entry.source,
        )
    except InputError as error:
        raise InputError(error.problem, document.where((error.where,)), error.valid) from None


def read_kind_tables(
    paths: Sequence[tuple[Path, str]], kinds: Sequence[str], precision: str, where: str
) -> Mapping[str, KindTable]:
    """Return the tables of a model by kind; their source begins with the name of the file.

    Args:
        paths: The files, each with the place that names it.
        kinds: Kinds of the cluster's devices; tables of other kinds are left out.
        precision: The precision of training.
        where: The place of the list of files.

    Raises:
        InputError: A file is no table, is of another precision or of a kind that has one already, or none of them is of
            a kind of the cluster.
    """
    tables: dict[str, KindTable] = {}
    for path, place in paths:
        try:
            table = read_kind_table(path)
        except InputError as error:
            raise error if error.where else error.within(place) from None
        if table.precision != precision:
            raise InputError(
                f"the table of '{table.kind}' is for {table.precision}, but the model is trained in {precision}",
                where=place,
                valid=f"give a table that was measured in {precision}, or train in {table.precision}",
            )
        if table.kind in tables:
            raise InputError(f"there are two tables of the kind '{table.kind}'", place, "give one for each kind")
        tables[table.kind] = replace(table, source=f"{path.name}: {table.source}")
    if tables and not set(tables) & set(kinds):
        raise InputError(
            f"no device of the cluster is of a kind that has a table: {', '.join(tables)}",
            where=where,
            valid=f"measure one of {', '.join(kinds)}: 'ropebridge profile kind --kind NAME'",
        )
    return {kind: table for kind, table in tables.items() if kind in kinds}
