"""Reads the ``effects`` of a scenario on network, compute, memory and transport.

The speed of a device over time may be a CSV file with the header ``time_s,speed``. A speed holds from the time of its
row to the time of the next row, the last speed to the end of the run; before the first row, the speed is 1.
"""

from collections.abc import Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from planner.files.documents import Document
from planner.files.parsing import (
    BitsPerSecond,
    Bytes,
    BytesOrUnlimited,
    NotNegative,
    Number,
    Part,
    Seconds,
    Seed,
    file_entry,
)
from planner.scenario.cluster import Cluster
from planner.scenario.datasheet import DATASHEET, is_gpu
from planner.scenario.effects import (
    TCP,
    WIDE_AREA_TCP,
    ComputeEffects,
    Effects,
    MemoryEffects,
    NetworkEffects,
    Slowdown,
    Straggler,
    TransportEffects,
)
from traces.common.errors import InputError, find_by_name
from traces.common.text import LineError, check_rising, parse_scaled, read_text

# The least segment that every host accepts (RFC 9293, 3.7.1). Simulating a message in smaller windows takes for ever.
_SEGMENT_BYTES = 536

_COLUMNS = ("time_s", "speed")

_VALID_SPEEDS = "give a header 'time_s,speed' and rows such as '10,0.5', speeds relative to the profile"


def _read_speeds(path: Path) -> tuple[tuple[float, float], ...]:
    """Return the (time in seconds, speed) rows of a file."""
    try:
        return _rows(read_text(path, _VALID_SPEEDS))
    except InputError as error:
        raise error.within(str(path)) from error


def _rows(text: str) -> tuple[tuple[float, float], ...]:
    (header_line, header), *rows = (
        (line, [cell.strip() for cell in row.split(",")])
        for line, row in enumerate(text.splitlines(), start=1)
        if row.strip()
    )
    if tuple(header) != _COLUMNS:
        raise LineError(f"the header is '{','.join(header)[:40]}'", line=header_line, valid=_VALID_SPEEDS)
    pieces = []
    for line, cells in rows:
        if len(cells) != len(_COLUMNS):
            raise LineError(f"the row has {len(cells)} columns", line=line, valid=_VALID_SPEEDS)
        time, speed = (parse_scaled(cell, 0, name=name, line=line) for cell, name in zip(cells, _COLUMNS, strict=True))
        pieces.append((time, speed))
    if not pieces:
        raise LineError("no row follows the header", line=header_line, valid=_VALID_SPEEDS)
    check_rising([time for time, _ in pieces], [line for line, _ in rows])
    return tuple(pieces)


@file_entry
class StragglerEntry:
    """A device whose compute takes ``factor`` times as long as profiled."""

    device: str
    factor: Number


@file_entry
class SpeedPiece:
    """The speed of a device from a time on, relative to the profile: ``{from: 10 s, speed: 0.5}``."""

    start: Annotated[Seconds, Field(alias="from")]
    speed: Number


@file_entry
class SlowdownEntry:
    """A device whose speed changes, as ``pieces`` or as the path of a CSV ``file`` with columns time_s and speed."""

    device: str
    file: str | None = None
    pieces: tuple[SpeedPiece, ...] | None = None


@file_entry
class ComputeEntry:
    """Effects on profiled compute times.

    Attributes:
        launch_overhead: Time added to every forward and every backward.
        jitter: Standard deviation of an action's time, relative to its mean.
        seed: Seed of the random numbers of ``jitter``.
        stragglers: Devices with a constant factor on their times.
        slowdowns: Devices whose speed changes over time.
        transfers_block: Whether a device cannot compute while it sends or receives between stages.
    """

    launch_overhead: Seconds = 0.0
    jitter: Number = 0.0
    seed: Seed = 0
    stragglers: tuple[StragglerEntry, ...] = ()
    slowdowns: tuple[SlowdownEntry, ...] = ()
    transfers_block: bool = False


def _compute_effects(entry: ComputeEntry, cluster: Cluster, part: Part) -> ComputeEffects:
    """Return the effects of an entry, which is the value of the key ``compute``."""
    stragglers = _stragglers(entry.stragglers, cluster, part)
    slowdowns = _slowdowns(entry.slowdowns, cluster, part)
    try:
        return ComputeEffects(
            entry.launch_overhead, entry.jitter, entry.seed, stragglers, slowdowns, entry.transfers_block
        )
    except InputError as error:
        raise error.within(part.where("compute")) from None


def _stragglers(entries: Sequence[StragglerEntry], cluster: Cluster, part: Part) -> tuple[Straggler, ...]:
    made = []
    for index, entry in enumerate(entries):
        place = ("compute", "stragglers", index)
        find_by_name(entry.device, cluster.by_name, "device", where=part.where(*place, "device"))
        try:
            made.append(Straggler(entry.device, entry.factor))
        except InputError as error:
            raise error.within(part.where(*place, "factor")) from None
    return tuple(made)


def _slowdowns(entries: Sequence[SlowdownEntry], cluster: Cluster, part: Part) -> tuple[Slowdown, ...]:
    made = []
    for index, entry in enumerate(entries):
        place = ("compute", "slowdowns", index)
        find_by_name(entry.device, cluster.by_name, "device", where=part.where(*place, "device"))
        if (entry.file is None) == (entry.pieces is None):
            where = part.where(*place)
            raise InputError("the slow-down needs its speeds", where=where, valid="give one of 'file' and 'pieces'")
        try:
            if entry.file is not None:
                pieces = _read_speeds(part.path(entry.file))
            else:
                pieces = tuple((piece.start, piece.speed) for piece in entry.pieces or ())
                if not pieces:
                    raise InputError("there are no pieces", valid="give at least one, as {from: 10 s, speed: 0.5}")
            if pieces[0][0] != 0:
                pieces = ((0.0, 1.0), *pieces)
            times_s, speeds = zip(*pieces, strict=True)
            made.append(Slowdown(entry.device, times_s, speeds))
        except InputError as error:
            raise error.within(part.where(*place)) from None
    return tuple(made)


BASES = {"ideal": NetworkEffects(), "tcp": TCP, "tcp-wide-area": WIDE_AREA_TCP}

_KEY = "effects"

# Value of this key that switches all effects off.
NO_EFFECTS = "none"


def network_name(network: NetworkEffects) -> str:
    """Return the name of the base that has these effects, or ``as given`` if there is none."""
    return next((name for name, base in BASES.items() if base == network), "as given")


@file_entry
class NetworkEntry:
    """Effects on the network: a named base, and values that replace values of the base.

    Attributes:
        base: ``tcp-wide-area`` (the default: measured on Linux, with windows of idle connections that stay open, as on
            the hosts of the emulated links), ``tcp`` (the same with Linux's default settings) or ``ideal`` (no
            effects).
        share: Share of a link's nominal rate that a training job reaches.
        payload_efficiency: Share of payload in a link's bits.
        window: Limit on a connection's window, or ``unlimited``.
        ready_notice: Whether a transfer waits for the receiver's notice that it is ready.
        cold_start: Whether the window of a new or idle connection starts small (TCP slow start).
        idle: Minimum retransmission timeout, after which an idle connection's window shrinks.
        initial_window: Window of a new connection.
        handover: Time that software takes to hand over a message, in addition to the links' latency.
    """

    base: Literal["ideal", "tcp", "tcp-wide-area"] = "tcp-wide-area"
    share: Number | None = None
    payload_efficiency: Number | None = None
    window: Annotated[BytesOrUnlimited, Field(ge=_SEGMENT_BYTES)] | None = None
    ready_notice: bool | None = None
    cold_start: bool | None = None
    idle: Seconds | None = None
    initial_window: Annotated[Bytes, Field(ge=_SEGMENT_BYTES)] | None = None
    handover: Seconds | None = None


class _OrBase:
    """Annotation that accepts the name of a base as short form of ``{base: NAME}``."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def entry(value: object) -> object:
            return {"base": value} if isinstance(value, str) else value

        return core_schema.no_info_before_validator_function(entry, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [{"enum": list(BASES)}, handler(schema)]}


def network_effects(entry: NetworkEntry) -> NetworkEffects:
    """Return the effects of an entry."""
    changes = {
        "share": entry.share,
        "payload_efficiency": entry.payload_efficiency,
        "window_bytes": entry.window,
        "ready_notice": entry.ready_notice,
        "cold_start": entry.cold_start,
        "idle_s": entry.idle,
        "handover_s": entry.handover,
        "initial_window_bytes": None if entry.initial_window is None else float(entry.initial_window),
    }
    given: dict[str, Any] = {key: value for key, value in changes.items() if value is not None}
    return replace(BASES[entry.base], **given)


@file_entry
class MemoryEntry:
    """Memory of a framework on each device.

    Attributes:
        framework: Constant bytes on each device.
        workspace_share: Ratio of the bytes that a layer's backward holds only while it runs, to the bytes of the
            activations that the layer saves.
    """

    framework: Bytes = 0
    workspace_share: NotNegative = 0.0


@file_entry
class TransportEntry:
    """How tensors leave a GPU.

    Attributes:
        nccl: Whether NCCL carries messages between GPUs of one region, and inside tensor-parallel groups; otherwise
            gloo does.
        copies: Whether the copies between GPU and host take time, for messages that gloo carries: at the rate of each
            kind in the datasheet.
        copy_rate: Another rate of these copies, each way.
    """

    nccl: bool = True
    copies: bool = False
    copy_rate: BitsPerSecond | None = None


def _transport_effects(entry: TransportEntry, cluster: Cluster, part: Part) -> TransportEffects:
    if entry.copies and entry.copy_rate is None:
        for device in cluster.devices:
            if is_gpu(device.kind) and device.kind not in DATASHEET:
                raise InputError(
                    f"the datasheet has no rate of copies for the kind '{device.kind}' of device '{device.name}'",
                    where=part.where("transport", "copies"),
                    valid="give the rate of its copies, for example 'copy_rate: 100 Gbit/s'",
                )
    try:
        return TransportEffects(entry.nccl, entry.copies or entry.copy_rate is not None, entry.copy_rate)
    except InputError as error:
        raise error.within(part.where("transport", "copy_rate")) from None


@file_entry
class EffectsEntry:
    """Effects on network (``ideal``, ``tcp``, ``tcp-wide-area`` or single values), compute, memory and transport."""

    network: Annotated[NetworkEntry, _OrBase()] = field(default_factory=NetworkEntry)
    compute: ComputeEntry = field(default_factory=ComputeEntry)
    memory: MemoryEntry = field(default_factory=MemoryEntry)
    transport: TransportEntry = field(default_factory=TransportEntry)


def read_effects(document: Document, cluster: Cluster) -> Effects:
    """Return the effects of a scenario, which name devices of the cluster; those of TCP if the scenario says nothing.

    ``none`` in place of the effects switches all of them off.
    """
    given = document.value.get(_KEY, {})
    if given == NO_EFFECTS:
        return Effects()
    if _KEY not in document.value:
        return Effects(network=network_effects(NetworkEntry()))
    part = Part(document, _KEY)
    entry = part.parse(EffectsEntry)
    try:
        network = network_effects(entry.network)
    except InputError as error:
        raise error.within(part.where("network")) from None
    memory = MemoryEffects(entry.memory.framework, entry.memory.workspace_share)
    compute = _compute_effects(entry.compute, cluster, part)
    transport = _transport_effects(entry.transport, cluster, part)
    try:
        return Effects(network, compute, memory, transport)
    except InputError as error:
        raise error.within(part.where()) from None
