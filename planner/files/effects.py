"""The ``effects`` of a scenario: what happens to bytes, compute and memory beside the nominal values."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from planner.files.parsing import STRICT, Bytes, BytesOrUnlimited, NotNegative, Number, Part, Seconds, Seed
from planner.scenario.cluster import Cluster
from planner.scenario.effects import (
    TCP,
    WIDE_AREA_TCP,
    ComputeEffects,
    Effects,
    MemoryEffects,
    NetworkEffects,
    Slowdown,
    Straggler,
)
from traces.common.errors import InputError
from traces.common.lines import LineError, check_rising, parse_scaled
from traces.common.names import find_by_name
from traces.common.text import read_text

COLUMNS = ("time_s", "speed")

_VALID = "give a header 'time_s,speed' and rows such as '10,0.5', speeds relative to the profile"


def read_speeds(path: Path) -> tuple[tuple[float, float], ...]:
    """Return the (time in seconds, speed) rows of a file.

    Raises:
        InputError: The file cannot be read or is wrong; the error names the file and, where there is one, the line.
    """
    try:
        return _rows(read_text(path, _VALID))
    except InputError as error:
        raise error.within(str(path)) from error


def from_the_start(pieces: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Return (time, speed) pieces with one of speed 1 before the first, where that starts later than at 0 s."""
    return tuple(pieces) if pieces and pieces[0][0] == 0 else ((0.0, 1.0), *pieces)


def _rows(text: str) -> tuple[tuple[float, float], ...]:
    (header_line, header), *rows = (
        (line, [cell.strip() for cell in row.split(",")])
        for line, row in enumerate(text.splitlines(), start=1)
        if row.strip()
    )
    if tuple(header) != COLUMNS:
        raise LineError(f"the header is '{','.join(header)[:40]}'", line=header_line, valid=_VALID)
    pieces = []
    for line, cells in rows:
        if len(cells) != len(COLUMNS):
            raise LineError(f"the row has {len(cells)} columns", line=line, valid=_VALID)
        time, speed = (parse_scaled(cell, 0, name=name, line=line) for cell, name in zip(cells, COLUMNS, strict=True))
        pieces.append((time, speed))
    if not pieces:
        raise LineError("no row follows the header", line=header_line, valid=_VALID)
    check_rising([time for time, _ in pieces], [line for line, _ in rows])
    return tuple(pieces)


@dataclass(frozen=True, kw_only=True)
class StragglerEntry:
    """A device whose compute takes ``factor`` times as long as profiled."""

    device: str
    factor: Number

    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class SpeedPiece:
    """The speed of a device from a time on, relative to the profile: ``{from: 10 s, speed: 0.5}``."""

    start: Annotated[Seconds, Field(alias="from")]
    speed: Number

    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class SlowdownEntry:
    """A device whose speed changes, as ``pieces`` or as the path of a CSV ``file`` with columns time_s and speed."""

    device: str
    file: str | None = None
    pieces: tuple[SpeedPiece, ...] | None = None

    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class ComputeEntry:
    """What happens to profiled times.

    Attributes:
        launch_overhead: Added to every forward and every backward.
        jitter: Standard deviation of an action's time, as a share of its mean.
        seed: Of the jitter.
        stragglers: Devices that always take longer.
        slowdowns: Devices whose speed changes.
        transfers_block: Whether a device computes nothing while it sends or receives between stages.
    """

    launch_overhead: Seconds = 0.0
    jitter: Number = 0.0
    seed: Seed = 0
    stragglers: tuple[StragglerEntry, ...] = ()
    slowdowns: tuple[SlowdownEntry, ...] = ()
    transfers_block: bool = False

    __pydantic_config__ = STRICT


def compute_effects(entry: ComputeEntry, cluster: Cluster, part: Part) -> ComputeEffects:
    """Return the effects that an entry denotes, which stands in the ``effects``.

    Raises:
        InputError: A value is out of range, a device is not there, or a file is wrong.
    """
    stragglers = _stragglers(entry.stragglers, cluster, part)
    slowdowns = _slowdowns(entry.slowdowns, cluster, part)
    try:
        return ComputeEffects(
            launch_overhead_s=entry.launch_overhead,
            jitter=entry.jitter,
            seed=entry.seed,
            stragglers=stragglers,
            slowdowns=slowdowns,
            transfers_block=entry.transfers_block,
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
                pieces = read_speeds(part.path(entry.file))
            else:
                pieces = tuple((piece.start, piece.speed) for piece in entry.pieces or ())
                if not pieces:
                    raise InputError("there are no pieces", valid="give at least one, as {from: 10 s, speed: 0.5}")
            times_s, speeds = zip(*from_the_start(pieces), strict=True)
            made.append(Slowdown(entry.device, times_s, speeds))
        except InputError as error:
            raise error.within(part.where(*place)) from None
    return tuple(made)


BASES = {"ideal": NetworkEffects(), "tcp": TCP, "tcp-wide-area": WIDE_AREA_TCP}


@dataclass(frozen=True, kw_only=True)
class NetworkEntry:
    """The effects of a base, and those that differ from it.

    Attributes:
        base: ``ideal`` (none), ``tcp`` (what was measured of Linux as it comes) or ``tcp-wide-area`` (the same where
            windows stay open on idle connections, as on the hosts of the emulated links).
        share: Share of a link's measured rate that a training job reaches.
        payload_efficiency: Share of a link's bits that is payload.
        window: Of one connection, or ``unlimited``.
        ready_notice: Whether a transfer waits for the receiver's notice.
        cold_start: Whether an idle connection starts slowly.
        idle: After how long a connection counts as idle.
        initial_window: With which an idle connection starts.
    """

    base: Literal["ideal", "tcp", "tcp-wide-area"] = "ideal"
    share: Number | None = None
    payload_efficiency: Number | None = None
    window: BytesOrUnlimited | None = None
    ready_notice: bool | None = None
    cold_start: bool | None = None
    idle: Seconds | None = None
    initial_window: Bytes | None = None

    __pydantic_config__ = STRICT


class OrBase:
    """Lets the name of a base alone stand for the entry that only names it."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def entry(value: object) -> object:
            return {"base": value} if isinstance(value, str) else value

        return core_schema.no_info_before_validator_function(entry, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [{"enum": list(BASES)}, handler(schema)]}


def network_effects(entry: NetworkEntry) -> NetworkEffects:
    """Return the effects that an entry denotes.

    Raises:
        InputError: A value is out of range.
    """
    changes = {
        "share": entry.share,
        "payload_efficiency": entry.payload_efficiency,
        "window_bytes": entry.window,
        "ready_notice": entry.ready_notice,
        "cold_start": entry.cold_start,
        "idle_s": entry.idle,
        "initial_window_bytes": None if entry.initial_window is None else float(entry.initial_window),
    }
    given: dict[str, Any] = {key: value for key, value in changes.items() if value is not None}
    return replace(BASES[entry.base], **given)


@dataclass(frozen=True, kw_only=True)
class MemoryEntry:
    """What a framework takes of each device's memory.

    Attributes:
        framework: Whatever the device computes.
        workspace_share: While one layer's backward runs, relative to the activations that the layer keeps.
    """

    framework: Bytes = 0
    workspace_share: NotNegative = 0.0

    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class EffectsEntry:
    """Effects on the network (``ideal``, ``tcp``, ``tcp-wide-area``, or one by one), on compute and on memory."""

    network: Annotated[NetworkEntry, OrBase()] = field(default_factory=NetworkEntry)
    compute: ComputeEntry = field(default_factory=ComputeEntry)
    memory: MemoryEntry = field(default_factory=MemoryEntry)

    __pydantic_config__ = STRICT


def read_effects(part: Part, cluster: Cluster) -> Effects:
    """Return the effects.

    Raises:
        InputError: A value is out of range, a device is not there, or a file is wrong; with its place.
    """
    entry = part.parse(EffectsEntry)
    try:
        network = network_effects(entry.network)
    except InputError as error:
        raise error.within(part.where("network")) from None
    memory = MemoryEffects(entry.memory.framework, entry.memory.workspace_share)
    return Effects(network, compute_effects(entry.compute, cluster, part), memory)
